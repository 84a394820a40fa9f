"""What an .xz file tells about itself before it is unpacked.

Source: the .xz file format 1.2.0, sections 2.1 (header and footer), 3.1 (block header), 4 (index)
and 5.3.1 (LZMA2).
"""

from __future__ import annotations

import struct
from pathlib import Path

TAIL_BYTES = 64 << 10
LARGEST_HEAD_BYTES = 12 + 1024
_FOOTER_BYTES = _HEADER_BYTES = 12
_MAGIC = b"\xfd7zXZ\x00"
_LZMA2 = 0x21


def unpacked_bytes(tail: bytes, size: int) -> int | None:
    """What an .xz file of `size` bytes unpacks to, read from the index at its end.

    Args:
        tail: the last bytes of the file.

    Returns:
        Bytes; None when the tail is no whole index of one stream of that size.
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


def dictionary_bytes(head: bytes) -> int | None:
    """The dictionary that unpacking the first block needs; None when `head` does not tell.

    Args:
        head: the first bytes of the file.
    """
    if head[:6] != _MAGIC or len(head) <= _HEADER_BYTES + 1:
        return None
    block = head[_HEADER_BYTES : _HEADER_BYTES + (head[_HEADER_BYTES] + 1) * 4]
    flags, position = block[1], 2
    try:
        for is_there in (flags & 0x40, flags & 0x80):  # sizes, packed and plain
            if is_there:
                _, position = _number(block, position)
        for _ in range((flags & 3) + 1):
            kind, position = _number(block, position)
            count, position = _number(block, position)
            if kind == _LZMA2:
                bits = block[position] & 0x3F
                return (2 | bits & 1) << (bits // 2 + 11)
            position += count
    except IndexError:
        pass
    return None


def memory_bytes(archive: Path) -> int:
    """What unpacking `archive` takes at most besides its reader; 0 when the file does not tell."""
    size = archive.stat().st_size
    with archive.open("rb") as stream:
        dictionary = dictionary_bytes(stream.read(LARGEST_HEAD_BYTES)) or 0
        stream.seek(max(0, size - TAIL_BYTES))
        unpacked = unpacked_bytes(stream.read(), size)
    return dictionary if unpacked is None else min(dictionary, unpacked)


def _number(data: bytes, position: int) -> tuple[int, int]:
    """A number of up to nine bytes, seven bits each, the lowest first; and where it ends."""
    value = 0
    for place in range(9):
        byte = data[position + place]
        value |= (byte & 0x7F) << (7 * place)
        if byte < 0x80:
            return value, position + place + 1
    raise IndexError
