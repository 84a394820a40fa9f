"""Adoption: a tree that stands at the fixed path is taken into the scheme as it is."""

from __future__ import annotations

from pathlib import Path

from hostlib.adoption import check_adoptable, check_free, swap_in
from hostlib.atomic import temporary_names, write_file
from hostlib.errors import HostError

from cuda_toolkit import census
from cuda_toolkit.place import check_machine, foreign
from cuda_toolkit.proving import prove_clean
from cuda_toolkit.spec import SPEC_FILE, TREE, Expected, name_of, to_json, tree_description


def check(root: Path, link: Path) -> None:
    """Refuse what cannot be taken in by one rename; changes nothing.

    Raises:
        HostError: another architecture, nothing to adopt, or as `check_adoptable`.
    """
    check_machine()
    if foreign(root, link) is None:
        raise HostError(f"{link}: nothing stands there to adopt; install the toolkit instead")
    check_adoptable(root, link)


def adopt(expected: Expected, root: Path, link: Path) -> Path:
    """Census and prove the tree at `link`; swap it with a symlink to its place below `root`.

    No file of it is changed; census, description and stamp are added to it. The swap is one step
    of the kernel: whatever moment this is killed at, `link` leads to the whole tree.

    Returns:
        The tree's new place, named by its census.

    Raises:
        HostError: not adoptable, no complete toolkit, or its proof fails; it is left as it was.
    """
    check(root, link)
    if (link / census.CENSUS_FILE).exists():
        census.read(link)  # of a run that was killed here, or not ours to replace
    for name in census.OWN_FILES:
        for leftover in link.glob(temporary_names(name)):  # of a run that was killed while it wrote
            leftover.unlink()
    items = census.take(link, "adopted")
    census.check_links(link, items, "move it away and install the toolkit")
    identity = {"census": census.content(items)}
    tree = root / name_of(identity)
    check_free(tree, link)
    prove_clean(expected, link, str(link), "it was left as it is")
    write_file(link / census.CENSUS_FILE, census.to_bytes(items))
    write_file(link / SPEC_FILE, to_json(tree_description(tree.name, {"adopted": True}, expected)))
    swap_in(tree, link)
    return tree


def is_adopted(root: Path, link: Path) -> bool:
    """Whether `link` leads to a tree below `root` already."""
    if not link.is_symlink():
        return False
    target = link.readlink()
    return target.parent == root and target.name.startswith(TREE) and (link / SPEC_FILE).is_file()
