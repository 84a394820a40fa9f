"""Files, folders and links of one role as a whole: which differ, and how to set them right.

Sent to a host as it is (standard library only) and run there in one of two ways:

    check ENTRIES   print {"differs": {path: reason}, "refused": [error, ...]}
    apply           read entries with content from standard input; write candidates beside their
                    places, validate all of them, and only then rename them

An entry is {"kind": "file" | "directory" | "link", "path", "owner", "group", "mode"
(octal text)}; a file has "sha256" and, for apply, "content" (base64) and "validate" (argv in which
"{}" stands for the candidate); a link has "target"; a directory with "exclusive" holds nothing but
listed entries; a file with "marker" replaces
only a file that holds this text or, with "take_over", keeps the other one as NAME.original first.
Exit codes: 0 done, 1 a candidate was refused or a place is taken, 2 wrong usage.
"""

from __future__ import annotations

import base64
import grp
import hashlib
import json
import os
import pwd
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

Entry = dict[str, Any]
VALIDATOR_DEADLINE_S = 60
BYTECODE = "__pycache__"


class Refused(Exception):
    """A candidate is not valid, or something else stands at its place."""


def difference(entry: Entry, listed: set[str]) -> str | None:
    """Why `entry` is not as it should be, or None."""
    path = Path(entry["path"])
    kind = entry["kind"]
    try:
        found = path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return "missing"
    if kind == "link":
        if not stat.S_ISLNK(found.st_mode):
            return "is no link"
        target = str(path.readlink())
        return None if target == entry["target"] else f"leads to {target}"
    expected = stat.S_ISDIR if kind == "directory" else stat.S_ISREG
    if not expected(found.st_mode):
        return f"is no {kind}"
    owner, group = owner_names(found)
    if (owner, group) != (entry["owner"], entry["group"]):
        return f"belongs to {owner}:{group}"
    mode = f"{stat.S_IMODE(found.st_mode):o}"
    if mode != entry["mode"]:
        return f"has mode {mode}"
    if kind == "file" and hashlib.sha256(path.read_bytes()).hexdigest() != entry["sha256"]:
        return "has other content"
    if kind == "directory" and entry.get("exclusive"):
        strangers = unlisted(path, listed)
        if strangers:
            return f"holds {strangers[0].name}, which is not ours"
    return None


def owner_names(found: os.stat_result) -> tuple[str, str]:
    """User and group of a file, as names where they have one."""
    try:
        owner = pwd.getpwuid(found.st_uid).pw_name
    except KeyError:
        owner = str(found.st_uid)
    try:
        group = grp.getgrgid(found.st_gid).gr_name
    except KeyError:
        group = str(found.st_gid)
    return owner, group


def unlisted(folder: Path, listed: set[str]) -> list[Path]:
    """What lies in an exclusive folder without being listed; compiled bytecode does not count."""
    return [
        path for path in sorted(folder.iterdir())
        if str(path) not in listed and path.name != BYTECODE
    ]  # fmt: skip


def check(entries: list[Entry]) -> dict[str, str]:
    """Path → reason, for every entry that is not as it should be."""
    listed = {entry["path"] for entry in entries}
    found = {entry["path"]: difference(entry, listed) for entry in entries}
    return {path: reason for path, reason in found.items() if reason is not None}


def foreign(entries: list[Entry]) -> list[str]:
    """Errors for the files that somebody else made and that must not be overwritten."""
    return [
        f"{entry['path']}: stands there and was not laid down by a deploy; look at it, then say "
        f"{entry['way_out']}"
        for entry in entries
        if is_foreign(entry) and not entry.get("take_over")
    ]


def is_foreign(entry: Entry) -> bool:
    """Whether a file without the entry's marker stands at its place."""
    path = Path(entry["path"])
    marker = entry.get("marker", "")
    return bool(marker) and path.is_file() and marker.encode() not in path.read_bytes()


