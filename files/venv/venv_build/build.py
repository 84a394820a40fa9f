"""One venv a lock: staged beside its place, imports proved, renamed to its digest."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from hostlib.atomic import locked, publish_dir, replace_symlink, write_file
from hostlib.errors import HostError

STAMP = ".complete.json"
STAGING_PREFIX = ".staging-"
PIP_DEADLINE_S = 3600
IMPORT_DEADLINE_S = 600


def venv_name(requirements: str, python: str) -> str:
    """The folder's name: first 16 hex digits of the sha256 over interpreter name and lock."""
    return hashlib.sha256(f"{python}\n{requirements}".encode()).hexdigest()[:16]


def status(requirements: str, python: str, root: Path, link: Path | None) -> dict[str, object]:
    """Whether the venv of this lock is complete and `link` leads to it. Changes nothing."""
    path = root / venv_name(requirements, python)
    installed = _stamp(path).get("census") == census(path)
    link_ok = link is None or (link.is_symlink() and link.readlink() == path)
    return {"path": str(path), "installed": installed, "link_ok": link_ok}


def census(venv: Path) -> dict[str, list[int]]:
    """Size in bytes and mtime in ns of every file of a venv: tells when somebody changed it.

    Bytecode does not count, for interpreters write it as they go.
    """
    found: dict[str, list[int]] = {}
    for folder, folders, files in os.walk(venv):
        folders[:] = [name for name in folders if name != "__pycache__"]
        for name in files:
            path = os.path.join(folder, name)  # noqa: PTH118  # tens of thousands of files
            if folder != str(venv) or name != STAMP:
                entry = os.lstat(path)
                found[os.path.relpath(path, venv)] = [entry.st_size, entry.st_mtime_ns]
    return found


def _stamp(venv: Path) -> dict[str, object]:
    try:
        stamp: dict[str, object] = json.loads((venv / STAMP).read_bytes())
    except (OSError, ValueError):
        return {}
    return stamp


def build(
    requirements: str, python: str, root: Path, link: Path | None, imports: list[str]
) -> Path:
    """The venv of this lock, built when it is not complete; `link` leads to it afterwards.

    Args:
        requirements: pinned requirements with hashes, complete: nothing is resolved.
        python: interpreter, by name or path.
        root: folder of all venvs.
        link: fixed path for people and units, or None.
        imports: modules whose import proves the venv.

    Raises:
        HostError: no such interpreter, a package cannot be had or does not match, an import fails.
    """
    interpreter = shutil.which(python)
    if interpreter is None:
        raise HostError(f"{python}: is not installed on this host; install it, then run again")
    root.mkdir(parents=True, exist_ok=True)
    final = root / venv_name(requirements, python)
    with locked(root / ".lock", "venv-build"):
        if not status(requirements, python, root, link)["installed"]:
            for stale in (*root.glob(f"{STAGING_PREFIX}*"), final):
                shutil.rmtree(stale, ignore_errors=True)
            staged = Path(tempfile.mkdtemp(prefix=STAGING_PREFIX, dir=root))
            try:
                _install(staged, final, interpreter, requirements)
                _prove(staged, imports)
                stamp = {"python": python, "census": census(staged)}
                write_file(staged / STAMP, json.dumps(stamp).encode())
                staged.chmod(0o755)
                publish_dir(staged, final)
            except BaseException:
                shutil.rmtree(staged, ignore_errors=True)
                raise
        if link is not None and not (link.is_symlink() and link.readlink() == final):
            replace_symlink(link, final)
    return final


def _install(staged: Path, final: Path, interpreter: str, requirements: str) -> None:
    _run([interpreter, "-I", "-m", "venv", str(staged)], "venv: cannot be made", PIP_DEADLINE_S)
    lock = staged / "requirements.lock"
    lock.write_text(requirements)
    pins = sum(1 for line in requirements.splitlines() if re.match(r"[A-Za-z0-9]", line))
    print(f"venv: installing {pins} packages", flush=True)
    _run(
        [
            str(staged / "bin/python"), "-I", "-m", "pip", "install", "--quiet", "--no-input",
            "--disable-pip-version-check", "--no-deps", "--require-hashes", "--requirement",
            str(lock),
        ],
        "venv: pip refuses the lock or cannot reach the package index",
        PIP_DEADLINE_S,
    )  # fmt: skip
    _move_scripts(staged, final)


def _move_scripts(staged: Path, final: Path) -> None:
    """Scripts name their interpreter by its full path: let them name the final one."""
    old, new = os.fsencode(staged), os.fsencode(final)
    for script in (staged / "bin").iterdir():
        if script.is_file() and not script.is_symlink():
            content = script.read_bytes()
            if old in content:
                script.write_bytes(content.replace(old, new))


def _prove(staged: Path, imports: list[str]) -> None:
    for module in imports:
        _run(
            [str(staged / "bin/python"), "-I", "-c", f"import {module}"],
            f"venv: import {module} fails",
            IMPORT_DEADLINE_S,
        )


def _run(command: list[str], failure: str, deadline_s: int) -> None:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=deadline_s, check=False
        )
    except subprocess.TimeoutExpired:
        raise HostError(f"{failure}: no end within {deadline_s} s; nothing was installed") from None
    if done.returncode != 0:
        lines = [line for line in done.stderr.strip().splitlines() if line.strip()]
        raise HostError(f"{failure}; nothing was installed", *lines[-8:])
