"""The safetensors header parser, against the format's own library."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
from checkpoint.header import (
    DTYPE_BYTES,
    HEADER_LIMIT_BYTES,
    Tensor,
    header_length,
    parse_header,
    read_shard,
)
from hostlib.errors import HostError
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.weights import write_safetensors

LIBRARY_NAMES = {"F8_E4M3": "float8_e4m3fn", "BF16": "bfloat16", "F16": "float16", "F32": "float32",
                 "U8": "uint8", "I64": "int64", "BOOL": "bool"}  # fmt: skip

names = st.text(st.characters(categories=("L", "N")), min_size=1, max_size=12)
shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)
tensor_sets = st.dictionaries(
    names, st.builds(Tensor, st.sampled_from(sorted(LIBRARY_NAMES)), shapes), max_size=8
)


def parse_file(content: bytes) -> dict[str, Tensor]:
    length = header_length(content[:8], len(content), "file")
    return parse_header(content[8 : 8 + length], len(content) - 8 - length, "file")


def library_file(tensors: dict[str, Tensor]) -> bytes:
    data = np.zeros(max([tensor.nbytes for tensor in tensors.values()], default=0) + 1, np.uint8)
    return safetensors.serialize(
        {
            name: safetensors.TensorSpec(
                dtype=LIBRARY_NAMES[tensor.dtype],
                shape=tensor.shape,
                data_ptr=data.ctypes.data,
                data_len=tensor.nbytes,
            )
            for name, tensor in tensors.items()
        }
    )


def library_tensors(content: bytes) -> dict[str, Tensor]:
    return {
        name: Tensor(value["dtype"], tuple(value["shape"]))
        for name, value in safetensors.deserialize(content)  # type: ignore[no-untyped-call]
    }


def with_header(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(dtype: object, shape: object, begin: object, end: object) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@given(tensor_sets)
def test_reads_what_the_library_writes(tensors: dict[str, Tensor]) -> None:
    assert parse_file(library_file(tensors)) == tensors


@given(tensor_sets)
@settings(max_examples=50)
def test_the_library_reads_what_the_miniature_writer_writes(
    tmp_path_factory: pytest.TempPathFactory, tensors: dict[str, Tensor]
) -> None:
    path = tmp_path_factory.mktemp("written") / "model.safetensors"
    write_safetensors(path, tensors, "seed")
    assert library_tensors(path.read_bytes()) == tensors
    assert read_shard(path).tensors == tensors


@st.composite
def damaged_files(draw: st.DrawFn) -> bytes:
    content = bytearray(library_file(draw(tensor_sets)))
    for _ in range(draw(st.integers(1, 4))):
        place = draw(st.integers(0, max(len(content) - 1, 0)))
        kind = draw(st.sampled_from(["flip", "cut", "insert", "drop", "digit"]))
        if kind == "flip" and content:
            content[place] ^= 1 << draw(st.integers(0, 7))
        elif kind == "cut":
            del content[place:]
        elif kind == "insert":
            content[place:place] = draw(
                st.sampled_from([b"[", b"{", b'"', b",", b"0", b"\0", b"-"])
            )
        elif kind == "drop":
            del content[place : place + draw(st.integers(1, 9))]
        elif kind == "digit" and content:
            content[place] = draw(st.integers(0x30, 0x39))
    return bytes(content)


@given(damaged_files())
@settings(max_examples=600)
def test_a_damaged_file_is_refused_in_one_line_or_is_good_to_the_library_too(
    content: bytes,
) -> None:
    try:
        tensors = parse_file(content)
    except HostError as error:
        assert error.message.startswith("file: ")
        assert "\n" not in error.message
        assert len(error.message) < 1000
    else:
        assert library_tensors(content) == tensors


@given(st.binary(max_size=200))
@settings(max_examples=500)
def test_any_bytes_give_tensors_or_a_host_error(content: bytes) -> None:
    try:
        parse_file(content)
    except HostError as error:
        assert "\n" not in error.message


DEEP = b'{"__metadata__":' + b"[" * 200_000 + b"]" * 200_000 + b"}"
GOOD = entry("U8", [4], 0, 4)
REFUSED: list[tuple[str, Any, bytes, str]] = [
    ("gap", {"a": GOOD, "b": entry("U8", [2], 5, 7)}, bytes(7), "tensor b: .* gap"),
    ("overlap", {"a": GOOD, "b": entry("U8", [2], 3, 5)}, bytes(5), "tensor b: .* overlaps"),
    ("unsorted", {"a": entry("U8", [2], 4, 6), "b": GOOD}, bytes(6), "tensor a: "),
    ("cut off", {"a": GOOD}, bytes(3), "cut off"),
    ("too long", {"a": GOOD}, bytes(5), "damaged"),
    ("dtype times shape", {"a": entry("BF16", [4], 0, 4)}, bytes(4), r"tensor a: .*BF16 \[4\]"),
    ("unknown dtype", {"a": entry("F4", [4], 0, 4)}, bytes(4), "tensor a: unknown dtype 'F4'"),
    ("negative", {"a": entry("U8", [-2, -2], 0, 4)}, bytes(4), "tensor a: shape"),
    ("true", {"a": entry("U8", [True, 4], 0, 4)}, bytes(4), "tensor a: shape"),
    ("fraction", {"a": entry("U8", [4.0], 0, 4)}, bytes(4), "tensor a: shape"),
    ("three offsets", {"a": GOOD | {"data_offsets": [0, 2, 4]}}, bytes(4), "data_offsets"),
    ("strange field", {"a": GOOD | {"more": 1}}, bytes(4), "exactly"),
    ("twice", b'{"a":%s,"a":%s}' % ((json.dumps(GOOD).encode(),) * 2), bytes(4), "'a' .* twice"),
    ("newline", {"a\nb": GOOD}, bytes(4), "unprintable"),
    ("metadata", {"__metadata__": {"format": 1}}, b"", "__metadata__"),
    ("not an object", b"[]", b"", "not a JSON object"),
    ("deep", DEEP, b"", "nested too deeply|not valid JSON"),
    ("not UTF-8", b'{"\xff": 1}', b"", "not valid JSON"),
]


@pytest.mark.parametrize(
    ("header", "data", "pattern"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED]
)
def test_refuses(header: object, data: bytes, pattern: str) -> None:
    with pytest.raises(HostError, match=pattern):
        parse_file(with_header(header, data))


@pytest.mark.parametrize(
    ("length", "pattern"), [(HEADER_LIMIT_BYTES + 1, "over the limit"), (101, "longer than")]
)
def test_refuses_a_header_length_before_reading_it(length: int, pattern: str) -> None:
    file_bytes = 10 * HEADER_LIMIT_BYTES if length > HEADER_LIMIT_BYTES else 108
    with pytest.raises(HostError, match=pattern):
        header_length(length.to_bytes(8, "little"), file_bytes, "file")
    header_length((100).to_bytes(8, "little"), 108, "file")


def test_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(with_header({"a": GOOD}, bytes(3)))
    with pytest.raises(HostError, match=f"^{path}: "):
        read_shard(path)
    link = tmp_path / "link.safetensors"
    link.symlink_to(path)
    with pytest.raises(HostError, match="not a regular file"):
        read_shard(link)


def test_knows_the_width_of_every_dtype() -> None:
    """A width told wrong would let a wrong offset pass: the digits in a name are its bits."""
    for dtype, width in DTYPE_BYTES.items():
        bits = "8" if dtype == "BOOL" else dtype.split("_")[0].lstrip("BUIFC")
        assert int(bits) == 8 * width
