"""Shared by the tests of assembled checkpoints: a small pair, and its files read and damaged."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import safetensors
from checkpoint.census import count as census_of
from checkpoint.census import expected_tensors, quantised_modules
from checkpoint.dimensions import architecture

from lab.checkpoint import Pair, build_pair
from lab.checkpoint_config import Size

SMALL = Size(vocabulary=512)
Content = dict[str, tuple[str, tuple[int, ...], bytes]]


def small_pair(folder: Path) -> Pair:
    """Trunk and base of a few megabytes."""
    folder.mkdir(exist_ok=True)
    return build_pair(folder, SMALL)


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def content(folder: Path) -> Content:
    """Dtype, shape and bytes of every tensor, by the format's own library."""
    found: Content = {}
    for path in shards(folder):
        for name, tensor in safetensors.deserialize(path.read_bytes()):  # type: ignore[no-untyped-call]
            assert name not in found
            found[name] = (tensor["dtype"], tuple(tensor["shape"]), bytes(tensor["data"]))
    return found


def data_begin(path: Path) -> int:
    """Where the data of a safetensors file begins."""
    with path.open("rb") as stream:
        return 8 + int.from_bytes(stream.read(8), "little")


def raw_header(path: Path) -> bytes:
    with path.open("rb") as stream:
        return stream.read(data_begin(path))[8:]


def set_header(path: Path, text: bytes) -> None:
    """Another header before the same data."""
    data = path.read_bytes()[data_begin(path) :]
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def edit_header(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    header = json.loads(raw_header(path))
    change(header)
    set_header(path, json.dumps(header).encode())


def entries(header: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The tensors of a header, in the order of their data."""
    return ((name, entry) for name, entry in header.items() if name != "__metadata__")


def full_sized(folder: Path, config: dict[str, Any], count: int = 8) -> Path:
    """A checkpoint of any size in files that are holes behind their headers.

    With a manifest and stamp whose digests are made up: right for all that reads no data.
    """
    folder.mkdir()
    tensors = expected_tensors(architecture(config, "config.json"))
    names = list(tensors)
    weight_map: dict[str, str] = {}
    for number in range(count):
        shard = f"model-{number + 1:05}-of-{count:05}.safetensors"
        part = {name: tensors[name] for name in names[number::count]}
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name, tensor in part.items():
            begin, end = end, end + tensor.nbytes
            header[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape),
                            "data_offsets": [begin, end]}  # fmt: skip
        with (folder / shard).open("wb") as stream:
            text = json.dumps(header).encode()
            stream.write(len(text).to_bytes(8, "little") + text)
            stream.truncate(8 + len(text) + end)
        weight_map |= dict.fromkeys(part, shard)
    quantised = {
        name: {"quant_algo": algo}
        for name, algo in quantised_modules(architecture(config, "config.json")).items()
    }
    settings = {"quant_method": "modelopt", "ignore": ["mtp*"], "quantized_layers": quantised}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    files = {path.name: path.stat() for path in sorted(folder.iterdir())}
    manifest = folder / "manifest.json"
    manifest.write_text(json.dumps({
        "format": 1, "census": census_of(tensors).as_json(), "provenance": {},
        "files": {name: {"size": state.st_size, "sha256": "0" * 64}
                  for name, state in files.items()},
    }))  # fmt: skip
    (folder / "stamp.json").write_text(json.dumps({
        "manifest_sha256": hashlib.sha256(manifest.read_bytes()).hexdigest(),
        "mtimes_ns": {name: state.st_mtime_ns for name, state in files.items()},
    }))  # fmt: skip
    return folder
