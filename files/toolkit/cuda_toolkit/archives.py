"""NVIDIA's redistributable archives: fetched, checked, unpacked and merged into one tree."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hostlib.download import check_file, fetch, is_local, join, read_bytes, sha256_file
from hostlib.errors import HostError
from hostlib.parallel import StoppableProgress, for_each

from cuda_toolkit import census
from cuda_toolkit.budget import Budget
from cuda_toolkit.spec import Archives, Component
from cuda_toolkit.unpack import Entry, merge, unpack
from cuda_toolkit.xz import memory_bytes

PLATFORM = "linux-x86_64"
VERSION_FILE = "version.json"
RESERVED = (*census.OWN_FILES, VERSION_FILE)
FETCHERS = 4
UNPACKERS = 4
DICTIONARIES_BYTES = 72 << 20  # of all unpackers: 8 MB each at xz's usual preset, 64 at its highest


def make_tree(source: Archives, archives: Path, staging: Path) -> Path:
    """Fetch what is missing into the folder `archives`, and make `staging`/tree of it.

    Raises:
        HostError: whatever `fetch_manifest`, `fetch_archives` and `stage` refuse.
    """
    manifest = fetch_manifest(source)
    fetched = fetch_archives(source, archives)
    return stage(source, fetched, staging, str(manifest.get("release_label", "")))


def fetch_manifest(source: Archives) -> dict[str, Any]:
    """The manifest, after its digest and its components were checked.

    Raises:
        HostError: it cannot be had, is another one, or disagrees with the specification.
    """
    place = join(source.base_url, source.manifest)
    content = read_bytes(place)
    digest = hashlib.sha256(content).hexdigest()
    if digest != source.manifest_sha256:
        raise HostError(
            f"{place}: sha256 differs from the locked one; nothing was installed",
            f"expected {source.manifest_sha256}",
            f"got      {digest}",
        )
    try:
        manifest = json.loads(content)
    except ValueError as error:
        raise HostError(f"{place}: is no JSON ({error}); the source is wrong") from None
    if not isinstance(manifest, dict):
        raise HostError(f"{place}: is no JSON object; the source is wrong")
    check_manifest(source, manifest)
    return manifest


def check_manifest(source: Archives, manifest: dict[str, Any]) -> None:
    """Refuse a manifest that does not hold exactly the components of `source`.

    Raises:
        HostError: names the component and what differs.
    """
    for item in source.components:
        entry = manifest.get(item.name)
        archive = entry.get(PLATFORM) if isinstance(entry, dict) else None
        if not isinstance(entry, dict) or not isinstance(archive, dict):
            raise HostError(
                f"{source.manifest}: has no {item.name} for {PLATFORM}; take the manifest of the "
                "release that the specification was made from"
            )
        for key, locked_value, found in (
            ("version", item.version, entry.get("version")),
            ("sha256", item.sha256, archive.get("sha256")),
            ("relative_path", item.relative_path, archive.get("relative_path")),
            ("size", str(item.size), archive.get("size")),
        ):
            if found != locked_value:
                raise HostError(
                    f"{source.manifest}: {item.name} has {key} {found}, expected {locked_value}; "
                    "take manifest and specification of one release"
                )


def fetch_archives(source: Archives, archives: Path) -> dict[str, Path]:
    """All archives, each checked by size and digest: those of a folder in place, others fetched.

    Args:
        archives: folder for those that are fetched; what an earlier run left there is used.

    Returns:
        Component -> archive.

    Raises:
        HostError: one cannot be had or differs; the transfers of the others end with it.
    """
    archives.mkdir(exist_ok=True)
    found: dict[str, Path] = {}
    here = is_local(source.base_url)
    progress = StoppableProgress("checking" if here else "fetching", source.size)

    def one(item: Component) -> None:
        place = join(source.base_url, item.relative_path)
        if here:
            found[item.name] = Path(place)
            check_file(Path(place), item.size, item.sha256, progress)
            return
        target = found[item.name] = archives / item.archive_name
        if target.exists():
            if sha256_file(target, progress) == item.sha256:
                return
            progress.add(-target.stat().st_size)
            target.unlink()
        fetch(place, target, item.sha256, item.size, progress, durable=False)

    for_each(_largest_first(source), one, FETCHERS, progress)
    return found


def stage(source: Archives, archives: Mapping[str, Path], staging: Path, release: str) -> Path:
    """Unpack and merge the archives into `staging`/tree, with census and `version.json`.

    Args:
        archives: component -> archive.
        release: of the manifest, as in `12.8.1`.

    Raises:
        HostError: an archive that must not be unpacked, or components that do not fit together.
    """
    parts: dict[str, dict[str, Entry]] = {}
    progress = StoppableProgress("unpacking", source.size)
    memory = Budget(DICTIONARIES_BYTES)

    def one(item: Component) -> None:
        archive = archives[item.name]
        with memory.part(memory_bytes(archive)):
            parts[item.name] = unpack(archive, staging / item.name, progress)

    for_each(_largest_first(source), one, min(UNPACKERS, os.cpu_count() or 1), progress)
    own = staging / ".own"
    own.mkdir()
    version = _version(source, release)
    (own / VERSION_FILE).write_bytes(version)
    plan = merge(parts)
    for place, (component, _, _) in plan.items():
        if place.partition("/")[0] in RESERVED:
            raise HostError(
                f"{component}: brings {place}, a name that is the installer's own; the archive is "
                "not used"
            )
    plan[VERSION_FILE] = (
        ".own", VERSION_FILE, Entry(len(version), hashlib.sha256(version).hexdigest())
    )  # fmt: skip
    if not any(path == "lib64" or path.startswith("lib64/") for path in plan):
        (own / "lib64").symlink_to("lib")
        plan["lib64"] = (".own", "lib64", Entry(target="lib"))
    tree = staging / "tree"
    tree.mkdir()
    folders = set()
    for place, (component, path, _) in plan.items():
        target = tree / place
        if target.parent not in folders:
            target.parent.mkdir(parents=True, exist_ok=True)
            folders.add(target.parent)
        (staging / component / path).rename(target)
    items = {
        place: census.Item("cuda" if component == ".own" else component, entry)
        for place, (component, _, entry) in plan.items()
    }
    (tree / census.CENSUS_FILE).write_bytes(census.to_bytes(items))
    return tree


def _largest_first(source: Archives) -> list[Component]:
    """The largest is the one that the others should not have to wait for."""
    return sorted(source.components, key=lambda item: -item.size)


def _version(source: Archives, release: str) -> bytes:
    """What `version.json` of a CUDA toolkit says: the archives bring none."""
    content = {"cuda": {"name": "CUDA SDK", "version": release}}
    for item in source.components:
        content[item.name] = {"name": item.name, "version": item.version}
    return json.dumps(content, indent=1).encode() + b"\n"
