"""Whether a host, and a place on it, can take a toolkit. Nothing here changes anything."""

from __future__ import annotations

import os
import platform
from pathlib import Path

from hostlib.adoption import check_writable
from hostlib.errors import HostError


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
