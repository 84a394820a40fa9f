"""The header of a safetensors file, parsed strictly.

Layout: 8 bytes little-endian header length, that many bytes of JSON, then the tensors' data.
Source: the format description in huggingface/safetensors (README, "Format").
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from hostlib.errors import HostError

from checkpoint.strict import as_count, as_object, as_text, parse_object, require_regular

HEADER_LIMIT_BYTES = 100_000_000  # the reference implementation's own limit
LENGTH_BYTES = 8
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
            f"{where}: header of {length} bytes is over the format's {HEADER_LIMIT_BYTES}"
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
    if raw[:1] != b"{":
        raise HostError(f"{where}: the header is not a JSON object; the file is damaged")
    tensors: dict[str, Tensor] = {}
    end = 0
    for name, entry in parse_object(raw, where).items():
        if name == "__metadata__":
            for key, value in as_object(entry, f"{where}: __metadata__").items():
                as_text(value, f"{where}: __metadata__: {key[:100]!r}")
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
    return tensors


def read_header(path: Path) -> dict[str, Tensor]:
    """The tensors of the safetensors file `path`; raises HostError as `parse_header`."""
    require_regular(path)
    with path.open("rb") as stream:
        file_bytes = path.stat().st_size
        length = header_length(stream.read(LENGTH_BYTES), file_bytes, str(path))
        return parse_header(stream.read(length), file_bytes - LENGTH_BYTES - length, str(path))


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
