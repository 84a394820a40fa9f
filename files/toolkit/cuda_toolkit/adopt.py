"""Adoption: a tree that stands at the fixed path is taken into the scheme as it is."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

from hostlib.atomic import fsync_dir, write_file
from hostlib.errors import HostError

from cuda_toolkit import census
from cuda_toolkit.place import check_machine, check_writable, foreign
from cuda_toolkit.proving import prove_clean
from cuda_toolkit.spec import SPEC_FILE, TREE, Expected, name_of, to_json, tree_description

AT_FDCWD = -100
RENAME_EXCHANGE = 2


def check_adoptable(root: Path, link: Path) -> None:
    """Refuse what cannot be taken in by one rename; changes nothing.

    Raises:
        HostError: no folder of its own, a mount point, another file system, or no permission.
    """
    check_machine()
    if foreign(root, link) is None:
        raise HostError(f"{link}: nothing stands there to adopt; install the toolkit instead")
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


def adopt(expected: Expected, root: Path, link: Path) -> Path:
    """Census and prove the tree at `link`; swap it with a symlink to its place below `root`.

    No file of it is changed; census, description and stamp are added to it. The swap is one step
    of the kernel: whatever moment this is killed at, `link` leads to the whole tree.

    Returns:
        The tree's new place, named by its census.

    Raises:
        HostError: not adoptable, no complete toolkit, or its proof fails; it is left as it was.
    """
    check_adoptable(root, link)
    if (link / census.CENSUS_FILE).exists():
        census.read(link)  # of a run that was killed here, or not ours to replace
    for name in census.OWN_FILES:
        for leftover in link.glob(f".{name}.????????"):  # of a run that was killed while it wrote
            leftover.unlink()
    items = census.take(link, "adopted")
    census.check_links(link, items, "move it away and install the toolkit")
    identity = {"census": census.content(items)}
    tree = root / name_of(identity)
    if tree.exists() and not tree.is_symlink():
        raise HostError(f"{tree}: the same tree stands there already; remove {link} or that one")
    prove_clean(expected, link, str(link), "it was left as it is")
    write_file(link / census.CENSUS_FILE, census.to_bytes(items))
    write_file(link / SPEC_FILE, to_json(tree_description(tree.name, {"adopted": True}, expected)))
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
    fsync_dir(root)
    fsync_dir(link.parent)
    return tree


def is_adopted(root: Path, link: Path) -> bool:
    """Whether `link` leads to a tree below `root` already."""
    if not link.is_symlink():
        return False
    target = link.readlink()
    return target.parent == root and target.name.startswith(TREE) and (link / SPEC_FILE).is_file()


def exchange(one: Path, other: Path) -> None:
    """Swap two names in one step: renameat2(2) with RENAME_EXCHANGE, Linux 3.15, glibc 2.28.

    Raises:
        OSError: as the call does; EINVAL where the file system cannot.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.renameat2(AT_FDCWD, os.fsencode(one), AT_FDCWD, os.fsencode(other), RENAME_EXCHANGE):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
