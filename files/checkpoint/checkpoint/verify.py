"""Is the checkpoint in a folder whole: quick by its stamp, deep by its digests.

The stamp records sizes and modification times at the moment when every digest was right.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from hostlib.atomic import write_file
from hostlib.download import sha256_file
from hostlib.errors import EXIT_UNABLE, HostError

from checkpoint import census, manifest
from checkpoint.census import Tensors
from checkpoint.header import read_header
from checkpoint.manifest import Manifest
from checkpoint.parallel import StoppableProgress, for_each
from checkpoint.strict import (
    as_count,
    as_file_name,
    as_object,
    few,
    read_object,
    require_regular,
)


def read_tensors(folder: Path) -> Tensors:
    """Every tensor of the checkpoint in `folder`, from the headers of its shards.

    Raises:
        HostError: a shard is missing or damaged, a tensor stands in two shards, or the index
            disagrees with the shards.
    """
    path = folder / manifest.INDEX
    index = read_object(path)
    weight_map = {
        name: as_file_name(shard, f"{path}: weight_map: {name[:100]}")
        for name, shard in as_object(index.get("weight_map"), f"{path}: weight_map").items()
    }
    tensors: Tensors = {}
    home: dict[str, str] = {}
    for shard in sorted(set(weight_map.values())):
        for name, tensor in read_header(folder / shard).items():
            if name in tensors:
                raise HostError(f"{folder}: tensor {name} stands in {home[name]} and in {shard}")
            tensors[name], home[name] = tensor, shard
    if home != weight_map:
        wrong = sorted(
            name for name in home.keys() | weight_map if home.get(name) != weight_map.get(name)
        )
        raise HostError(f"{path}: disagrees with the shards on {len(wrong)} tensors: {few(wrong)}")
    metadata = as_object(index.get("metadata", {}), f"{path}: metadata")
    if "total_size" in metadata:
        total = as_count(metadata["total_size"], f"{path}: metadata.total_size")
        held = sum(tensor.nbytes for tensor in tensors.values())
        if total != held:
            raise HostError(f"{path}: total_size is {total} where the shards hold {held} bytes")
    return tensors


def expected_in(folder: Path) -> Tensors:
    """The tensors that the config.json in `folder` asks for; raises HostError on a bad one."""
    path = folder / manifest.CONFIG
    return census.expected_tensors(census.architecture(read_object(path), str(path)))


def check_tensors(folder: Path, listed: Manifest) -> None:
    """Raise HostError unless index, shards, config.json and manifest agree on every tensor."""
    expected = expected_in(folder)
    difference = census.compare(read_tensors(folder), expected)
    if difference:
        raise HostError(
            f"{folder}: the tensors are not those that config.json asks for", *difference.lines()
        )
    if listed.census != census.count(expected).as_json():
        raise HostError(f"{folder}: the manifest's census is not that of config.json")


def check_names(folder: Path, listed: Manifest) -> None:
    """Raise HostError unless `folder` holds the files of the manifest, whole, and no others.

    A stranger matters: the engine runs code that it finds beside the weights.
    """
    present = {path.name for path in folder.iterdir()}
    strangers = sorted(present - listed.files.keys() - {manifest.MANIFEST, manifest.STAMP})
    if strangers:
        raise HostError(
            f"{folder}: {few(strangers)}: not in the manifest; move it out of the checkpoint"
        )
    for name, entry in listed.files.items():
        require_regular(folder / name)
        size = (folder / name).stat().st_size
        if size != entry.size:
            raise HostError(
                f"{folder / name}: {size} bytes instead of {entry.size}; the file is damaged"
            )


def check_digests(folder: Path, listed: Manifest) -> None:
    """Hash every file, in parallel; raise HostError that names those that differ."""
    progress = StoppableProgress(f"hashing {folder.name}", listed.total_bytes)
    hashed: dict[str, str] = {}

    def digest(name: str) -> None:
        hashed[name] = sha256_file(folder / name, progress)

    for_each(listed.files, digest, os.cpu_count() or 1, progress)
    wrong = [name for name, entry in listed.files.items() if hashed[name] != entry.sha256]
    if wrong:
        raise HostError(
            f"{folder}: {few(wrong)}: sha256 differs from the manifest; the file is damaged"
        )


def write_stamp(folder: Path, listed: Manifest) -> None:
    """Record that every digest was right just now."""
    times = {name: (folder / name).stat().st_mtime_ns for name in listed.files}
    stamp = {"manifest_sha256": listed.sha256, "mtimes_ns": times}
    write_file(folder / manifest.STAMP, json.dumps(stamp, indent=1, sort_keys=True).encode())


def check_stamp(folder: Path, listed: Manifest) -> None:
    """Raise HostError if a file was touched since the stamp was written, or there is none."""
    path = folder / manifest.STAMP
    cure = f"run `ckpt verify --deep {folder}`, which hashes every file and renews the stamp"
    if not path.exists():
        raise HostError(f"{path}: missing; {cure}")
    stamp = read_object(path)
    if stamp.get("manifest_sha256") != listed.sha256:
        raise HostError(f"{path}: belongs to another manifest; {cure}")
    times = as_object(stamp.get("mtimes_ns"), f"{path}: mtimes_ns")
    touched = [
        name for name in listed.files if times.get(name) != (folder / name).stat().st_mtime_ns
    ]
    if touched:
        raise HostError(f"{folder}: {few(touched)}: touched since it was verified; {cure}")


def quick(folder: Path) -> Manifest:
    """Names, sizes, stamp and headers; raises HostError on the first that is wrong."""
    listed = unchanged(folder)
    check_tensors(folder, listed)
    return listed


def unchanged(folder: Path) -> Manifest:
    """Names, sizes and stamp only; raises HostError on the first that is wrong."""
    listed = _read(folder)
    check_names(folder, listed)
    check_stamp(folder, listed)
    return listed


def deep(folder: Path) -> Manifest:
    """Names, sizes, digests and headers, then a new stamp; raises HostError on a wrong one."""
    listed = _read(folder)
    check_names(folder, listed)
    check_digests(folder, listed)
    check_tensors(folder, listed)
    write_stamp(folder, listed)
    return listed


def _read(folder: Path) -> Manifest:
    if not folder.is_dir():
        raise HostError(
            f"{folder}: no such folder; fetch the checkpoint first", exit_code=EXIT_UNABLE
        )
    return manifest.read(folder)
