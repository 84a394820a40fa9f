"""Connections to the engine: two pools, and what a request learns of the connection it got."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass

import aiohttp

# The engine closes idle connections after 5 s.
IDLE_S = 4.0


@dataclass
class Trace:
    """What is to be learned: whether the connection was used before, and when all was sent."""

    reused: bool = False
    on_sent: Callable[[], None] | None = None


def session(timeout: aiohttp.ClientTimeout, keep: bool) -> aiohttp.ClientSession:
    """Connections that are used again (`keep`) or never; `trace_request_ctx` is a `Trace`."""
    trace = aiohttp.TraceConfig()
    trace.on_connection_reuseconn.append(_note_reuse)
    trace.on_request_headers_sent.append(_note_sent)
    connector = (
        aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_S, socket_factory=_socket)
        if keep
        else aiohttp.TCPConnector(limit=0, force_close=True, socket_factory=_socket)
    )
    return aiohttp.ClientSession(
        connector=connector,
        timeout=timeout,
        trace_configs=[trace],
        auto_decompress=False,
        cookie_jar=aiohttp.DummyCookieJar(),
        skip_auto_headers=("User-Agent", "Accept", "Content-Type"),
    )


def _socket(address: aiohttp.AddrInfoType) -> socket.socket:
    """A socket that notices within half a minute that the engine's host is gone."""
    family, kind, protocol, _, _ = address
    result = socket.socket(family, kind, protocol)
    result.setblocking(False)
    result.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    result.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 15)
    result.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
    result.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    return result


async def _note_reuse(
    _session: aiohttp.ClientSession, context: object, _parameters: object
) -> None:
    trace = getattr(context, "trace_request_ctx", None)
    if isinstance(trace, Trace):
        trace.reused = True


async def _note_sent(_session: aiohttp.ClientSession, context: object, _parameters: object) -> None:
    trace = getattr(context, "trace_request_ctx", None)
    if isinstance(trace, Trace) and trace.on_sent:
        trace.on_sent()
