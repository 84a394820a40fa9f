"""Adoption: a checkpoint or parent that stands on the host is taken into the scheme as it is."""

from __future__ import annotations

from pathlib import Path

from hostlib.adoption import check_adoptable, check_free, swap_in
from hostlib.atomic import locked, write_file
from hostlib.errors import HostError

from checkpoint import census, manifest, verify
from checkpoint.fetch import LOCK_WAIT_S
from checkpoint.manifest import FileEntry, Manifest
from checkpoint.strict import as_file_name, require_regular

CODE = (".py", ".so", ".pkl")


def adopt(folder: Path, root: Path) -> Manifest:
    """Census and hash what stands at `folder`; swap it with a symlink to its place below `root`.

    No file of it is changed; manifest and stamp are added to it. A manifest that it has already
    is kept if it is true. Whatever moment this is killed at, `folder` leads to the whole
    checkpoint.

    Returns:
        Its manifest, to be committed.

    Raises:
        HostError: it cannot be moved by a rename, holds what is no part of a checkpoint, or its
            tensors are not those that its config asks for; it is left as it was.
    """
    if folder.is_symlink() and folder.readlink().parent == root:
        return verify.quick(folder.resolve())
    check_adoptable(root, folder)
    root.mkdir(exist_ok=True)
    with locked(root / ".lock", "ckpt adopt", LOCK_WAIT_S):
        for name in (manifest.MANIFEST, manifest.STAMP):
            for leftover in folder.glob(f".{name}.????????"):  # of a run that was killed
                leftover.unlink()
        listed = listed_in(folder)
        place = root / manifest.folder_name(listed.sha256)
        check_free(place, folder)
        swap_in(place, folder)
    return listed


def listed_in(folder: Path) -> Manifest:
    """The manifest of what lies in `folder`: the one there, if it is true, or a new one, written.

    Raises:
        HostError: as `adopt`; no manifest was written.
    """
    if (folder / manifest.MANIFEST).exists():
        return verify.deep(folder)
    sizes = _sizes(folder)
    tensors = census.count(verify.check_shards(folder)).as_json()
    times = {name: (folder / name).stat().st_mtime_ns for name in sizes}
    digests = verify.hash_files(folder, sizes)
    files = {name: FileEntry(size, digests[name]) for name, size in sizes.items()}
    raw = manifest.render(files, tensors, {"origin": "adopted"})
    listed = manifest.parse(raw, str(folder / manifest.MANIFEST))
    try:
        write_file(folder / manifest.MANIFEST, raw)
        verify.write_stamp(folder, listed, times)
        return verify.quick(folder)
    except HostError:
        for name in (manifest.MANIFEST, manifest.STAMP):
            (folder / name).unlink(missing_ok=True)
        raise


def _sizes(folder: Path) -> dict[str, int]:
    """Every file's size; raises HostError unless all of them can be part of a checkpoint."""
    sizes: dict[str, int] = {}
    for path in sorted(folder.iterdir()):
        if path.name == manifest.STAMP:
            continue
        try:
            as_file_name(path.name, str(folder))
            require_regular(path)
        except HostError as error:
            raise HostError(f"{error.message}: move it out, then adopt again") from None
        if path.suffix in CODE:
            raise HostError(f"{path}: is code, which the engine would run; move it out")
        sizes[path.name] = path.stat().st_size
    return sizes
