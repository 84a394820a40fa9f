"""Bring a whole checkpoint from a URL or folder to its place, or leave everything as it was."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from hostlib.atomic import locked, publish_dir, replace_symlink, write_file
from hostlib.download import fetch, join, read_bytes, sha256_file
from hostlib.errors import EXIT_UNABLE, HostError
from hostlib.progress import size_text

from checkpoint import manifest, verify
from checkpoint.manifest import Manifest
from checkpoint.parallel import StoppableProgress, for_each

DOWNLOADS = 4  # at once
LOCK_WAIT_S = 10.0


@dataclass(frozen=True)
class Place:
    """Where checkpoints live and which one is wanted.

    Args:
        root: folder of all checkpoints, each in a folder named by its manifest's digest.
        link: symlink to the wanted one, for people.
        manifest_sha256: digest of the wanted one's manifest.
    """

    root: Path
    link: Path
    manifest_sha256: str

    @property
    def folder(self) -> Path:
        """Final folder of the wanted checkpoint."""
        return self.root / manifest.folder_name(self.manifest_sha256)

    @property
    def staging(self) -> Path:
        """Where it is put together; the name is stable, so that a killed run is resumed."""
        return self.root / f".staging-{manifest.folder_name(self.manifest_sha256)}"


def fetch_checkpoint(source: str, place: Place) -> bool:
    """Install the checkpoint at `source` (URL or folder) and point the link at it.

    Returns:
        Whether anything changed.

    Raises:
        HostError: the link's place is taken, no space, the source cannot be had, or what it
            holds is not what the digest stands for. Final folder and link are then untouched.
    """
    _check_places(place)
    place.root.mkdir(exist_ok=True)
    with locked(place.root / ".lock", "ckpt fetch", LOCK_WAIT_S):
        changed = not place.folder.exists()
        if changed:
            _install(source, place)
        else:
            _check_installed(place)
        if not link_ok(place):
            replace_symlink(place.link, place.folder)
            changed = True
        return changed


def status(place: Place) -> dict[str, object]:
    """Whether the wanted checkpoint is installed and linked, and if not, why; changes nothing.

    Returns:
        {"path", "installed", "link_ok", "reason"}, as `ckpt status` prints it.
    """
    reason = ""
    try:
        _check_installed(place)
        installed = True
    except HostError as error:
        installed, reason = False, error.message
    linked = link_ok(place)
    if installed and not linked:
        reason = f"{place.link}: does not point to {place.folder}"
    return {
        "path": str(place.folder),
        "installed": installed,
        "link_ok": linked,
        "reason": reason,
    }


def link_ok(place: Place) -> bool:
    """Whether the link is a symlink to the wanted checkpoint's folder."""
    return place.link.is_symlink() and place.link.readlink() == place.folder


def _check_places(place: Place) -> None:
    if place.link.exists() and not place.link.is_symlink():
        raise HostError(
            f"{place.link}: a checkpoint or file of its own stands here, not a symlink;"
            " move it away, then run again"
        )
    for parent in (place.root.parent, place.link.parent):
        if not parent.is_dir():
            raise HostError(
                f"{parent}: no such folder; mount the data disk or create it, then run again",
                exit_code=EXIT_UNABLE,
            )


def _check_installed(place: Place) -> None:
    if verify.unchanged(place.folder).sha256 != place.manifest_sha256:
        raise HostError(
            f"{place.folder}: holds another manifest; move the folder away, then run again"
        )


def _install(source: str, place: Place) -> None:
    listed = _fetch_manifest(source, place)
    staging = place.staging
    staging.mkdir(exist_ok=True)
    _remove_strangers(staging, listed)
    _check_space(staging, listed)
    write_file(staging / manifest.MANIFEST, listed.raw)
    _fetch_files(source, staging, listed)
    verify.check_names(staging, listed)
    verify.check_tensors(staging, listed)
    verify.write_stamp(staging, listed)
    publish_dir(staging, place.folder)


def _fetch_manifest(source: str, place: Place) -> Manifest:
    where = join(source, manifest.MANIFEST)
    listed = manifest.parse(read_bytes(where), where)
    if listed.sha256 != place.manifest_sha256:
        raise HostError(
            f"{where}: sha256 differs from the one asked for; nothing was installed",
            f"expected {place.manifest_sha256}",
            f"got      {listed.sha256}",
        )
    return listed


def _remove_strangers(staging: Path, listed: Manifest) -> None:
    """Drop what an earlier run left that is neither a listed file nor its beginning."""
    wanted = listed.files.keys() | {f"{name}.partial" for name in listed.files}
    for path in staging.iterdir():
        if path.name not in wanted:
            path.unlink()


def _check_space(staging: Path, listed: Manifest) -> None:
    have = sum(path.stat().st_size for path in staging.iterdir())
    needed = listed.total_bytes - have
    free = shutil.disk_usage(staging).free
    if needed > free:
        raise HostError(
            f"{staging}: {size_text(needed)} needed, {size_text(free)} free;"
            " make room, then run again",
            exit_code=EXIT_UNABLE,
        )


def _fetch_files(source: str, staging: Path, listed: Manifest) -> None:
    progress = StoppableProgress("fetching checkpoint", listed.total_bytes)

    def bring(name: str) -> None:
        entry, target = listed.files[name], staging / name
        if target.exists():
            if target.stat().st_size == entry.size and (
                sha256_file(target, progress) == entry.sha256
            ):
                return
            target.unlink()
        fetch(join(source, name), target, entry.sha256, entry.size, progress)

    for_each(listed.files, bring, DOWNLOADS, progress)
