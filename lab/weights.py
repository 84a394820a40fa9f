"""Safetensors files with seeded random data, of any size, written in constant memory."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path

from checkpoint.header import DTYPE_BYTES, Tensor

CHUNK_BYTES = 1 << 22


def write_safetensors(path: Path, tensors: Mapping[str, Tensor], seed: str) -> None:
    """Write `tensors` with seeded data to `path`, the widest dtypes first so that all align."""
    ordered = sorted(tensors, key=lambda name: (-DTYPE_BYTES[tensors[name].dtype], name))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in ordered:
        tensor = tensors[name]
        begin, end = end, end + tensor.nbytes
        header[name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        for name in ordered:
            for chunk in random_data(name, tensors[name], seed):
                stream.write(chunk)


def random_data(name: str, tensor: Tensor, seed: str) -> Iterator[bytes]:
    """Finite values for a tensor: BF16 around ±0.01, scales positive, no FP8 NaN."""
    source = random.Random(f"{seed}:{name}")
    for begin in range(0, tensor.nbytes, CHUNK_BYTES):
        count = min(CHUNK_BYTES, tensor.nbytes - begin)
        if tensor.dtype == "F32":
            values = (1e-5 + 9e-3 * source.random() for _ in range(count // 4))
            yield struct.pack(f"<{count // 4}f", *values)
            continue
        data = bytearray(source.randbytes(count))
        if tensor.dtype == "BF16":  # little-endian: the second byte holds sign and exponent
            data[1::2] = data[1::2].translate(bytes(0x3C | (byte & 0x80) for byte in range(256)))
        elif tensor.dtype == "F8_E4M3":  # exponent and mantissa all ones is NaN
            sign = 0x00 if name.endswith("_scale") else 0x80
            data = data.translate(bytes((b & sign) | min(b & 0x7F, 0x7E) for b in range(256)))
        yield bytes(data)