def apply(entries: list[Entry]) -> list[str]:
    """Set every differing entry right; returns their paths.

    Raises:
        Refused: nothing was replaced.
    """
    differing = check(entries)
    refused = foreign(entries)
    if refused:
        raise Refused(refused[0])
    listed = {entry["path"] for entry in entries}
    todo = [entry for entry in entries if entry["path"] in differing]
    for entry in todo:
        _refuse_other_kind(entry)
    for entry in todo:
        if entry["kind"] == "directory":
            _make_directory(entry, listed)
    candidates: list[tuple[Path, Path]] = []
    try:
        for entry in todo:
            if entry["kind"] == "file":
                candidates.append((_candidate(entry), Path(entry["path"])))
        for entry in todo:
            if is_foreign(entry):
                keep_original(Path(entry["path"]))
        for candidate, path in candidates:
            candidate.replace(path)
        for entry in todo:
            _link(entry)
    finally:
        for candidate, _ in candidates:
            shutil.rmtree(candidate.parent, ignore_errors=True)
    for folder in {Path(entry["path"]).parent for entry in todo}:
        _fsync(folder)
    return [entry["path"] for entry in todo]


def _refuse_other_kind(entry: Entry) -> None:
    path = Path(entry["path"])
    if not path.is_symlink() and not path.exists():
        return
    is_link, is_directory = path.is_symlink(), path.is_dir()
    wrong = {
        "directory": is_link or not is_directory,
        "file": is_directory and not is_link,
        "link": not is_link,
    }[entry["kind"]]
    if wrong:
        raise Refused(f"{path}: something else than a {entry['kind']} stands there; move it away")


def _make_directory(entry: Entry, listed: set[str]) -> None:
    path = Path(entry["path"])
    path.mkdir(exist_ok=True)
    shutil.chown(path, entry["owner"], entry["group"])
    path.chmod(int(entry["mode"], 8))
    if entry.get("exclusive"):
        for stranger in unlisted(path, listed):
            if stranger.is_dir() and not stranger.is_symlink():
                shutil.rmtree(stranger)
            else:
                stranger.unlink()


def _candidate(entry: Entry) -> Path:
    """The new file, complete and valid, in a folder of its own beside its place."""
    path = Path(entry["path"])
    folder = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    candidate = folder / path.name
    try:
        with candidate.open("wb") as stream:
            stream.write(base64.b64decode(entry["content"]))
            stream.flush()
            shutil.chown(candidate, entry["owner"], entry["group"])
            candidate.chmod(int(entry["mode"], 8))
            os.fsync(stream.fileno())
        if entry.get("validate"):
            argv = [str(candidate) if part == "{}" else part for part in entry["validate"]]
            done = subprocess.run(
                argv, capture_output=True, text=True, timeout=VALIDATOR_DEADLINE_S, check=False
            )
            if done.returncode != 0:
                raise Refused(
                    f"{path}: refused by {argv[0]}, the old file stays\n"
                    f"{(done.stderr or done.stdout).strip()}"
                )
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return candidate


def keep_original(path: Path) -> None:
    """Keep the file beside its place; an original that was kept before is never replaced."""
    original = path.with_name(f"{path.name}.original")
    if not os.path.lexists(original):
        os.link(path.resolve(), original)


def _link(entry: Entry) -> None:
    path = Path(entry["path"])
    if entry["kind"] == "link":
        beside = path.with_name(f".{path.name}.{os.getpid()}")
        beside.unlink(missing_ok=True)
        beside.symlink_to(entry["target"])
        beside.replace(path)


def _fsync(folder: Path) -> None:
    if folder.is_dir():
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def main(arguments: list[str]) -> int:
    """See the module's text."""
    try:
        if arguments[:1] == ["check"] and len(arguments) == 2:
            entries = json.loads(arguments[1])
            print(json.dumps({"differs": check(entries), "refused": foreign(entries)}))
        elif arguments == ["apply"]:
            print(json.dumps({"changed": apply(json.load(sys.stdin))}))
        else:
            print("managed_files: usage: check ENTRIES | apply", file=sys.stderr)
            return 2
    except (Refused, OSError, LookupError, subprocess.TimeoutExpired) as error:
        print(f"managed_files: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
