"""The header of a safetensors file: parsed strictly, and written anew.

Layout: 8 bytes little-endian header length, that many bytes of JSON, then the tensors' data.
Source: the format description in huggingface/safetensors (README, "Format").
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hostlib.errors import HostError

from checkpoint.strict import as_count, as_object, as_text, parse_object, require_regular

# All 2,194 tensors need 0.3 MB. The format allows 100 MB, which as Python objects are gigabytes.
HEADER_LIMIT_BYTES = 4 << 20
BLOCK_BYTES = 4096  # what file systems share whole
LENGTH_BYTES = 8
METADATA = "__metadata__"
MOST_DIMENSIONS = 8
MOST_NAME_CHARACTERS = 512
DTYPE_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4,
    "U64": 8, "I64": 8, "F64": 8, "C64": 8,
}  # fmt: skip


@dataclass(frozen=True)
class Tensor:
    """What a tensor is: `dtype` as the header spells it, and its `shape`."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its data."""
        return DTYPE_BYTES[self.dtype] * math.prod(self.shape)

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


@dataclass(frozen=True)
class Span:
    """Where a tensor's data lies: offset from the file's begin, and bytes."""

    begin: int
    nbytes: int


@dataclass(frozen=True)
class Shard:
    """A safetensors file: its tensors in the order of their data, which begins at `data_begin`."""

    path: Path
    data_begin: int
    tensors: dict[str, Tensor]
    metadata: dict[str, str]

    @property
    def data_bytes(self) -> int:
        """Bytes of all its tensors' data, up to the end of the file."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def spans(self) -> dict[str, Span]:
        """Where each tensor's data lies; there are no gaps between them."""
        spans: dict[str, Span] = {}
        begin = self.data_begin
        for name, tensor in self.tensors.items():
            spans[name] = Span(begin, tensor.nbytes)
            begin += tensor.nbytes
        return spans


def header_length(prefix: bytes, file_bytes: int, where: str) -> int:
    """Length in bytes of the JSON header, from the first 8 bytes of a file of `file_bytes`.

    Raises:
        HostError: the file is shorter than its header, or the header longer than the limit.
    """
    if len(prefix) < LENGTH_BYTES:
        raise HostError(f"{where}: {file_bytes} bytes are too few for a safetensors file")
    length = int.from_bytes(prefix[:LENGTH_BYTES], "little")
    if length > HEADER_LIMIT_BYTES:
        raise HostError(
            f"{where}: header of {length} bytes is over the limit of {HEADER_LIMIT_BYTES};"
            " the file is damaged"
        )
    if length > file_bytes - LENGTH_BYTES:
        raise HostError(
            f"{where}: header of {length} bytes is longer than the file ({file_bytes} bytes)"
        )
    return length


def parse_header(raw: bytes, data_bytes: int, where: str) -> dict[str, Tensor]:
    """The tensors that the JSON header `raw` declares, in the order of their data.

    Args:
        raw: the header alone, without its length.
        data_bytes: bytes of the file behind the header.
        where: name of the file, for messages.

    Raises:
        HostError: not an object, a key twice, an unknown dtype, offsets that do not match
            dtype times shape, or data that is unsorted, overlaps, has a gap or a wrong end.
    """
    return _parse(raw, data_bytes, where)[0]


def build_header(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str], data_begin: int
) -> bytes:
    """Length and JSON header for `tensors` in this order, filled up with spaces.

    Args:
        data_begin: the header's size modulo BLOCK_BYTES, so that data which is copied from the
            same place in another file's block can be shared with it.
    """
    header: dict[str, object] = {METADATA: dict(metadata)} if metadata else {}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        header[name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * ((data_begin - LENGTH_BYTES - len(text)) % BLOCK_BYTES)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def read_shard(path: Path) -> Shard:
    """The header of the safetensors file `path`; raises HostError as `parse_header`."""
    require_regular(path)
    with path.open("rb") as stream:
        file_bytes = path.stat().st_size
        length = header_length(stream.read(LENGTH_BYTES), file_bytes, str(path))
        data_begin = LENGTH_BYTES + length
        tensors, metadata = _parse(stream.read(length), file_bytes - data_begin, str(path))
    return Shard(path, data_begin, tensors, metadata)


def _parse(raw: bytes, data_bytes: int, where: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    if raw[:1] != b"{":
        raise HostError(f"{where}: the header is not a JSON object; the file is damaged")
    tensors: dict[str, Tensor] = {}
    metadata: dict[str, str] = {}
    end = 0
    for name, entry in parse_object(raw, where).items():
        if name == METADATA:
            for key, value in as_object(entry, f"{where}: {METADATA}").items():
                place = f"{where}: {METADATA}: {key[:100]!r}"
                metadata[as_text(key, place)] = as_text(value, place)
            continue
        if not name or len(name) > MOST_NAME_CHARACTERS or not name.isprintable():
            raise HostError(
                f"{where}: tensor name {name[:100]!r} is empty, too long or unprintable"
            )
        tensors[name], end = _parse_entry(entry, end, f"{where}: tensor {name}")
    if end != data_bytes:
        raise HostError(
            f"{where}: {data_bytes} bytes of data where the header declares {end};"
            " the file is cut off or damaged"
        )
    return tensors, metadata


def _parse_entry(entry: object, expected_begin: int, where: str) -> tuple[Tensor, int]:
    """One tensor, whose data must begin at `expected_begin`, and the end of its data."""
    fields = as_object(entry, where)
    if fields.keys() != {"dtype", "shape", "data_offsets"}:
        raise HostError(f"{where}: wants exactly dtype, shape and data_offsets")
    dtype = as_text(fields["dtype"], f"{where}: dtype")
    if dtype not in DTYPE_BYTES:
        raise HostError(f"{where}: unknown dtype {dtype[:100]!r}")
    shape, offsets = fields["shape"], fields["data_offsets"]
    if not isinstance(shape, list) or len(shape) > MOST_DIMENSIONS:
        raise HostError(f"{where}: shape is not a list of at most {MOST_DIMENSIONS} numbers")
    tensor = Tensor(dtype, tuple(as_count(size, f"{where}: shape") for size in shape))
    if not isinstance(offsets, list) or len(offsets) != 2:
        raise HostError(f"{where}: data_offsets is not a pair of numbers")
    begin, end = (as_count(offset, f"{where}: data_offsets") for offset in offsets)
    if begin != expected_begin:
        fault = "leaves a gap after" if begin > expected_begin else "is unsorted or overlaps"
        raise HostError(
            f"{where}: data at {begin} {fault} the data before it, up to {expected_begin}"
        )
    if end - begin != tensor.nbytes:
        raise HostError(f"{where}: {end - begin} bytes of data where {tensor} has {tensor.nbytes}")
    return tensor, end
