"""Is the checkpoint in a folder whole: quick by its stamp, deep by its digests.

The stamp records sizes and modification times at the moment when every digest was right.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Mapping
from pathlib import Path

from hostlib.atomic import fsync_dir, write_file
from hostlib.download import sha256_file
from hostlib.errors import EXIT_UNABLE, HostError
from hostlib.parallel import StoppableProgress, for_each

from checkpoint import census, manifest, serving
from checkpoint.census import Tensors
from checkpoint.dimensions import Architecture, architecture
from checkpoint.manifest import Manifest
from checkpoint.shards import read_shards, tensors_of
from checkpoint.strict import as_object, few, read_object, require_regular


def read_tensors(folder: Path) -> Tensors:
    """Every tensor in `folder`; raises HostError as `shards.read_shards`."""
    return tensors_of(read_shards(folder))


def expected_in(folder: Path) -> Tensors:
    """The tensors that the config.json in `folder` asks for; raises HostError on a bad one."""
    return census.expected_tensors(_architecture(folder))


def check_tensors(folder: Path, listed: Manifest) -> None:
    """Raise HostError unless index, shards, configs and manifest agree, and the engine takes it."""
    expected = check_shards(folder)
    if listed.census != census.count(expected).as_json():
        raise HostError(f"{folder}: the manifest's census is not that of config.json")


def check_shards(folder: Path) -> Tensors:
    """The tensors in `folder`, a whole checkpoint or a trunk.

    Raises:
        HostError: index, shards and config.json do not agree on every tensor, or it is a whole
            checkpoint that the engine would not take.
    """
    arch = _architecture(folder)
    if arch.vision is not None:
        _check_configs(folder, arch)
    expected = census.expected_tensors(arch)
    difference = census.compare(read_tensors(folder), expected)
    if difference:
        raise HostError(
            f"{folder}: the tensors are not those that config.json asks for", *difference.lines()
        )
    return expected


def _check_configs(folder: Path, arch: Architecture) -> None:
    path = folder / manifest.CONFIG
    serving.check_ranks(arch.text, str(path))
    for name, key, unquantised_key in (
        (manifest.CONFIG, "quantization_config", "ignore"),
        (manifest.QUANTISATION, "quantization", "exclude_modules"),
    ):
        path = folder / name
        if path.exists():
            settings = as_object(read_object(path).get(key), f"{path}: {key}")
            serving.check_quantisation(settings, unquantised_key, arch, f"{path}: {key}")


def check_strangers(folder: Path, listed: Manifest) -> None:
    """Raise HostError if `folder` holds what is not in the manifest.

    It matters: the engine runs code that it finds beside the weights.
    """
    present = {path.name for path in folder.iterdir() if not manifest.is_unfinished(path.name)}
    strangers = sorted(present - listed.files.keys() - {manifest.MANIFEST, manifest.STAMP})
    if strangers:
        raise HostError(
            f"{folder}: {few(strangers)}: not in the manifest; move it out of the checkpoint"
        )


def check_names(folder: Path, listed: Manifest) -> None:
    """Raise HostError unless `folder` holds the files of the manifest, whole, and no others."""
    check_strangers(folder, listed)
    for name, entry in listed.files.items():
        require_regular(folder / name)
        size = (folder / name).stat().st_size
        if size != entry.size:
            raise HostError(
                f"{folder / name}: {size} bytes instead of {entry.size}; the file is damaged"
            )


def hash_files(folder: Path, sizes: Mapping[str, int]) -> dict[str, str]:
    """The sha256 of these files in `folder`, in parallel, the largest first."""
    progress = StoppableProgress(f"hashing {folder.name}", sum(sizes.values()))
    hashed: dict[str, str] = {}

    def digest(name: str) -> None:
        hashed[name] = sha256_file(folder / name, progress)

    largest_first = sorted(sizes, key=lambda name: -sizes[name])
    for_each(largest_first, digest, os.cpu_count() or 1, progress)
    return hashed


def check_digests(folder: Path, listed: Manifest) -> None:
    """Hash every file, in parallel; raise HostError that names those that differ."""
    hashed = hash_files(folder, {name: entry.size for name, entry in listed.files.items()})
    wrong = [name for name, entry in listed.files.items() if hashed[name] != entry.sha256]
    if wrong:
        raise HostError(
            f"{folder}: {few(wrong)}: sha256 differs from the manifest; the file is damaged"
        )


def times_of(folder: Path, listed: Manifest) -> dict[str, int]:
    """When each file was modified, in nanoseconds."""
    return {name: (folder / name).stat().st_mtime_ns for name in listed.files}


def write_stamp(folder: Path, listed: Manifest, times: Mapping[str, int] | None = None) -> None:
    """Record that every digest was right when the files were of these `times` (default: now)."""
    stamp = {
        "manifest_sha256": listed.sha256,
        "mtimes_ns": times_of(folder, listed) if times is None else times,
    }
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
    stamped, times = (
        as_object(stamp.get("mtimes_ns"), f"{path}: mtimes_ns"),
        times_of(folder, listed),
    )
    touched = [name for name in listed.files if stamped.get(name) != times[name]]
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
    """Names, sizes, digests and headers, then a new stamp.

    Raises:
        HostError: something is wrong; the stamp is gone then, so that nothing else counts the
            folder as verified.
    """
    require_folder(folder)
    try:
        listed = manifest.read(folder)
        check_names(folder, listed)
        times = times_of(folder, listed)  # before: what changes meanwhile must show as touched
        check_digests(folder, listed)
        check_tensors(folder, listed)
    except HostError as error:
        raise _without_stamp(folder, error) from None
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        failed = HostError(f"{error.filename or folder}: {error.strerror}; the disk is failing")
        raise _without_stamp(folder, failed) from None
    try:
        write_stamp(folder, listed, times)
    except OSError as error:
        raise HostError(
            f"{folder}: every digest is right, but its stamp cannot be written ({error.strerror});"
            " make the folder writable, then run again",
            exit_code=EXIT_UNABLE,
        ) from None
    return listed


def _without_stamp(folder: Path, error: HostError) -> HostError:
    path = folder / manifest.STAMP
    try:
        path.unlink(missing_ok=True)
        fsync_dir(folder)
    except OSError as refusal:
        line = f"{path}: cannot be removed ({refusal.strerror}): remove it, it is no longer true"
        return HostError(error.message, *error.details, line, exit_code=error.exit_code)
    return error


def require_folder(folder: Path) -> None:
    """Raise HostError unless `folder` is one."""
    if not folder.is_dir():
        raise HostError(
            f"{folder}: no such folder; fetch the checkpoint first", exit_code=EXIT_UNABLE
        )


def _read(folder: Path) -> Manifest:
    require_folder(folder)
    return manifest.read(folder)


def _architecture(folder: Path) -> Architecture:
    path = folder / manifest.CONFIG
    return architecture(read_object(path), str(path))
