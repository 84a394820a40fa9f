"""Addresses and ports of this machine."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import socket
import time
from collections.abc import Iterable
from pathlib import Path

from hostlib.errors import HostError

from enginectl.release import Listen

POLL_SECONDS = 0.5

_TCP_LISTEN = "0A"  # TCP_LISTEN in include/net/tcp_states.h


def has_address(host: str) -> bool:
    """Whether `host` is an address that a server on this machine can listen on right now.

    Raises:
        OSError: for any reason other than that the address is not there.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((host, 0))
    except OSError as error:
        if error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
            return False
        raise
    return True


def wait_for_address(host: str, seconds: float) -> None:
    """Wait until this machine has the address: those of a tailnet come up late.

    Raises:
        HostError: it has not within `seconds`.
    """
    deadline = time.monotonic() + seconds
    while not has_address(host):
        if time.monotonic() >= deadline:
            raise HostError(
                f"{host}: is no address of this machine after {seconds:.0f} s; bring the "
                "interface up, or change the listening address in the settings"
            )
        time.sleep(min(POLL_SECONDS, max(0.0, deadline - time.monotonic())))


def taken(listen: Listen) -> bool:
    """Whether a socket listens already where `listen` would.

    Binding would not tell: with SO_REUSEPORT a second server of the same user gets the same
    port without an error, and the kernel spreads the requests over both.
    """
    return bool(_listening(listen))


def taken_by_others(listen: Listen, own: Iterable[int]) -> bool:
    """Whether a socket that none of the processes `own` holds listens where `listen` does.

    Needs to look into those processes: as another user than theirs or root, all look like others.
    """
    sockets = _listening(listen)
    for pid in own if sockets else ():
        sockets -= _sockets(pid)
    return bool(sockets)


def listeners(listen: Listen) -> set[int]:
    """The processes that listen where `listen` would; those that may be looked into."""
    sockets = _listening(listen)
    if not sockets:
        return set()
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()]
    return {pid for pid in pids if sockets & _sockets(pid)}


def _sockets(pid: int) -> set[str]:
    """The open files of a process as /proc names them; empty once it has ended."""
    found: set[str] = set()
    try:
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed while we look
                found.add(str(entry.readlink()))
    except OSError:
        return found
    return found


def _listening(listen: Listen) -> set[str]:
    """The listening sockets in the way of `listen`, as /proc/PID/fd names them."""
    return {
        f"socket:[{line.split()[9]}]"
        for table in ("tcp", "tcp6")
        for line in _lines(Path("/proc/net") / table)
        if clashes(listen, line)
    }


def clashes(listen: Listen, line: str) -> bool:
    """Whether a line of /proc/net/tcp or tcp6 is a listening socket in the way of `listen`."""
    fields = line.split()
    if len(fields) < 4 or fields[3] != _TCP_LISTEN:
        return False
    hex_address, _, hex_port = fields[1].partition(":")
    if int(hex_port, 16) != listen.port:
        return False
    theirs, ours = _from_hex(hex_address), _plain(ipaddress.ip_address(listen.host))
    return theirs == ours or theirs.is_unspecified or ours.is_unspecified


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()[1:]
    except FileNotFoundError:  # a kernel without IPv6
        return []


_Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def _from_hex(text: str) -> _Address:
    """The kernel prints each 32-bit word of an address in the machine's (little-endian) order."""
    raw = b"".join(bytes.fromhex(text[start : start + 8])[::-1] for start in range(0, len(text), 8))
    return _plain(ipaddress.ip_address(raw))


def _plain(address: _Address) -> _Address:
    """An IPv4 address written in IPv6 (::ffff:a.b.c.d) as the IPv4 address it is."""
    return getattr(address, "ipv4_mapped", None) or address
