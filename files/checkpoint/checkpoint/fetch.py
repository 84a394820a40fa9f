"""Bring a checkpoint or a parent from anywhere to its place, or leave everything as it was."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from hostlib.atomic import locked, replace_symlink, write_file
from hostlib.collection import REMOVING, remove_leftovers
from hostlib.download import fetch, join, read_bytes, sha256_file
from hostlib.errors import HostError
from hostlib.parallel import StoppableProgress, for_each
from hostlib.progress import Progress

from checkpoint import manifest, verify
from checkpoint.manifest import FileEntry, Manifest
from checkpoint.publish import check_places, check_replaceable, other_manifest, put_in_place
from checkpoint.source import as_source
from checkpoint.space import require_space
from checkpoint.strict import LIMIT_BYTES

DOWNLOADS = 4  # at once
LOCK_WAIT_S = 10.0
STAGING = ".staging-"


@dataclass(frozen=True)
class Place:
    """Where checkpoints live and which one is wanted.

    Args:
        root: folder of all checkpoints, each in a folder named by its manifest's digest.
        link: symlink to the wanted one, for people; None: it gets none, as a parent.
        manifest_sha256: digest of the wanted one's manifest.
    """

    root: Path
    link: Path | None
    manifest_sha256: str

    @property
    def folder(self) -> Path:
        """Final folder of the wanted checkpoint."""
        return self.root / manifest.folder_name(self.manifest_sha256)

    @property
    def staging(self) -> Path:
        """Where it is put together; the name is stable, so that a killed run is resumed."""
        return self.root / f"{STAGING}{manifest.folder_name(self.manifest_sha256)}"


def fetch_checkpoint(source: str | None, place: Place, listed: Manifest | None = None) -> bool:
    """Install the checkpoint at `source` and point the link at it.

    One that stands there and is damaged, or was touched, is put together anew from what is good
    in it and what is fetched, and takes its place in one step.

    Args:
        source: as `checkpoint.source.as_source` takes it; None: it must stand there already.
        place: where it goes.
        listed: its manifest; None: the one at the source, which must have the place's digest.

    Returns:
        Whether anything changed.

    Raises:
        HostError: the link's place is taken, no space, the source cannot be had, or what it
            holds is not what the digest stands for. Final folder and link are then untouched.
    """
    source = as_source(source) if source is not None else None
    check_places(place.root, place.link)
    place.root.mkdir(exist_ok=True)
    with locked(place.root / ".lock", "ckpt fetch", LOCK_WAIT_S):
        remove_leftovers(place.root, REMOVING)
        fault = _fault(place)
        changed = fault is not None
        if fault is not None:
            if source is None:
                raise HostError(
                    f"{place.folder}: does not stand whole here, and no source is known; adopt it, "
                    "or give an address: the lock's checkpoint has a place for it",
                    fault,
                )
            _install(source, place, listed or _fetch_manifest(source, place))
        if place.link is not None and not link_ok(place):
            replace_symlink(place.link, place.folder)
            changed = True
        remove_leftovers(place.root, place.staging.name)  # a damaged one that was replaced
        return changed


def status(place: Place) -> dict[str, object]:
    """Whether the wanted checkpoint is installed and linked, and if not, why; changes nothing.

    Returns:
        {"path", "installed", "link_ok", "reason"}, as `ckpt status` prints it.
    """
    fault, linked = _fault(place), link_ok(place)
    misled = "" if linked else f"{place.link}: does not point to {place.folder}"
    return {
        "path": str(place.folder),
        "installed": fault is None,
        "link_ok": linked,
        "reason": fault or misled,
    }


def link_ok(place: Place) -> bool:
    """Whether the link, if one is wanted, is a symlink to the wanted checkpoint's folder."""
    if place.link is None:
        return True
    return place.link.is_symlink() and place.link.readlink() == place.folder


def _fault(place: Place) -> str | None:
    """Why the wanted checkpoint does not count as installed, or None."""
    try:
        if verify.unchanged(place.folder).sha256 != place.manifest_sha256:
            return other_manifest(place.folder).message
    except HostError as error:
        return error.message
    return None


def _install(source: str, place: Place, listed: Manifest) -> None:
    check_replaceable(place.folder, listed)
    staging = place.staging
    staging.mkdir(exist_ok=True)
    _remove_strangers(staging, listed)
    _take_over(place.folder, staging, listed)
    have = sum(path.stat().st_size for path in staging.iterdir())
    require_space(staging, listed.total_bytes - have)
    write_file(staging / manifest.MANIFEST, listed.raw)
    _fetch_files(source, staging, listed)
    verify.check_names(staging, listed)
    verify.check_tensors(staging, listed)
    verify.write_stamp(staging, listed)
    put_in_place(staging, place.folder)


def _fetch_manifest(source: str, place: Place) -> Manifest:
    where = join(source, manifest.MANIFEST)
    return manifest.parse_locked(read_bytes(where, LIMIT_BYTES), where, place.manifest_sha256)


def _take_over(folder: Path, staging: Path, listed: Manifest) -> None:
    """Give the files of a damaged checkpoint a second name; they are hashed with the others."""
    for name, entry in listed.files.items():
        standing, target = folder / name, staging / name
        if target.exists() or standing.is_symlink() or not standing.is_file():
            continue
        if standing.stat().st_size == entry.size:
            os.link(standing, target)


def _remove_strangers(staging: Path, listed: Manifest) -> None:
    """Drop what an earlier run left that is neither a listed file nor its beginning."""
    wanted = listed.files.keys() | {f"{name}.partial" for name in listed.files}
    for path in staging.iterdir():
        if path.name not in wanted:
            path.unlink()


def _fetch_files(source: str, staging: Path, listed: Manifest) -> None:
    progress = StoppableProgress("fetching checkpoint", listed.total_bytes)

    def bring(name: str) -> None:
        entry, target = listed.files[name], staging / name
        if not _is_good(target, entry, progress):
            target.unlink(missing_ok=True)
            fetch(join(source, name), target, entry.sha256, entry.size, progress)

    largest_first = sorted(listed.files, key=lambda name: -listed.files[name].size)
    for_each(largest_first, bring, DOWNLOADS, progress)


def _is_good(path: Path, entry: FileEntry, progress: Progress) -> bool:
    if not path.exists() or path.stat().st_size != entry.size:
        return False
    try:
        if sha256_file(path, progress) == entry.sha256:
            return True
    except OSError:  # the disk cannot read it any more
        return False
    progress.add(-entry.size)  # counted again when it is fetched
    return False
