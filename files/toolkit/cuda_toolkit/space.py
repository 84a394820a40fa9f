"""How much space a toolkit will take, known before its first byte is fetched."""

from __future__ import annotations

import shutil
import struct
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from hostlib.download import is_local, join, read_tail
from hostlib.errors import HostError
from hostlib.progress import size_text

from cuda_toolkit.spec import Archives, Component, Runfile, Spec

# Where an archive does not tell: above the 3.6 measured on compilers and headers at xz's lowest
# preset; libraries shrink less.
TREE_BYTES_PER_ARCHIVE_BYTE = 4
# The runfile unpacks all of itself beside the tree that it makes; not measured on a real one.
TREE_BYTES_PER_RUNFILE_BYTE = 3
# File systems keep whole blocks: measured 3 % on headers.
BLOCKS = 1.05
TAIL_BYTES = 64 << 10
READERS = 8
_FOOTER_BYTES = _HEADER_BYTES = 12


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


def unpacked_bytes(tail: bytes, size: int) -> int | None:
    """What an .xz file of `size` bytes unpacks to, read from the index at its end.

    Args:
        tail: the last bytes of the file.

    Returns:
        Bytes; None when the tail is no whole index of one stream of that size.

    Source: the .xz file format 1.2.0, sections 2.1.2 (footer) and 4 (index).
    """
    if len(tail) < _FOOTER_BYTES or tail[-2:] != b"YZ":
        return None
    (backward,) = struct.unpack_from("<I", tail, len(tail) - 8)
    index_bytes = (backward + 1) * 4
    index = tail[-_FOOTER_BYTES - index_bytes : -_FOOTER_BYTES]
    if len(index) != index_bytes or index[0] != 0:
        return None
    try:
        records, position = _number(index, 1)
        packed = unpacked = 0
        for _ in range(records):
            block, position = _number(index, position)
            plain, position = _number(index, position)
            packed += -(-block // 4) * 4
            unpacked += plain
    except IndexError:
        return None
    whole = _HEADER_BYTES + packed + index_bytes + _FOOTER_BYTES
    return unpacked if whole == size else None


def _number(data: bytes, position: int) -> tuple[int, int]:
    """A number of up to nine bytes, seven bits each, the lowest first; and where it ends."""
    value = 0
    for place in range(9):
        byte = data[position + place]
        value |= (byte & 0x7F) << (7 * place)
        if byte < 0x80:
            return value, position + place + 1
    raise IndexError
