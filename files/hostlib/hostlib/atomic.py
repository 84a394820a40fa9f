"""Writes that are whole or absent: beside, fsynced, renamed."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from hostlib.errors import EXIT_FAILED, HostError


def fsync_dir(path: Path) -> None:
    """Make the names in folder `path` durable."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def fsync_tree(path: Path) -> None:
    """Make every file and folder below `path` durable, by one sync of its file system."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        libc_syncfs(handle)
    finally:
        os.close(handle)


def libc_syncfs(handle: int) -> None:
    """syncfs(2) on an open descriptor; raises OSError as the call does."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syncfs(handle) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def temporary_names(name: str) -> str:
    """A pattern of the names under which `write_file` writes the file `name`."""
    return f".{glob.escape(name)}.????????"


def write_file(path: Path, content: bytes, mode: int = 0o644) -> None:
    """Replace `path` by `content`: temporary file beside it, fsync, rename, fsync of the folder."""
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fchmod(stream.fileno(), mode)
            os.fsync(stream.fileno())
        os.replace(name, path)  # noqa: PTH105
    except BaseException as error:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)  # noqa: PTH108
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(path)  # a full disk is met by a write, which names no file
        raise
    fsync_dir(path.parent)


def replace_symlink(link: Path, target: Path) -> None:
    """Point `link` at `target` in one step.

    Raises:
        HostError: something that is not a symlink stands at `link`.
    """
    if link.exists() and not link.is_symlink():
        raise HostError(
            f"{link}: is not a symlink of this installer; move it away or adopt it first"
        )
    beside = link.with_name(f".{link.name}.{os.getpid()}")
    with contextlib.suppress(FileNotFoundError):
        beside.unlink()
    beside.symlink_to(target)
    beside.replace(link)
    fsync_dir(link.parent)


def publish_dir(staged: Path, final: Path) -> None:
    """Rename the finished folder `staged` to `final` and make it durable.

    A folder that stands at `final` already is kept, and `staged` removed: names here are
    digests, so both hold the same. A symlink there that leads nowhere gives way: a killed
    adoption left it.
    """
    fsync_tree(staged)
    if final.is_symlink() and not final.exists():
        final.unlink()
    try:
        staged.rename(final)
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
            raise
        shutil.rmtree(staged)
    fsync_dir(final.parent)


def remove_tree(path: Path) -> None:
    """Remove the folder `path` and all below it, folders without write permission too.

    Raises:
        OSError: something cannot be removed.
    """
    path.chmod(0o700)
    for folder, names, _ in os.walk(path):
        for name in names:
            inner = Path(folder, name)
            if not inner.is_symlink():
                inner.chmod(0o700)
    shutil.rmtree(path)


@contextlib.contextmanager
def locked(
    path: Path,
    owner: str,
    wait_seconds: float = 600.0,
    busy_exit_code: int = EXIT_FAILED,
) -> Iterator[int]:
    """Hold the exclusive lock file `path`; wait up to `wait_seconds` for another holder.

    Gives the lock's descriptor: a child that inherits it holds the lock as long as it lives.

    Raises:
        HostError: another process still holds it; the message names that process, the exit code
            is `busy_exit_code`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+", encoding="utf-8") as stream:
        deadline = time.monotonic() + wait_seconds
        while True:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    stream.seek(0)
                    holder = stream.read().strip() or "another process"
                    raise HostError(
                        f"{path}: held by {holder}; wait for it or end it, then run again",
                        exit_code=busy_exit_code,
                    ) from None
                time.sleep(0.1)
        stream.truncate(0)
        stream.write(f"{owner} (pid {os.getpid()})\n")
        stream.flush()
        try:
            yield stream.fileno()
        finally:
            stream.truncate(0)
