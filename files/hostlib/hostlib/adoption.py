"""A tree that stands at a fixed path is taken into a scheme of content-addressed folders.

The fixed path becomes a symlink to the tree's new place in one step of the kernel, without a copy.
"""

from __future__ import annotations

import ctypes
import os
import pwd
from pathlib import Path

from hostlib.atomic import fsync_dir, fsync_tree
from hostlib.errors import EXIT_UNABLE, HostError

AT_FDCWD = -100
RENAME_EXCHANGE = 2


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


def check_adoptable(root: Path, link: Path) -> None:
    """Refuse what cannot be taken in at `link` by one rename; changes nothing.

    Raises:
        HostError: no folder of its own, a mount point, another file system, or no permission.
    """
    if link.is_symlink() or not link.is_dir():
        raise HostError(f"{link}: is no folder; only a tree that stands there itself is adopted")
    if root.is_relative_to(link):
        raise HostError(f"{root}: lies in {link}; choose a folder beside it")
    there = check_writable(root)
    for folder in (link.parent, link):
        check_writable(folder)
    if link.is_mount() or link.stat().st_dev != there.stat().st_dev:
        raise HostError(
            f"{link}: is on another file system than {root}, and a tree is renamed, never copied; "
            "choose a --root on the same"
        )


def check_free(tree: Path, link: Path) -> None:
    """Raise HostError if a folder stands at `tree`, where the one at `link` shall go."""
    if link.is_symlink() and link.resolve() == tree.resolve():
        raise HostError(f"{link}: leads to {tree} already; another run has adopted it meanwhile")
    if tree.exists() and not tree.is_symlink():
        raise HostError(f"{tree}: the same tree stands there already; remove {link} or that one")


def swap_in(tree: Path, link: Path) -> None:
    """Move the folder at `link` to `tree`, and leave a symlink to it at `link`.

    Whatever moment this is killed at, `link` leads to the whole tree.

    Raises:
        HostError: another folder stands at `tree`, or the file system cannot swap two names;
            nothing was changed.
    """
    check_free(tree, link)
    tree.unlink(missing_ok=True)  # of a run that was killed here
    tree.symlink_to(tree)
    try:
        exchange(tree, link)
    except OSError as error:
        tree.unlink()
        raise HostError(
            f"{link}: this file system cannot swap two names in one step ({error.strerror}); stop "
            f"what uses it, then: mv {link} {tree} && ln -s {tree} {link}"
        ) from None
    fsync_dir(tree.parent)
    fsync_dir(link.parent)


def replace_dir(staged: Path, standing: Path) -> None:
    """Let the finished folder `staged` take the place of `standing`: never none there.

    `staged` holds then what stood there before.

    Raises:
        HostError: the file system cannot swap two names; nothing was changed.
    """
    fsync_tree(staged)
    try:
        exchange(staged, standing)
    except OSError as error:
        raise HostError(
            f"{standing}: this file system cannot swap two names in one step ({error.strerror}); "
            "move the damaged folder away, then run again"
        ) from None
    fsync_dir(standing.parent)


def exchange(one: Path, other: Path) -> None:
    """Swap two names in one step: renameat2(2) with RENAME_EXCHANGE, Linux 3.15, glibc 2.28.

    Raises:
        OSError: as the call does; EINVAL where the file system cannot.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.renameat2(AT_FDCWD, os.fsencode(one), AT_FDCWD, os.fsencode(other), RENAME_EXCHANGE):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
