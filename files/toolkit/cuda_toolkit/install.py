"""The installer: a staged tree, proved, then published by one rename.

The tree's folder is named by the digest of what determines it. Whatever moment the installer is
killed at, nothing half-made stands at a final path, and the next run ends in a good tree.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hostlib.errors import HostError

from cuda_toolkit import stamp
from cuda_toolkit.environment import check_host_compiler, clean
from cuda_toolkit.spec import (
    SPEC_FILE,
    Adopted,
    Archives,
    Spec,
    described_anew,
    expected_of,
    to_json,
    tree_description,
    tree_name,
)

STAGING = ".staging."
ARCHIVES = ".archives"
LOCK_WAIT_S = 600.0


def install(spec: Spec, root: Path, link: Path, lock_wait_s: float = LOCK_WAIT_S) -> str:
    """Bring the toolkit of `spec` to `root`/<digest>, prove it, and point `link` at it.

    Returns:
        What was done, as a line for a person.

    Raises:
        HostError: any refusal; neither `link` nor any published tree was changed then.
    """
    tree = root / tree_name(spec)
    if state(spec, root, link)["changed_reason"] is None:
        return f"already installed: {tree}"
    from cuda_toolkit.place import check_place

    check_place(root, link)
    link.parent.mkdir(parents=True, exist_ok=True)
    with alone(root, lock_wait_s) as lock:
        return _install_alone(spec, root, link, lock)


def state(spec: Spec, root: Path, link: Path) -> dict[str, Any]:
    """What stands there: path of the tree, installed, proved, link_ok, and why a run would change.

    `changed_reason` is None when a run would change nothing.
    """
    tree = root / tree_name(spec)
    installed = (tree / SPEC_FILE).is_file()
    unproved = stamp.stale_reason(tree, spec.expected) or damage(tree) if installed else None
    link_ok = link.is_symlink() and link.readlink() == tree
    reason = None
    if not installed:
        reason = f"{tree} is not installed"
    elif unproved:
        reason = unproved
    elif not link_ok:
        reason = f"{link} does not point to {tree}"
    return {
        "path": str(tree),
        "installed": installed,
        "proved": installed and unproved is None,
        "link_ok": link_ok,
        "changed_reason": reason,
    }


@contextlib.contextmanager
def alone(root: Path, lock_wait_s: float) -> Iterator[int]:
    """Be the one installer that works below `root`; what killed ones left is removed.

    Gives the lock's descriptor; a child that inherits it holds the lock as long as it lives.

    Raises:
        HostError: another still works there after `lock_wait_s`; it is named.
    """
    from hostlib.atomic import locked
    from hostlib.collection import REMOVING, remove_leftovers

    from cuda_toolkit.proving import say

    root.mkdir(parents=True, exist_ok=True)
    place = root / ".lock"
    with contextlib.ExitStack() as stack:
        try:
            lock = stack.enter_context(locked(place, "cuda-install", wait_seconds=0))
        except HostError as error:
            if lock_wait_s <= 0:
                raise
            say(f"{error.message.partition(';')[0]}; waiting up to {lock_wait_s:.0f} s")
            lock = stack.enter_context(locked(place, "cuda-install", wait_seconds=lock_wait_s))
        remove_leftovers(root, STAGING, REMOVING)
        yield lock


def _install_alone(spec: Spec, root: Path, link: Path, lock: int) -> str:
    from hostlib.atomic import replace_symlink, write_file

    from cuda_toolkit.proving import prove_clean, say

    tree = root / tree_name(spec)
    if not (tree / SPEC_FILE).is_file():
        if os.path.lexists(tree):  # a link that leads nowhere too
            raise HostError(
                f"{tree}: stands there and was not made by this installer; move it away, then "
                "run again"
            )
        _publish(spec, root, tree, lock)
    else:
        unproved = stamp.stale_reason(tree, spec.expected)
        damaged = damage(tree, deep=unproved is not None)
        if damaged and isinstance(spec.source, Adopted):
            raise HostError(f"{damaged}; mend it, or choose another source")
        if damaged:
            say(f"{damaged}; installing it anew")
            _publish(spec, root, tree, lock)
        elif unproved:
            way_out = "its files are as they were installed: correct the specification"
            prove_clean(spec.expected, tree, str(tree), way_out)
            if expected_of(tree) != spec.expected:
                write_file(tree / SPEC_FILE, to_json(described_anew(tree, spec.expected)))
    shutil.rmtree(root / ARCHIVES, ignore_errors=True)
    replace_symlink(link, tree)
    return f"installed and proved: {tree}"


def _publish(spec: Spec, root: Path, tree: Path, lock: int) -> None:
    """Make the tree beside its place, prove it, and let it take its place in one step."""
    from hostlib.adoption import replace_dir
    from hostlib.atomic import publish_dir, remove_tree

    from cuda_toolkit.proving import prove_clean
    from cuda_toolkit.space import check_space

    archives = root / ARCHIVES
    check_host_compiler(clean(os.environ))  # gigabytes before the proof would ask for it
    check_space(spec, root, archives)
    staging = Path(tempfile.mkdtemp(prefix=STAGING, dir=root))
    try:
        staged, identity = _make_tree(spec, archives, staging, lock)
        description = tree_description(tree.name, identity, spec.expected)
        (staged / SPEC_FILE).write_bytes(to_json(description))
        prove_clean(spec.expected, staged, tree.name, "it was not installed")
        (replace_dir if tree.exists() else publish_dir)(staged, tree)
    finally:
        with contextlib.suppress(OSError):  # the next run removes what is left
            remove_tree(staging)


def damage(tree: Path, deep: bool = False) -> str | None:
    """What is missing or changed in the installed `tree`, in words; None when it is whole.

    What lies there besides is no damage: `cuda-install census` names it.

    Args:
        deep: read every file; otherwise kinds and sizes alone.
    """
    from cuda_toolkit import census

    try:
        expected_of(tree)
        found = census.compare(tree, census.read(tree), deep)
    except HostError as error:
        return error.message.partition(";")[0]
    except OSError as error:  # the disk cannot read it any more
        return f"{error.filename or tree}: {error.strerror}"
    harm = [item for item in found if item.kind != "extra"]
    return f"{tree}: {census.summary(harm)}" if harm else None


def _make_tree(spec: Spec, archives: Path, staging: Path, lock: int) -> tuple[Path, dict[str, Any]]:
    """The staged tree, and what it was made of."""
    source = spec.source
    if isinstance(source, Adopted):
        raise HostError(
            f"{source.tree}: no tree of that name was adopted or installed here; take one in with "
            "cuda-install adopt, or choose another source"
        )
    if isinstance(source, Archives):
        from cuda_toolkit import archives as redist

        return redist.make_tree(source, archives, staging), source.identity
    from cuda_toolkit import runfile

    return runfile.make_tree(source, archives, staging, lock), source.identity
