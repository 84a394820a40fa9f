"""Adoption: a checkpoint or parent that stands on the host is taken into the scheme as it is."""

from __future__ import annotations

from pathlib import Path

from hostlib.adoption import check_adoptable, check_free, swap_in
from hostlib.atomic import locked, write_file
from hostlib.errors import HostError

from checkpoint import census, manifest, verify
from checkpoint.census import Census
from checkpoint.fetch import LOCK_WAIT_S
from checkpoint.manifest import FileEntry, Manifest
from checkpoint.strict import as_file_name, require_regular

CODE = (".py", ".so", ".pkl", ".pickle", ".bin", ".pt", ".pth", ".ckpt")  # pickles are code


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
    if _is_adopted(folder, root):
        return verify.quick(folder.resolve())
    check_adoptable(root, folder)
    _looked_at(folder)
    root.mkdir(exist_ok=True)
    with locked(root / ".lock", "ckpt adopt", LOCK_WAIT_S):
        if _is_adopted(folder, root):  # by another run, meanwhile
            return verify.quick(folder.resolve())
        for path in folder.iterdir():
            if manifest.is_unfinished(path.name):  # of a run that was killed
                path.unlink()
        listed = listed_in(folder)
        place = root / manifest.folder_name(listed.sha256)
        check_free(place, folder)
        swap_in(place, folder)
    return listed


def _is_adopted(folder: Path, root: Path) -> bool:
    return folder.is_symlink() and folder.readlink().parent == root


def listed_in(folder: Path) -> Manifest:
    """The manifest of what lies in `folder`: the one there, if it is true, or a new one, written.

    Raises:
        HostError: as `adopt`; no manifest was written.
    """
    if (folder / manifest.MANIFEST).exists():
        return verify.deep(folder)
    sizes, tensors = _looked_at(folder)
    times = {name: (folder / name).stat().st_mtime_ns for name in sizes}
    digests = verify.hash_files(folder, sizes)
    files = {name: FileEntry(size, digests[name]) for name, size in sizes.items()}
    raw = manifest.render(files, tensors.as_json(), {"origin": "adopted"})
    listed = manifest.parse(raw, str(folder / manifest.MANIFEST))
    try:
        write_file(folder / manifest.MANIFEST, raw)
        verify.write_stamp(folder, listed, times)
        return verify.quick(folder)
    except (HostError, OSError):
        for name in (manifest.MANIFEST, manifest.STAMP):
            (folder / name).unlink(missing_ok=True)
        raise


def _looked_at(folder: Path) -> tuple[dict[str, int], Census]:
    """Every file's size, and the tensors counted, by what can be seen without reading data.

    Raises:
        HostError: a file can be no part of a checkpoint, or `verify.check_shards`.
    """
    sizes: dict[str, int] = {}
    for path in sorted(folder.iterdir()):
        if path.name in (manifest.MANIFEST, manifest.STAMP) or manifest.is_unfinished(path.name):
            continue
        try:
            as_file_name(path.name, str(folder))
            require_regular(path)
        except HostError as error:
            raise HostError(f"{error.message}: move it out, then adopt again") from None
        if path.suffix in CODE:
            raise HostError(f"{path}: is code, or a pickle, which is code too; move it out")
        sizes[path.name] = path.stat().st_size
    return sizes, census.count(verify.check_shards(folder))
