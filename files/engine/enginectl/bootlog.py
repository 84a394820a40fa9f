"""The log file of one start: written beside the journal, kept for the latest starts, read safely.

The engine's output goes through a pipe to a small process that writes it to both. The main
process of the unit is the engine itself: systemd's signals reach it directly.
"""

from __future__ import annotations

import contextlib
import os
import signal
import stat
from collections.abc import Iterator
from pathlib import Path

from hostlib.errors import HostError

from enginectl.paths import Places

KEPT = 20
# Stops a log of months from filling the disk; the boot and its gates need a fraction of it.
LIMIT_BYTES = 256 << 20
CHUNK_BYTES = 1 << 16
# Stands in the log where output is missing, so that the gates can tell a gap from an absence.
GAP = "enginectl: this log is incomplete here; the journal has the rest"


def create(places: Places, invocation: str) -> int:
    """Open the log of this start, delete the oldest beyond KEPT; returns a file descriptor.

    Raises:
        OSError: it cannot be created.
    """
    places.boots.mkdir(parents=True, exist_ok=True)
    handle = os.open(
        places.boot_log(invocation),
        os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC,
        0o644,
    )
    logs = sorted(places.boots.glob("*.log"), key=lambda path: path.lstat().st_mtime_ns)
    for old in logs[:-KEPT]:
        with contextlib.suppress(FileNotFoundError):
            old.unlink()
    return handle


def split_output(log: int | None) -> None:
    """From here on, what this process and its children print goes to stdout as it is and to `log`.

    The copying process is a grandchild, so that the program that replaces this one has no child
    that it did not start. It ends at end of file. It ignores the signals of a stop, so that the
    last lines of the engine are kept; systemd's final SIGKILL ends it with the rest of the unit.
    """
    source, sink = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            if os.fork() == 0:
                os.close(sink)
                for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                    signal.signal(number, signal.SIG_IGN)
                copy(source, log, 1)
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    os.close(source)
    os.dup2(sink, 1)
    os.dup2(sink, 2)
    os.close(sink)


def copy(source: int, log: int | None, output: int, limit_bytes: int = LIMIT_BYTES) -> None:
    """Copy descriptor `source` to `log` and `output` until its end, whatever happens to either.

    A disk that is full or a log beyond `limit_bytes` leaves a line that says so; a broken
    `output` is given up. Neither may stop the engine, which would block on a full pipe.
    """
    written = 0
    gap = False
    while chunk := os.read(source, CHUNK_BYTES):
        if log is not None:
            try:
                if gap or written >= limit_bytes:
                    _write(log, f"\n{GAP}\n".encode())
                if written >= limit_bytes:
                    log = None
                else:
                    _write(log, chunk)
                    written += len(chunk)
                    gap = False
            except OSError:
                gap = True
        with contextlib.suppress(OSError):
            _write(output, chunk)


def read_lines(path: Path) -> Iterator[str]:
    """The lines of a log, without their ends.

    The folder is the service user's and root reads here: a symlink or a special file in the
    place of a log is refused.

    Raises:
        HostError: there is no such log, or it is not a plain file.
        OSError: it cannot be read.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise HostError(f"{path}: there is no log of this start") from None
    with os.fdopen(handle, encoding="utf-8", errors="replace") as stream:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise HostError(f"{path}: is not a plain file; not read")
        for line in stream:
            yield line.rstrip("\n")


def _write(handle: int, chunk: bytes) -> None:
    while chunk:
        chunk = chunk[os.write(handle, chunk) :]
