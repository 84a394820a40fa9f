"""Old content-addressed trees are kept for going back, until they are collected."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from hostlib.adoption import check_owner
from hostlib.atomic import remove_tree
from hostlib.errors import EXIT_UNABLE, HostError
from hostlib.progress import size_text

REMOVING = ".removing."  # a tree loses its name before its files: half a tree has none


def wanted_by(releases: Path | None, keep: Sequence[Path]) -> list[str]:
    """The releases below the folder `releases`, as they are written.

    Raises:
        HostError: nothing says what must stay, or it cannot be read; then nothing may go.
    """
    if releases is None and not keep:
        raise HostError("collect: name what must stay, with --releases DIR or --keep PATH")
    for path in keep:
        if not path.is_dir():
            raise HostError(f"{path}: to be kept, but is no folder; nothing was removed")
    if releases is None:
        return []
    try:
        found = [path for path in releases.iterdir() if path.is_dir()]
        return [(path / "release.json").read_text(encoding="utf-8") for path in sorted(found)]
    except OSError as error:
        raise HostError(
            f"{error.filename}: cannot be read ({error.strerror}), so what it needs is not known; "
            "nothing was removed",
            exit_code=EXIT_UNABLE,
        ) from None


def check_places(root: Path, link: Path) -> None:
    """Refuse places that nothing can be collected at; changes nothing.

    Raises:
        HostError: `root` is no folder, or another user's and this is root (exit code 2); or `link`
            leads nowhere, so that the tree in use would look like an old one.
    """
    if not root.is_dir():
        raise HostError(f"{root}: is no folder; nothing was removed")
    check_owner(root)
    if not link.exists():
        raise HostError(
            f"{link}: leads nowhere, so what must stay is not known; nothing was removed"
        )


def removable(
    trees: Iterable[Path], link: Path, releases: Sequence[str], keep: Sequence[Path]
) -> list[Path]:
    """Those of `trees` that are named by nothing: no link, no release, no `keep`."""
    kept = {path.resolve() for path in (link, *keep)}
    return [
        tree
        for tree in sorted(trees)
        if not tree.is_symlink()
        and tree.resolve() not in kept
        and not any(tree.name in text for text in releases)
    ]


def remove(trees: Sequence[Path]) -> list[str]:
    """Remove `trees`; a line for each, and one with the sum of bytes."""
    told, total = [], 0
    for tree in trees:
        size = sum(
            (Path(folder) / name).lstat().st_size
            for folder, _, files in os.walk(tree)
            for name in files
        )
        going = tree.with_name(f"{REMOVING}{tree.name}")
        tree.rename(going)
        remove_tree(going)
        told.append(f"removed {tree} ({size_text(size)})")
        total += size
    return [*told, f"{len(trees)} trees removed, {total} bytes"]


def remove_leftovers(root: Path, *prefixes: str) -> None:
    """Remove the folders below `root` whose names begin so: what killed runs left."""
    for prefix in prefixes:
        for stale in root.glob(f"{prefix}*"):
            remove_tree(stale)
