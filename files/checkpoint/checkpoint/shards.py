"""All shards of a checkpoint or parent, and the index that says what is where."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from hostlib.errors import HostError

from checkpoint.census import Tensors
from checkpoint.header import Shard, read_shard
from checkpoint.manifest import INDEX, SINGLE_SHARD
from checkpoint.strict import as_count, as_file_name, as_object, few, read_object


def read_shards(folder: Path) -> list[Shard]:
    """The headers of every shard in `folder`, in the order of their names.

    Raises:
        HostError: a shard is missing or damaged, or one too many, a tensor stands in two shards,
            or the index disagrees with the shards.
    """
    path = folder / INDEX
    if not path.exists() and (folder / SINGLE_SHARD).exists():
        _check_no_others(folder, {SINGLE_SHARD})
        return [read_shard(folder / SINGLE_SHARD)]
    index = read_object(path)
    weight_map = {
        name: as_file_name(shard, f"{path}: weight_map: {name[:100]!r}")
        for name, shard in as_object(index.get("weight_map"), f"{path}: weight_map").items()
    }
    shards: list[Shard] = []
    home: dict[str, str] = {}
    for shard_name in sorted(set(weight_map.values())):
        shard = read_shard(folder / shard_name)
        for name in shard.tensors:
            if name in home:
                raise HostError(
                    f"{folder}: tensor {name} stands in {home[name]} and in {shard_name}"
                )
            home[name] = shard_name
        shards.append(shard)
    if home != weight_map:
        wrong = sorted(
            name for name in home.keys() | weight_map if home.get(name) != weight_map.get(name)
        )
        raise HostError(f"{path}: disagrees with the shards on {len(wrong)} tensors: {few(wrong)}")
    _check_no_others(folder, set(weight_map.values()))
    metadata = as_object(index.get("metadata", {}), f"{path}: metadata")
    if "total_size" in metadata:
        total = as_count(metadata["total_size"], f"{path}: metadata.total_size")
        held = sum(shard.data_bytes for shard in shards)
        if total != held:
            raise HostError(f"{path}: total_size is {total} where the shards hold {held} bytes")
    return shards


def _check_no_others(folder: Path, named: set[str]) -> None:
    """The engine opens every shard that it finds: raise HostError if there are others."""
    others = sorted({path.name for path in folder.glob("*.safetensors")} - named)
    if others:
        raise HostError(f"{folder}: {few(others)}: a shard that the index does not name; remove it")


def tensors_of(shards: list[Shard]) -> Tensors:
    """Every tensor in `shards`."""
    return {name: tensor for shard in shards for name, tensor in shard.tensors.items()}


def build_index(weight_map: Mapping[str, str], total_bytes: int) -> bytes:
    """The index of a checkpoint whose tensors stand in these shards."""
    index = {
        "metadata": {"total_size": total_bytes},
        "weight_map": dict(sorted(weight_map.items())),
    }
    return json.dumps(index, indent=1).encode() + b"\n"
