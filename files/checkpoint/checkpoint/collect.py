"""Checkpoints and parents that nothing names any more are removed, and what killed runs left."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from hostlib.atomic import locked
from hostlib.collection import (
    REMOVING,
    check_places,
    removable,
    remove,
    remove_leftovers,
    wanted_by,
)

from checkpoint import manifest
from checkpoint.fetch import LOCK_WAIT_S, STAGING

_NAME = re.compile(f"[0-9a-f]{{{manifest.NAME_DIGITS}}}")


def collect(root: Path, link: Path, releases: Path | None, keep: Sequence[Path]) -> list[str]:
    """Remove the checkpoints below `root` that neither `link` nor a release nor `keep` names.

    Returns:
        A line for each, and one with the sum.

    Raises:
        HostError: what must stay is not known, or another program works below `root`.
    """
    check_places(root, link)
    texts = wanted_by(releases, keep)
    with locked(root / ".lock", "ckpt collect", LOCK_WAIT_S):
        remove_leftovers(root, STAGING, REMOVING)
        trees = [
            path
            for path in root.iterdir()
            if _NAME.fullmatch(path.name) and (path / manifest.MANIFEST).is_file()
        ]
        return remove(removable(trees, link, texts, keep))
