"""The two parents of an assembled checkpoint: read, held against each other, digested.

The trunk is the own fine-tune as the quantiser exported it, the base a published checkpoint that
is whole. Nothing is written here.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from hostlib.errors import HostError

from checkpoint import census, manifest, verify
from checkpoint.dimensions import architecture
from checkpoint.header import Shard
from checkpoint.manifest import Manifest
from checkpoint.shards import read_shards, tensors_of
from checkpoint.strict import few, read_object

COMPRESSED_TENSORS = (".weight_packed", ".weight_global_scale", ".input_global_scale")
WRAPPER_PREFIXES = (census.TRUNK, census.VISION)


@dataclass(frozen=True)
class Parent:
    """A parent's folder and shards, and size and modification time of each shard's file."""

    folder: Path
    shards: list[Shard]
    marks: dict[str, tuple[int, int]]


def read_pair(trunk_folder: Path, base_folder: Path) -> tuple[Parent, Parent]:
    """Trunk and base.

    Raises:
        HostError: one is damaged or of another kind, the trunk was assembled already, or its
            tensors are not those of the base's trunk.
    """
    for folder in (trunk_folder, base_folder):
        verify.require_folder(folder)
    path = trunk_folder / manifest.CONFIG
    architecture(read_object(path), str(path))
    trunk = _parent(trunk_folder)
    _check_layout(trunk)
    if not any(name.startswith(census.TRUNK) for name in verify.check_shards(base_folder)):
        raise HostError(f"{base_folder}: a trunk alone; the base must be a whole checkpoint")
    base = _parent(base_folder)
    wanted = {
        name: tensor
        for name, tensor in tensors_of(base.shards).items()
        if census.group_of(name) == "trunk"
    }
    found = {census.nested(name): tensor for name, tensor in tensors_of(trunk.shards).items()}
    difference = census.compare(found, wanted)
    if difference:
        raise HostError(
            f"{trunk_folder}: the tensors are not those of the trunk in {base_folder}",
            *difference.lines(),
        )
    return trunk, base


def check_locked(folder: Path, sha256: str | None, role: str) -> None:
    """Raise HostError unless the manifest in `folder` has the locked digest, if there is one."""
    if sha256 is None:
        return
    if not (folder / manifest.MANIFEST).exists():
        raise HostError(f"{folder / manifest.MANIFEST}: missing; adopt the {role} first")
    found = manifest.read(folder).sha256
    if found != sha256:
        raise HostError(
            f"{folder}: the {role} is at another revision than the locked one; bring that one",
            f"locked manifest {sha256}",
            f"this manifest   {found}",
        )


def digest(parent: Parent) -> str:
    """The sha256 of what `sha256sum *.safetensors` prints in the parent's folder.

    Raises:
        HostError: the parent has a manifest, and is not as that says.
    """
    if (parent.folder / manifest.MANIFEST).exists():
        files = _as_listed(parent.folder).files
        digests = {name: files[name].sha256 for name in parent.marks}
    else:
        sizes = {name: size for name, (size, _) in parent.marks.items()}
        digests = verify.hash_files(parent.folder, sizes)
    lines = "".join(f"{digests[name]}  {name}\n" for name in sorted(digests))
    return hashlib.sha256(lines.encode()).hexdigest()


def check_unchanged(parent: Parent) -> None:
    """Raise HostError if a shard was touched since the parent was read."""
    now = _marks(parent.shards)
    touched = [name for name in now if now[name] != parent.marks[name]]
    if touched:
        raise HostError(f"{parent.folder}: {few(touched)}: touched while it was read; run again")


def _parent(folder: Path) -> Parent:
    shards = read_shards(folder)
    return Parent(folder, shards, _marks(shards))


def _marks(shards: list[Shard]) -> dict[str, tuple[int, int]]:
    states = {shard.path.name: shard.path.stat() for shard in shards}
    return {name: (state.st_size, state.st_mtime_ns) for name, state in states.items()}


def _check_layout(trunk: Parent) -> None:
    names = tensors_of(trunk.shards)
    packed = [name for name in names if name.endswith(COMPRESSED_TENSORS)]
    if packed:
        raise HostError(
            f"{trunk.folder}: a compressed-tensors export, which has no fast FP8 path in the"
            f" engine; use the modelopt export: {few(packed)}"
        )
    wrapped = [name for name in names if name.startswith(WRAPPER_PREFIXES)]
    if wrapped:
        raise HostError(
            f"{trunk.folder}: has the wrapper's prefix already, so it was assembled before; give"
            f" the quantiser's own export: {few(wrapped)}"
        )


def _as_listed(folder: Path) -> Manifest:
    """The manifest, which its files are as: the stamp says so, or their digests do."""
    try:
        return verify.unchanged(folder)
    except HostError:
        listed = manifest.read(folder)
        verify.check_names(folder, listed)
        verify.check_digests(folder, listed)
        return listed
