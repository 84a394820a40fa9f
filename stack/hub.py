"""The manifest of a checkpoint at one commit of Hugging Face, without fetching its shards.

The hub lists every file of a commit: large ones with their sha256, small ones with their git blob's
id, which what is read of them is held against.
"""

from __future__ import annotations

import hashlib
import json

from checkpoint import census, manifest
from checkpoint.dimensions import architecture
from checkpoint.manifest import FileEntry
from checkpoint.source import as_source, revision
from checkpoint.strict import parse_object
from hostlib.download import join, read_bytes
from hostlib.errors import HostError

SUFFIXES = (".safetensors", ".json", ".jinja", ".txt", ".model")  # no code, nothing for people
SMALL_BYTES = 64 << 20


def manifest_at(source: str) -> bytes:
    """The manifest of the checkpoint at `source`, an address `…/resolve/<commit>` of the hub.

    Raises:
        HostError: the hub cannot be asked, what it says is not consistent, or its config.json is
            of another kind of model.
    """
    commit = revision(as_source(source))
    if commit is None:
        raise HostError(f"{source}: is no …/resolve/<commit> of the hub; correct the lock")
    repository = source.partition("/resolve/")[0]
    host, _, name = repository.partition("://")[2].partition("/")
    scheme = repository.partition("://")[0]
    listing = f"{scheme}://{host}/api/models/{name}/tree/{commit}?recursive=true"
    files: dict[str, FileEntry] = {}
    config = b""
    for path, (blob, entry) in sorted(_listed(listing).items()):
        if entry:
            files[path] = entry
            continue
        content = read_bytes(join(source, path), SMALL_BYTES)
        if _git_blob(content) != blob:
            raise HostError(f"{join(source, path)}: is not the blob that {listing} names")
        files[path] = FileEntry(len(content), hashlib.sha256(content).hexdigest())
        if path == manifest.CONFIG:
            config = content
    where = join(source, manifest.CONFIG)
    tensors = census.expected_tensors(architecture(parse_object(config, where), where))
    raw = manifest.render(
        files, census.count(tensors).as_json(), {"origin": repository, "revision": commit}
    )
    return manifest.parse(raw, f"the manifest of {source}").raw


def _listed(listing: str) -> dict[str, tuple[str, FileEntry | None]]:
    """The files in the repository's own folder that a checkpoint needs.

    Returns:
        path → its git blob's id; and size and sha256, which the hub knows of large files only.
    """
    try:
        entries = json.loads(read_bytes(listing))
        return {
            entry["path"]: (
                entry["oid"],
                FileEntry(entry["lfs"]["size"], entry["lfs"]["oid"]) if "lfs" in entry else None,
            )
            for entry in entries
            if entry["type"] == "file"
            and "/" not in entry["path"]
            and entry["path"].endswith(SUFFIXES)
        }
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise HostError(f"{listing}: is no list of files; check the address") from None


def _git_blob(content: bytes) -> str:
    header = f"blob {len(content)}\0".encode()
    return hashlib.sha1(header + content, usedforsecurity=False).hexdigest()
