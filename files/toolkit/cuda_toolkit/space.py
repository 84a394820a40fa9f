"""How much space a toolkit will take, known before its first byte is fetched."""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from hostlib.download import is_local, join, read_tail
from hostlib.errors import HostError
from hostlib.progress import size_text

from cuda_toolkit.spec import Adopted, Archives, Component, Runfile, Spec
from cuda_toolkit.xz import TAIL_BYTES, unpacked_bytes

# Where an archive does not tell: above the 3.6 measured on compilers and headers at xz's lowest
# preset; libraries shrink less.
TREE_BYTES_PER_ARCHIVE_BYTE = 4
# The runfile unpacks all of itself beside the tree that it makes; not measured on a real one.
TREE_BYTES_PER_RUNFILE_BYTE = 3
# File systems keep whole blocks: measured 3 % on headers.
BLOCKS = 1.05
READERS = 8


def check_space(spec: Spec, root: Path, archives: Path) -> None:
    """Refuse before the first byte when what is fetched and made would not fit below `root`.

    Raises:
        HostError: not enough space; the message says how much is missing.
    """
    needed = needed_bytes(spec, archives)
    free = shutil.disk_usage(root).free
    if free < needed:
        raise HostError(
            f"{root}: {size_text(needed)} needed for archives and tree, {size_text(free)} free; "
            f"free {size_text(needed - free)}, then run again"
        )


def needed_bytes(spec: Spec, archives: Path) -> int:
    """Bytes to be written: the tree, and the archives that lie neither here nor in `archives`."""
    source = spec.source
    if isinstance(source, Adopted):
        return 0
    if isinstance(source, Runfile):
        fetched = 0 if is_local(source.location) else 1
        return source.size * (TREE_BYTES_PER_RUNFILE_BYTE + fetched)
    with ThreadPoolExecutor(max_workers=READERS) as pool:
        trees = pool.map(lambda item: _tree_bytes(source, item, archives), source.components)
        tree = sum(trees)
    if is_local(source.base_url):
        return int(tree * BLOCKS)
    have = sum(
        path.stat().st_size
        for item in source.components
        for path in (archives / item.archive_name, archives / f"{item.archive_name}.partial")
        if path.exists()
    )
    return max(0, source.size - have) + int(tree * BLOCKS)


def _tree_bytes(source: Archives, item: Component, archives: Path) -> int:
    kept = archives / item.archive_name
    place = str(kept) if kept.exists() else join(source.base_url, item.relative_path)
    tail = read_tail(place, item.size, TAIL_BYTES)
    told = unpacked_bytes(tail, item.size) if tail else None
    return told or item.size * TREE_BYTES_PER_ARCHIVE_BYTE
