"""The census of a tree: every file with size and sha256, every link; and what became of them."""

from __future__ import annotations

import json
import os
import re
import stat
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from hostlib.download import sha256_file
from hostlib.errors import EXIT_UNABLE, HostError
from hostlib.parallel import StoppableProgress, for_each
from hostlib.progress import size_text

from cuda_toolkit.spec import SPEC_FILE, to_json
from cuda_toolkit.stamp import STAMP_FILE
from cuda_toolkit.unpack import Entry, link_stays

CENSUS_FILE = "census.json"
OWN_FILES = (CENSUS_FILE, SPEC_FILE, STAMP_FILE)  # written by these programs, counted by none
# Also what a writer of theirs leaves when it is killed.
_OWN = re.compile("|".join(rf"{re.escape(n)}|\.{re.escape(n)}\.\w{{8}}" for n in OWN_FILES))
SHOWN = 10


@dataclass(frozen=True)
class Item:
    """One file or link of the census, and the component that brought it."""

    component: str
    entry: Entry


@dataclass(frozen=True)
class Finding:
    """Something that is not as the census says: "missing", "changed" or "extra"."""

    kind: str
    path: str
    component: str = ""


def content(items: Mapping[str, Item]) -> dict[str, dict[str, dict[str, object]]]:
    """The census as it is written: files with size in bytes and sha256, links with target."""
    found: dict[str, dict[str, dict[str, object]]] = {"files": {}, "links": {}}
    for path, item in sorted(items.items()):
        entry = item.entry
        if entry.target is None:
            found["files"][path] = {
                "size": entry.size, "sha256": entry.sha256, "component": item.component
            }  # fmt: skip
        else:
            found["links"][path] = {"target": entry.target, "component": item.component}
    return found


def to_bytes(items: Mapping[str, Item]) -> bytes:
    """The text of `census.json`."""
    return to_json(content(items))


def read(tree: Path) -> dict[str, Item]:
    """The census in `tree`.

    Raises:
        HostError: there is none, or it is none of these programs' (exit code 2).
    """
    path = tree / CENSUS_FILE
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        return {
            **{
                name: Item(value["component"], Entry(value["size"], value["sha256"]))
                for name, value in raw["files"].items()
            },
            **{
                name: Item(value["component"], Entry(target=value["target"]))
                for name, value in raw["links"].items()
            },
        }
    except (FileNotFoundError, NotADirectoryError):
        raise HostError(
            f"{path}: is not there; install the toolkit, or adopt it", exit_code=EXIT_UNABLE
        ) from None
    except (ValueError, LookupError, TypeError, AttributeError):
        raise HostError(
            f"{path}: is no census of this installer; move it away, then install or adopt",
            exit_code=EXIT_UNABLE,
        ) from None


def take(tree: Path, component: str) -> dict[str, Item]:
    """The census of what lies in `tree`, all of it read; `component` brought it.

    Raises:
        HostError: something is neither file, folder nor link.
    """
    found = dict(_walk(tree))
    for path, status in found.items():
        if not stat.S_ISREG(status.st_mode) and not stat.S_ISLNK(status.st_mode):
            raise HostError(f"{tree / path}: is a device, pipe or socket; remove it")
    files = [path for path, status in found.items() if stat.S_ISREG(status.st_mode)]
    digests = _digests(tree, files, sum(found[path].st_size for path in files))
    return {
        path: Item(
            component,
            Entry(status.st_size, digests[path])
            if path in digests
            else Entry(target=_target(tree / path)),
        )
        for path, status in sorted(found.items())
    }


def check_links(tree: Path, items: Mapping[str, Item], way_out: str) -> None:
    """Refuse a tree that is not whole by itself.

    Raises:
        HostError: names the links that lead out of it.
    """
    leaving = [
        f"{path} -> {item.entry.target}"
        for path, item in items.items()
        if item.entry.target is not None and not link_stays(path, item.entry.target)
    ]
    if leaving:
        raise HostError(
            f"{tree}: {len(leaving)} of its links lead out of it, so it is not whole by itself; "
            f"{way_out}",
            *leaving[:SHOWN],
        )


def compare(tree: Path, items: Mapping[str, Item], deep: bool) -> list[Finding]:
    """What in `tree` is not as the census `items` says.

    Args:
        deep: read every file and compare its digest; otherwise kinds, sizes and targets alone.
    """
    found = dict(_walk(tree))
    findings = [Finding("extra", path) for path in sorted(found.keys() - items.keys())]
    unread = []
    for path, item in sorted(items.items()):
        status = found.get(path)
        if status is None:
            findings.append(Finding("missing", path, item.component))
        elif item.entry.target is not None:
            if not stat.S_ISLNK(status.st_mode) or _target(tree / path) != item.entry.target:
                findings.append(Finding("changed", path, item.component))
        elif not stat.S_ISREG(status.st_mode) or status.st_size != item.entry.size:
            findings.append(Finding("changed", path, item.component))
        else:
            unread.append(path)
    if deep:
        digests = _digests(tree, unread, sum(found[path].st_size for path in unread))
        findings += [
            Finding("changed", path, items[path].component)
            for path in unread
            if digests[path] != items[path].entry.sha256
        ]
    return findings


def check(tree: Path, deep: bool) -> str:
    """Hold `tree` against its census.

    Returns:
        A line for a person.

    Raises:
        HostError: something is missing, changed or extra: named, with the component that it
            belongs to; or there is no census (exit code 2).
    """
    items = read(tree)
    findings = compare(tree, items, deep)
    if findings:
        raise HostError(
            f"{tree}: {summary(findings)}; install again, which heals it unless it was adopted",
            *lines(findings),
        )
    size = size_text(sum(item.entry.size for item in items.values()))
    held = "sizes and digests" if deep else "sizes; --deep reads them"
    return f"{tree}: {len(items)} files and links, {size}, as they were installed ({held})"


def summary(findings: list[Finding]) -> str:
    """How many are missing, changed and extra, and of which components."""
    told = []
    for kind in ("missing", "changed", "extra"):
        counted = Counter(item.component for item in findings if item.kind == kind)
        if counted:
            named = ", ".join(name for name, _ in counted.most_common() if name)
            told.append(f"{counted.total()} {kind}" + (f" ({named})" if named else ""))
    return ", ".join(told)


def lines(findings: list[Finding]) -> list[str]:
    """A handful of each kind, by path."""
    told = []
    for kind in ("missing", "changed", "extra"):
        paths = [item.path for item in findings if item.kind == kind]
        told += [f"{kind:<8} {path}" for path in paths[:SHOWN]]
        if len(paths) > SHOWN:
            told.append(f"{kind:<8} and {len(paths) - SHOWN} more")
    return told


def _walk(tree: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Path below `tree` and status of everything but folders and these programs' own files."""
    pending = [""]
    while pending:
        folder = pending.pop()
        with os.scandir(tree / folder) as entries:
            for entry in entries:
                path = f"{folder}/{entry.name}" if folder else entry.name
                if entry.is_dir(follow_symlinks=False):
                    pending.append(path)
                elif not _OWN.fullmatch(path):
                    yield path, entry.stat(follow_symlinks=False)


def _target(link: Path) -> str:
    return os.readlink(link)  # noqa: PTH115 - as it is written: a Path would tidy it up


def _digests(tree: Path, paths: list[str], size: int) -> dict[str, str]:
    digests: dict[str, str] = {}
    progress = StoppableProgress(f"reading {tree.name}", size)

    def one(path: str) -> None:
        digests[path] = sha256_file(tree / path, progress)

    for_each(paths, one, os.cpu_count() or 1, progress)
    return digests
