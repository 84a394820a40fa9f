"""Old trees are kept for going back, until they are collected."""

from __future__ import annotations

import os
from pathlib import Path

from hostlib.atomic import remove_tree
from hostlib.errors import EXIT_UNABLE, HostError
from hostlib.progress import size_text

from cuda_toolkit.spec import SPEC_FILE, TREE

REMOVING = ".removing."  # a tree loses its name before its files: half a tree has none


def release_texts(releases: Path) -> list[str]:
    """The releases below the folder `releases`, as they are written.

    Raises:
        HostError: the folder or one of them cannot be read (exit code 2): then nothing may go.
    """
    try:
        found = [path for path in releases.iterdir() if path.is_dir()]
        return [(path / "release.json").read_text(encoding="utf-8") for path in sorted(found)]
    except OSError as error:
        raise HostError(
            f"{error.filename}: cannot be read ({error.strerror}), so what it needs is not known; "
            "nothing was removed",
            exit_code=EXIT_UNABLE,
        ) from None


def removable(root: Path, link: Path, releases: list[str], keep: list[Path]) -> list[Path]:
    """The trees below `root` that are named by nothing: no link, no release, no `keep`."""
    kept = {path.resolve() for path in (link, *keep)}
    return [
        tree
        for tree in sorted(root.glob(f"{TREE}*"))
        if (tree / SPEC_FILE).is_file()
        and not tree.is_symlink()
        and tree.resolve() not in kept
        and not any(tree.name in text for text in releases)
    ]


def remove(trees: list[Path]) -> list[str]:
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
