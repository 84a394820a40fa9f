"""The manifest: every file of a checkpoint with its size and digest, its census, its origin.

{"format": 1, "files": {name: {"size", "sha256"}}, "census": {...}, "provenance": {...}}
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hostlib.atomic import temporary_names
from hostlib.errors import HostError

from checkpoint.strict import (
    as_count,
    as_file_name,
    as_object,
    as_sha256,
    as_text,
    parse_object,
    read_small,
)

FORMAT = 1
MANIFEST = "manifest.json"
STAMP = "stamp.json"
CONFIG = "config.json"
QUANTISATION = "hf_quant_config.json"
INDEX = "model.safetensors.index.json"
SINGLE_SHARD = "model.safetensors"  # of a checkpoint in one file, which needs no index
NAME_DIGITS = 16  # of the manifest's sha256, the name of the checkpoint's folder


@dataclass(frozen=True)
class FileEntry:
    """Size in bytes and hex sha256 of one file."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """A parsed manifest. `sha256` is that of its own bytes and the checkpoint's identity."""

    raw: bytes
    files: dict[str, FileEntry]
    census: dict[str, object]
    provenance: dict[str, str]

    @property
    def sha256(self) -> str:
        """Hex digest of the manifest's bytes."""
        return hashlib.sha256(self.raw).hexdigest()

    @property
    def total_bytes(self) -> int:
        """Bytes of all files together."""
        return sum(entry.size for entry in self.files.values())


def folder_name(manifest_sha256: str) -> str:
    """Name of the folder that holds the checkpoint with this manifest."""
    return manifest_sha256[:NAME_DIGITS]


def parse(raw: bytes, where: str) -> Manifest:
    """The manifest in `raw`.

    Raises:
        HostError: not of this format, a name that is not a plain file name, or a file that every
            checkpoint needs is not listed.
    """
    top = parse_object(raw, where)
    if top.get("format") != FORMAT:
        raise HostError(f"{where}: format is not {FORMAT}; this is another kind of manifest")
    if top.keys() != {"format", "files", "census", "provenance"}:
        raise HostError(f"{where}: wants exactly format, files, census and provenance")
    files: dict[str, FileEntry] = {}
    for name, value in as_object(top["files"], f"{where}: files").items():
        place = f"{where}: files: {as_file_name(name, f'{where}: files')}"
        fields = as_object(value, place)
        if fields.keys() != {"size", "sha256"}:
            raise HostError(f"{place}: wants exactly size and sha256")
        files[name] = FileEntry(
            as_count(fields["size"], f"{place}: size"),
            as_sha256(fields["sha256"], f"{place}: sha256"),
        )
    for name in (MANIFEST, STAMP):
        if name in files:
            raise HostError(f"{where}: files: {name} cannot be a file of the checkpoint")
    for names in ((CONFIG,), (INDEX, SINGLE_SHARD)):
        if not files.keys() & set(names):
            raise HostError(f"{where}: files: {names[0]} is not listed; the manifest is incomplete")
    provenance = as_object(top["provenance"], f"{where}: provenance")
    return Manifest(
        raw,
        files,
        as_object(top["census"], f"{where}: census"),
        {key: as_text(value, f"{where}: provenance: {key}") for key, value in provenance.items()},
    )


def parse_locked(raw: bytes, where: str, sha256: str) -> Manifest:
    """The manifest in `raw`; raises HostError as `parse`, or if it has another digest."""
    found = hashlib.sha256(raw).hexdigest()
    if found != sha256:
        raise HostError(
            f"{where}: sha256 differs from the one asked for; nothing was installed",
            f"expected {sha256}",
            f"got      {found}",
        )
    return parse(raw, where)


def is_unfinished(name: str) -> bool:
    """Whether a file of this name is a manifest or stamp that is being written, or was to be."""
    return any(fnmatch.fnmatchcase(name, temporary_names(ours)) for ours in (MANIFEST, STAMP))


def read(folder: Path) -> Manifest:
    """The manifest in `folder`; raises HostError as `parse`, or if it is absent."""
    path = folder / MANIFEST
    return parse(read_small(path), str(path))


def render(
    files: Mapping[str, FileEntry], census: Mapping[str, object], provenance: Mapping[str, str]
) -> bytes:
    """The bytes of a manifest: the same for the same checkpoint, whenever and wherever made."""
    listed = {name: {"size": entry.size, "sha256": entry.sha256} for name, entry in files.items()}
    top = {"format": FORMAT, "files": listed, "census": census, "provenance": provenance}
    return json.dumps(top, indent=1, sort_keys=True).encode() + b"\n"
