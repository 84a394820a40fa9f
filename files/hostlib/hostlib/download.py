"""Files from outside: resumed, digested while they stream, renamed only when they match."""

from __future__ import annotations

import errno
import hashlib
import http.client
import os
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

from hostlib import local
from hostlib.atomic import fsync_dir
from hostlib.errors import EXIT_UNABLE, HostError
from hostlib.local import LocalFile
from hostlib.progress import Progress
from hostlib.ssh import SCHEME, RemoteFile

CHUNK_BYTES = 1 << 20
ATTEMPTS = 5
ATTEMPTS_AT_SMALL = 3
TIMEOUT_S = 60.0  # without a byte, or for fewer than the slowest transfer's
SLOWEST_BYTES = 1 << 16
BACKOFF_S = 0.5
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
PASSING_STATUS = (
    http.client.REQUEST_TIMEOUT,
    http.client.TOO_MANY_REQUESTS,
    http.client.REQUESTED_RANGE_NOT_SATISFIABLE,
)


def join(base: str, relative: str) -> str:
    """`relative` below `base`, which is a URL (http, https, file, ssh) or a folder.

    Raises:
        HostError: `relative` is absolute or climbs out of `base`.
    """
    parts = relative.split("/")
    if relative.startswith("/") or ".." in parts or "\\" in relative:
        raise HostError(f"{relative!r}: leaves {base}; the list of files is wrong")
    return f"{base.rstrip('/')}/{relative}"


