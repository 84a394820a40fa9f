"""Whether a host, and a place on it, can take a toolkit. Nothing here changes anything."""

from __future__ import annotations

import os
import platform
import pwd
from pathlib import Path

from hostlib.errors import EXIT_UNABLE, HostError


def check_machine() -> None:
    """Refuse another architecture.

    Raises:
        HostError: names the one that this host has.
    """
    machine = platform.machine()
    if machine not in ("x86_64", "amd64"):
        raise HostError(
            f"this host is {machine}: the toolkit is for x86-64; install it on the engine's host"
        )


def check_writable(folder: Path) -> Path:
    """The nearest part of `folder` that stands already, when this user can write there.

    Raises:
        HostError: names it when it is no folder or cannot be written.
    """
    there = next(path for path in (folder, *folder.absolute().parents) if os.path.lexists(path))
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise HostError(
            f"{there}: cannot be written by this user; give the folder to the service user"
        )
    check_owner(there)
    return there


def check_owner(folder: Path) -> None:
    """Root must neither run what another user can write, nor leave files where that one works.

    Raises:
        HostError: this is root, and `folder` is another user's (exit code 2).
    """
    owner = folder.stat().st_uid
    if os.geteuid() == 0 and owner != 0:
        try:
            user = pwd.getpwuid(owner).pw_name
        except KeyError:
            user = f"#{owner}"
        raise HostError(
            f"{folder}: belongs to {user}, whose programs root must not run; run this as that "
            f"user: sudo -u {user} …",
            exit_code=EXIT_UNABLE,
        )


def foreign(root: Path, link: Path) -> str | None:
    """What stands at `link` and was neither made nor adopted by this installer, in words."""
    if not os.path.lexists(link):
        return None
    if not link.is_symlink():
        return "a tree" if link.is_dir() else "a file"
    target = link.readlink()
    return None if target.parent == root else f"a symlink to {target}"


def check_place(root: Path, link: Path) -> None:
    """Refuse a host or a place that cannot take the toolkit.

    Raises:
        HostError: not x86-64, no permission, or something foreign at `link`.
    """
    check_machine()
    found = foreign(root, link)
    if found:
        raise HostError(
            f"{link}: {found} stands there and was not made by this installer; take a tree in with "
            "cuda-install adopt, or move it away, then run again"
        )
    check_writable(root)
    check_writable(link.parent)
