"""Files of another host, read over ssh: `ssh://[user@]host[:port]/absolute/path`.

Only the system's ssh is needed here, and `tail` there. Nobody is asked anything: keys, known hosts
and names come from the user's own ssh configuration, and an unknown host is refused.
"""

from __future__ import annotations

import http.client
import os
import re
import select
import shlex
import subprocess
import tempfile
from types import TracebackType

from hostlib.errors import EXIT_UNABLE, HostError

SCHEME = "ssh://"
CONNECTION_LOST = 255  # ssh's own exit code; others are the remote command's
OPTIONS = (
    "BatchMode=yes",
    "StrictHostKeyChecking=yes",
    "ClearAllForwardings=yes",
    "ConnectTimeout=30",
    "ServerAliveInterval=15",
    "ServerAliveCountMax=4",
)
_ADDRESS = re.compile(
    r"ssh://(?:(?P<user>[A-Za-z_][\w.-]*)@)?(?P<host>[A-Za-z0-9][\w.-]*|\[[0-9A-Fa-f:.]+\])"
    r"(?::(?P<port>\d{1,5}))?(?P<path>/[^\0\r\n]*)",
    re.ASCII,
)


def command(address: str, offset: int) -> list[str]:
    """The argv that prints the file at `address` from byte `offset` on.

    Raises:
        HostError: `address` is not of the form that this module reads.
    """
    found = _ADDRESS.fullmatch(address)
    if not found:
        raise HostError(
            f"{address}: is no ssh://[user@]host[:port]/absolute/path; correct the address",
            exit_code=EXIT_UNABLE,
        )
    options = [word for option in OPTIONS for word in ("-o", option)]
    if found["port"]:
        options += ["-p", found["port"]]
    if found["user"]:
        options += ["-l", found["user"]]
    remote = shlex.join(["tail", "-c", f"+{offset + 1}", "--", found["path"]])
    return ["ssh", "-n", "-T", *options, "--", found["host"].strip("[]"), remote]


class RemoteFile:
    """The bytes of a file of another host, read as from an HTTP response.

    Attributes:
        status: 206, for the bytes always begin at the offset asked for.
        length: 0 once the other side has said that this was the file's end, None before.
    """

    status = http.client.PARTIAL_CONTENT

    def __init__(self, address: str, offset: int, timeout_s: float) -> None:
        self.length: int | None = None
        self._timeout_s = timeout_s
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the process
        try:
            self._process = subprocess.Popen(
                command(address, offset),
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=self._said,
            )  # fmt: skip
        except BaseException as error:
            self._said.close()
            if isinstance(error, FileNotFoundError):
                raise HostError(
                    f"{address}: ssh is not installed here; install openssh-client",
                    exit_code=EXIT_UNABLE,
                ) from None
            raise

    def __enter__(self) -> RemoteFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._said.close()

    def read1(self, most: int) -> bytes:
        """What comes next, at most `most` bytes; none only at the end.

        Raises:
            ConnectionError: the connection failed or broke; trying again may help.
            TimeoutError: nothing came for `timeout_s` seconds.
            OSError: the other host has no such file.
        """
        assert self._process.stdout is not None
        handle = self._process.stdout.fileno()
        ready, _, _ = select.select([handle], [], [], self._timeout_s)
        if not ready:
            raise TimeoutError(f"nothing came for {self._timeout_s:.0f} s")
        chunk = os.read(handle, most)
        if not chunk:
            self._end()
        return chunk

    def _end(self) -> None:
        try:
            code = self._process.wait(self._timeout_s)
        except subprocess.TimeoutExpired:
            raise TimeoutError("ssh does not end") from None
        self._said.seek(0)
        lines = self._said.read(10_000).decode(errors="replace").strip().splitlines()
        said = lines[-1] if lines else f"exit code {code}"
        if code == CONNECTION_LOST:
            raise ConnectionError(f"ssh: {said}")
        if code:
            raise OSError(f"the other host says: {said}")
        self.length = 0
