"""Archives into trees: safe unpacking, and the merge of several components into one tree."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import lzma
import os
import posixpath
import queue
import shutil
import tarfile
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from hostlib.errors import HostError
from hostlib.progress import Progress

CHUNK_BYTES = 1 << 18
PACKED_BYTES = 1 << 16
AHEAD_CHUNKS = 16
LARGE_BYTES = 1 << 20
DECOMPRESSOR_BYTES = 72 << 20  # what xz's highest preset needs, and some
ABOUT = "share/doc"  # where a component's own LICENSE goes: every archive brings one


@dataclass(frozen=True)
class Entry:
    """A file (size in bytes, sha256) or a link (its target) of an unpacked tree."""

    size: int = 0
    sha256: str = ""
    target: str | None = None


def unpack(archive: Path, folder: Path, progress: Progress | None = None) -> dict[str, Entry]:
    """Unpack a .tar.xz into the new folder `folder` without its one top folder.

    Args:
        progress: told of the archive's bytes as they are read.

    Returns:
        Relative path -> entry, folders left out.

    Raises:
        HostError: a member that leaves the folder, a device, a path that stands there twice, or
            an archive that is damaged.
    """
    folder.mkdir()
    try:
        with (
            contextlib.closing(_ReadAhead(archive, progress)) as stream,
            tarfile.open(fileobj=stream, mode="r|", bufsize=CHUNK_BYTES) as tar,
        ):
            unpacking = _Unpacking(tar, folder, archive.name)
            for member in tar:
                relative = member_path(member.name, archive.name)
                if relative is not None:
                    unpacking.place(member, relative)
            while stream.read(CHUNK_BYTES):  # damage behind the last member is damage too
                pass
            return unpacking.entries
    except (tarfile.TarError, lzma.LZMAError, EOFError) as error:
        raise HostError(
            f"{archive}: is damaged ({error}); remove it and run again", f"{error!r}"
        ) from None


def member_path(name: str, archive: str) -> str | None:
    """`name` of an archive's member without its top folder; None for the top folder itself.

    Raises:
        HostError: absolute, or with a part `..`.
    """
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\0" in name:
        raise _leaves(archive, name)
    return "/".join(path.parts[1:]) or None


def link_stays(relative: str, target: str) -> bool:
    """Whether the symlink `relative` keeps inside its tree, whatever other links stand there.

    `..` may only lead: after a name, that name could be a link and `..` lead elsewhere.
    """
    path = PurePosixPath(target)
    ups = 0
    while ups < len(path.parts) and path.parts[ups] == "..":
        ups += 1
    depth = len(PurePosixPath(relative).parts) - 1
    return bool(target) and not path.is_absolute() and ups <= depth and ".." not in path.parts[ups:]


def merge(parts: Mapping[str, Mapping[str, Entry]]) -> dict[str, tuple[str, str, Entry]]:
    """Plan one tree out of components: path -> (component, path in the component, entry).

    A file at a component's top describes that component, and goes to share/doc/<component>/.
    The same file from two components is taken once.

    Raises:
        HostError: two components bring different things to one path.
    """
    plan: dict[str, tuple[str, str, Entry]] = {}
    for component in sorted(parts):
        for path, entry in parts[component].items():
            about = "/" not in path and entry.target is None
            place = f"{ABOUT}/{component}/{path}" if about else path
            there = plan.setdefault(place, (component, path, entry))
            if there[2] != entry:
                raise HostError(
                    f"{place}: {there[0]} and {component} bring different files; "
                    "take components of one release"
                )
    for place, (component, _, _) in plan.items():
        above = posixpath.dirname(place)
        while above:
            if above in plan:
                raise HostError(
                    f"{above}: is a folder in {component} and a file or link in {plan[above][0]}; "
                    "take components of one release"
                )
            above = posixpath.dirname(above)
    return plan


def decompressed(packed: BinaryIO) -> Iterator[bytes]:
    """The content of an .xz file, of one or several streams, in chunks.

    Large pieces at a time: each is a turn of the interpreter's lock, and `lzma.open` takes 8 kB.

    Raises:
        lzma.LZMAError, EOFError: it is damaged or cut off.
    """
    decompressor = lzma.LZMADecompressor(lzma.FORMAT_XZ, DECOMPRESSOR_BYTES)
    data = packed.read(PACKED_BYTES)
    while True:
        if chunk := decompressor.decompress(data, CHUNK_BYTES):
            yield chunk
        data = b""
        if decompressor.eof:
            data = (decompressor.unused_data or packed.read(PACKED_BYTES)).lstrip(b"\0")
            if not data:
                return
            decompressor = lzma.LZMADecompressor(lzma.FORMAT_XZ, DECOMPRESSOR_BYTES)
        elif decompressor.needs_input:
            data = packed.read(PACKED_BYTES)
            if not data:
                raise EOFError("it is cut off")


class _ReadAhead(io.RawIOBase):
    """The decompressed archive, a few chunks ahead of its reader.

    Decompression leaves the interpreter to others: so it runs beside hashing and writing.
    """

    def __init__(self, archive: Path, progress: Progress | None) -> None:
        self._chunks: queue.Queue[bytes | Exception] = queue.Queue(AHEAD_CHUNKS)
        self._chunk = b""
        self._closing = False
        self._thread = threading.Thread(target=self._fill, args=(archive, progress), daemon=True)
        self._thread.start()

    def _fill(self, archive: Path, progress: Progress | None) -> None:
        try:
            with archive.open("rb") as packed:
                position = 0
                for chunk in decompressed(packed):
                    if self._closing:
                        return
                    self._chunks.put(chunk)
                    if progress:
                        progress.add(packed.tell() - position)
                        position = packed.tell()
            self._chunks.put(b"")
        except Exception as error:  # for the reader's thread, which can raise it
            self._chunks.put(error)

    def read(self, size: int = -1) -> bytes:
        if not self._chunk:
            found = self._chunks.get()
            if not found or isinstance(found, Exception):
                self._chunks.put(found)  # the end stays the end
                if isinstance(found, Exception):
                    raise found
                return b""
            self._chunk = found
        given, self._chunk = self._chunk[:size], self._chunk[size:]
        return given

    def close(self) -> None:
        self._closing = True
        while self._thread.is_alive():
            with contextlib.suppress(queue.Empty):
                self._chunks.get(timeout=0.01)
        super().close()


@dataclass
class _Unpacking:
    """One archive on its way into `folder`, in which nothing else writes.

    What stands there is known from `entries` and `folders`: asking the file system for each of
    thousands of headers took longer than writing them.
    """

    tar: tarfile.TarFile
    folder: Path
    archive: str
    entries: dict[str, Entry] = field(default_factory=dict)
    folders: set[str] = field(default_factory=lambda: {""})

    def place(self, member: tarfile.TarInfo, relative: str) -> None:
        if member.isdir():
            self._make_folder(relative)
            return
        if relative in self.entries or relative in self.folders:
            raise HostError(f"{self.archive}: brings {relative} twice; the archive is wrong")
        self._make_folder(posixpath.dirname(relative))
        if member.issym():
            if not link_stays(relative, member.linkname):
                raise _leaves(self.archive, f"{relative} -> {member.linkname}")
            (self.folder / relative).symlink_to(member.linkname)
            self.entries[relative] = Entry(target=member.linkname)
        elif member.islnk():
            origin = "/".join(PurePosixPath(member.linkname).parts[1:])
            entry = self.entries.get(origin)
            if entry is None or entry.target is not None:
                raise _leaves(self.archive, f"{relative} = {member.linkname}")
            os.link(self.folder / origin, self.folder / relative)
            self.entries[relative] = entry
        elif member.isreg():
            self.entries[relative] = self._write(member, relative)
        else:
            raise HostError(
                f"{self.archive}: {relative} is a device or a pipe; the archive is not used"
            )

    def _write(self, member: tarfile.TarInfo, relative: str) -> Entry:
        source = self.tar.extractfile(member)
        assert source is not None
        digest = hashlib.sha256()
        mode = 0o755 if member.mode & 0o100 else 0o644
        place = f"{self.folder}/{relative}"
        # A sparse file can claim more than all that the archive unpacks to.
        if member.size > LARGE_BYTES and member.size > shutil.disk_usage(self.folder).free:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), place)
        handle = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        with os.fdopen(handle, "wb", buffering=0) as stream:
            while chunk := source.read(CHUNK_BYTES):
                digest.update(chunk)
                if stream.write(chunk) != len(chunk):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), place)
        return Entry(size=member.size, sha256=digest.hexdigest())

    def _make_folder(self, relative: str) -> None:
        """Make a folder and those above it; a link or a file on the way is refused."""
        if relative in self.folders:
            return
        self._make_folder(posixpath.dirname(relative))
        if relative in self.entries:
            raise _leaves(self.archive, relative)
        (self.folder / relative).mkdir()
        self.folders.add(relative)


def _leaves(archive: str, name: str) -> HostError:
    return HostError(f"{archive}: {name} leaves its folder; the archive is not used")
