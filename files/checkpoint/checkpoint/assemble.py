"""Put a checkpoint together from its trunk and its base, or leave everything as it was."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hostlib.atomic import locked, replace_symlink, write_file
from hostlib.errors import HostError

from checkpoint import census, manifest, parents, verify
from checkpoint.against import check_same, trunk_names
from checkpoint.copying import can_share
from checkpoint.layout import FilePlan, lay_out, plan_files
from checkpoint.manifest import FileEntry, Manifest
from checkpoint.parents import Parent
from checkpoint.publish import check_places, check_replaceable, put_in_place
from checkpoint.shards import read_shards, tensors_of
from checkpoint.space import require_space

LOCK_WAIT_S = 10.0
STAGING = ".staging-assembled"  # under the lock, so one name is enough


@dataclass(frozen=True)
class Order:
    """What to assemble, and where the result goes.

    Args:
        trunk: folder of the quantiser's export.
        base: folder of the published checkpoint.
        root: folder of all checkpoints, each in a folder named by its manifest's digest.
        link: symlink that shall point to the result.
        manifest_sha256: digest that the result's manifest must have; None: any.
        trunk_sha256, base_sha256: digests that the parents' manifests must have; None: any.
    """

    trunk: Path
    base: Path
    root: Path
    link: Path
    manifest_sha256: str | None = None
    trunk_sha256: str | None = None
    base_sha256: str | None = None


def assemble(order: Order) -> Manifest:
    """Assemble, prove, publish and link the checkpoint; its manifest.

    The same one that stands there whole stays; a damaged one is replaced in one step.

    Raises:
        HostError: the parents do not fit or are damaged, no space, or the result is not the one
            asked for. Link and earlier checkpoints are then untouched, and nothing is left.
    """
    check_places(order.root, order.link)
    if order.manifest_sha256 is not None:
        folder = order.root / manifest.folder_name(order.manifest_sha256)
        standing = _standing(folder, order.manifest_sha256)
        if standing:
            _point(order.link, folder)
            return standing
    parents.check_locked(order.trunk, order.trunk_sha256, "trunk")
    parents.check_locked(order.base, order.base_sha256, "base")
    trunk, base = parents.read_pair(order.trunk, order.base)
    files = plan_files(trunk, base)
    order.root.mkdir(exist_ok=True)
    with locked(order.root / ".lock", "ckpt assemble", LOCK_WAIT_S):
        staging = order.root / STAGING
        if staging.exists():
            shutil.rmtree(staging)
        staging.mkdir()
        try:
            _check_space(files, trunk, base, staging)
            provenance = {
                "origin": "assembled",
                "trunk_shards_sha256": parents.digest(trunk),
                "base_shards_sha256": parents.digest(base),
            }
            lay_out(files, staging)
            listed = _prove(staging, trunk, base, provenance)
            _publish(listed, staging, order)
        finally:
            if staging.exists():
                shutil.rmtree(staging)
        return listed


def _check_space(files: Mapping[str, FilePlan], trunk: Parent, base: Parent, staging: Path) -> None:
    shared = all(can_share(parent.shards[0].path, staging) for parent in (trunk, base))
    needed = sum(plan.own_bytes if shared else plan.nbytes for plan in files.values())
    require_space(staging.parent, needed)


def _prove(staging: Path, trunk: Parent, base: Parent, provenance: Mapping[str, str]) -> Manifest:
    """Hold what lies in `staging` against config and parents; write its manifest and stamp."""
    tensors = verify.check_shards(staging)
    found = read_shards(staging)
    check_same(
        found,
        trunk.shards,
        trunk_names(tensors_of(trunk.shards)),
        f"{staging}: the trunk is not that of {trunk.folder}; run again",
    )
    check_same(
        found,
        base.shards,
        {name: name for name in tensors_of(base.shards) if census.group_of(name) != "trunk"},
        f"{staging}: differs from {base.folder}; run again",
    )
    for parent in (trunk, base):
        parents.check_unchanged(parent)
    sizes = {path.name: path.stat().st_size for path in staging.iterdir()}
    times = {path.name: path.stat().st_mtime_ns for path in staging.iterdir()}
    digests = verify.hash_files(staging, sizes)
    raw = manifest.render(
        {name: FileEntry(sizes[name], digests[name]) for name in sizes},
        census.count(tensors).as_json(),
        provenance,
    )
    listed = manifest.parse(raw, str(staging / manifest.MANIFEST))
    write_file(staging / manifest.MANIFEST, raw)
    verify.write_stamp(staging, listed, times)
    return listed


def _publish(listed: Manifest, staging: Path, order: Order) -> None:
    if order.manifest_sha256 not in (None, listed.sha256):
        raise HostError(
            f"{order.root}: the assembled checkpoint is not the one asked for; nothing was changed",
            f"expected manifest {order.manifest_sha256}",
            f"got               {listed.sha256}",
        )
    folder = order.root / manifest.folder_name(listed.sha256)
    if not _standing(folder, listed.sha256):
        check_replaceable(folder, listed)
        put_in_place(staging, folder)
    _point(order.link, folder)


def _standing(folder: Path, sha256: str) -> Manifest | None:
    """The manifest of the checkpoint that stands whole in `folder`; None: it is to be made anew."""
    try:
        listed = verify.quick(folder)
    except HostError:
        return None
    return listed if listed.sha256 == sha256 else None


def _point(link: Path, folder: Path) -> None:
    if not link.is_symlink() or link.readlink() != folder:
        replace_symlink(link, folder)