def sha256_file(path: Path, progress: Progress | None = None) -> str:
    """Hex digest of a file, read in constant memory."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(CHUNK_BYTES):
            digest.update(chunk)
            if progress:
                progress.add(len(chunk))
    return digest.hexdigest()


def is_local(source: str) -> bool:
    """Whether `source` is a path on this host rather than a URL."""
    return "://" not in source


def check_file(path: Path, size: int, sha256: str, progress: Progress | None = None) -> None:
    """Hold a file of this host against size and digest, where it lies.

    Raises:
        HostError: it is not there (exit code 2), or differs.
    """
    try:
        have = path.stat().st_size
        digest = sha256_file(path, progress) if have == size else ""
    except OSError as error:
        raise HostError(
            f"{path}: cannot be read ({error.strerror}); put the file there, then run again",
            exit_code=EXIT_UNABLE,
        ) from None
    if digest != sha256:
        raise _differs(str(path), sha256, digest, size, have)


def read_bytes(source: str, limit_bytes: int = 64 << 20) -> bytes:
    """The whole of a small file at `source` (URL or path).

    Raises:
        HostError: it cannot be had, also when tried again, or is larger than `limit_bytes`.
    """
    patience = _Patience(source, ATTEMPTS_AT_SMALL)
    while True:
        try:
            with _open(source, 0) as response:
                content = b"".join(_chunks(response, limit_bytes + 1))
            break
        except (OSError, http.client.HTTPException) as error:
            patience.bear(error)
    if len(content) > limit_bytes:
        raise HostError(f"{source}: larger than {limit_bytes} bytes; this is not the file expected")
    return content


def read_tail(source: str, size: int, count: int) -> bytes | None:
    """The last `count` bytes of the `size` bytes at `source`; None when they cannot be had."""
    offset = max(0, size - count)
    try:
        with _open(source, offset) as stream:
            if offset and stream.status != http.client.PARTIAL_CONTENT:
                return None
            return b"".join(_chunks(stream, count))
    except (OSError, http.client.HTTPException, HostError):
        return None


def fetch(
    source: str,
    target: Path,
    sha256: str,
    size: int | None = None,
    progress: Progress | None = None,
    *,
    durable: bool = True,
) -> None:
    """Bring `source` (URL or path) to `target`; nothing stands at `target` unless it matches.

    A partial file from an earlier run is resumed; transfers are tried again with growing pauses,
    and as long as each brings something. A resumed file that does not match is fetched once anew.

    Args:
        durable: sync it to the disk; not needed for what is held against its digest again before
            it is used.

    Raises:
        HostError: it cannot be had, or its size or sha256 differs.
    """
    partial = target.with_name(f"{target.name}.partial")
    patience = _Patience(source)
    anew = False
    most = _size(partial)  # what is lost and comes again is no gain
    while True:
        counted = 0

        def count(more: int) -> None:
            nonlocal counted
            counted += more
            if progress:
                progress.add(more)

        try:
            digest, have, resumed = _transfer(source, partial, size, count, durable)
            if digest == sha256 and size in (None, have):
                break
            partial.unlink()
            if anew or not resumed:
                raise _differs(source, sha256, digest, size, have)
            # What lay there may have been damaged; what comes now is the source's.
            anew, most = True, 0
        except (OSError, http.client.HTTPException) as error:
            if isinstance(error, OSError) and error.errno in NO_ROOM:
                raise HostError(
                    f"{partial}: {error.strerror}; free space there, then run again",
                    exit_code=EXIT_UNABLE,
                ) from None
            if _is_status(error, http.client.REQUESTED_RANGE_NOT_SATISFIABLE):
                partial.unlink(missing_ok=True)
            have = _size(partial)
            patience.bear(error, have - most)
            most = max(most, have)
        count(-counted)  # the next attempt counts the same bytes again
    partial.replace(target)
    if durable:
        fsync_dir(target.parent)


class _Patience:
    """How long one source is tried again: with growing pauses, which begin anew after a gain."""

    def __init__(self, source: str, attempts: int = ATTEMPTS) -> None:
        self.source = source
        self.attempts = attempts
        self.failures = 0

    def bear(self, error: Exception, gained_bytes: int = 0) -> None:
        """Wait before the next attempt.

        Raises:
            HostError: trying again would not help, or has not helped.
        """
        self.failures = 1 if gained_bytes >= CHUNK_BYTES else self.failures + 1
        if not _may_pass(error) or self.failures >= self.attempts:
            raise _unreachable(self.source, error) from None
        time.sleep(BACKOFF_S * 2 ** (self.failures - 1))


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _is_status(error: BaseException, *codes: int) -> bool:
    return isinstance(error, urllib.error.HTTPError) and error.code in codes


def _may_pass(error: BaseException) -> bool:
    """Whether trying again may help: the network or a busy server, not a wrong address."""
    if isinstance(error, urllib.error.HTTPError):
        return error.code >= 500 or error.code in PASSING_STATUS
    if isinstance(error, urllib.error.URLError):
        return not isinstance(error.reason, FileNotFoundError | PermissionError | str)
    if isinstance(error, OSError):
        return isinstance(error, TimeoutError | ConnectionError)
    return True


def _differs(source: str, sha256: str, digest: str, size: int | None, have: int) -> HostError:
    if size not in (None, have):
        return HostError(
            f"{source}: {have} bytes instead of {size}; the source is wrong or cut off"
        )
    return HostError(
        f"{source}: sha256 differs from the locked one; nothing was installed",
        f"expected {sha256}",
        f"got      {digest}",
    )


def _open(source: str, offset: int) -> http.client.HTTPResponse | RemoteFile | LocalFile:
    if source.startswith(SCHEME):
        return RemoteFile(source, offset, TIMEOUT_S)
    if is_local(source) or source.startswith(local.SCHEME):
        return LocalFile(source, offset)
    try:
        request = urllib.request.Request(source)  # noqa: S310
    except ValueError as error:
        raise _unreachable(source, error) from None
    if offset:
        request.add_header("Range", f"bytes={offset}-")
    response: http.client.HTTPResponse = urllib.request.urlopen(  # noqa: S310
        request, timeout=TIMEOUT_S
    )
    return response


def _chunks(
    response: http.client.HTTPResponse | RemoteFile | LocalFile, limit_bytes: int | None = None
) -> Iterator[bytes]:
    """What comes, as it comes: all of it, or its first `limit_bytes`.

    Raises:
        ConnectionError: it ends before all that was announced has come.
        TimeoutError: it comes so slowly that it may never end.
    """
    announced = getattr(response, "length", None)  # of files: none
    wanted = min((n for n in (announced, limit_bytes) if n is not None), default=None)
    count = lately = 0
    since = time.monotonic()
    while wanted is None or count < wanted:
        most = CHUNK_BYTES if wanted is None else min(CHUNK_BYTES, wanted - count)
        chunk = response.read1(most)
        if not chunk:
            break
        count += len(chunk)
        yield chunk
        lately += len(chunk)
        elapsed = time.monotonic() - since
        if elapsed > TIMEOUT_S:
            if lately < SLOWEST_BYTES:
                raise TimeoutError(f"no more than {lately} bytes in {elapsed:.0f} s")
            lately, since = 0, time.monotonic()
    if announced is not None and wanted is not None and count < wanted:
        raise ConnectionError(f"cut off after {count} of {announced} bytes")


def _transfer(
    source: str, partial: Path, size: int | None, count: Callable[[int], None], durable: bool
) -> tuple[str, int, bool]:
    """One attempt; digest and size of what lies in `partial` then, and whether it was resumed."""
    digest = hashlib.sha256()
    have = _size(partial)
    if size is not None and have > size:
        partial.unlink()
        have = 0
    if have:
        # Before the connection is opened: no server waits while gigabytes are read.
        with partial.open("rb") as stream:
            while chunk := stream.read(CHUNK_BYTES):
                digest.update(chunk)
                count(len(chunk))
        if have == size:
            return digest.hexdigest(), have, True
    with _open(source, have) as response:
        resumed = have > 0 and response.status == http.client.PARTIAL_CONTENT
        if have and not resumed:
            count(-have)
            digest, have = hashlib.sha256(), 0
        with partial.open("ab" if resumed else "wb") as stream:
            for chunk in _chunks(response):
                stream.write(chunk)
                digest.update(chunk)
                have += len(chunk)
                count(len(chunk))
                if size is not None and have > size:
                    break
            stream.flush()
            if durable:
                os.fsync(stream.fileno())
        unannounced = getattr(response, "length", 0) is None  # so the end may be a cut
    if size is not None and have < size and unannounced:
        raise ConnectionError(f"cut off after {have} of {size} bytes")
    return digest.hexdigest(), have, resumed


def _unreachable(source: str, error: BaseException) -> HostError:
    reason = " ".join(str(error).split())
    way_out = "check the address and the network, then run again"
    return HostError(f"{source}: cannot be fetched ({reason}); {way_out}", exit_code=EXIT_UNABLE)
