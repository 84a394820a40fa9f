"""The way to the engine: connections, patience while it is away, and what may be tried again."""

from __future__ import annotations

import asyncio
import io
import json
import random
import socket
from dataclasses import dataclass

import aiohttp
from multidict import CIMultiDict
from yarl import URL

# The engine closes idle connections after 5 s.
IDLE_S = 4.0
# No answer, or silence inside one, for this long means that the engine hangs.
SILENCE_S = 1800.0
PROBE_S = 2.0
FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 2.0
HEAD_BYTES = 64 << 10
SHUTTING_DOWN = b"cannot schedule new futures"


class EngineAway(Exception):
    """The engine has not begun with this request; it may be sent again."""


class EngineFailed(Exception):
    """The engine took the request and gave no answer; it is not sent again."""


class _ConnectionBroke(EngineFailed):
    """The connection ended before the answer began."""


@dataclass(frozen=True)
class Call:
    """One request to the engine; `target` is path and query as the client encoded them."""

    method: str
    target: str
    headers: CIMultiDict[str]
    body: bytes


@dataclass(frozen=True)
class Answer:
    """An answer whose first bytes, `head`, may have been read already."""

    response: aiohttp.ClientResponse
    head: bytes = b""


@dataclass
class _Trace:
    reused: bool = False


def away_reason(status: int, head: bytes) -> str | None:
    """Why an answer means that the engine is not serving; None if it is an answer to pass on."""
    if status == 503:
        return "it answers 503"
    if status == 500 and SHUTTING_DOWN in head:
        return "it is shutting down"
    return None


def pause_seconds(attempt: int, chance: float) -> float:
    """Pause after failed attempt 0, 1, …: doubled each time, halved at most by `chance` in [0, 1).

    The jitter keeps the requests that wait from arriving all at once.
    """
    longest: float = min(FIRST_PAUSE_S * 2 ** min(attempt, 10), LONGEST_PAUSE_S)
    return longest * (1 - chance / 2)


class Upstream:
    """Connections to one engine. Make, use and close it inside the same event loop."""

    def __init__(self, base: str, connect_timeout_seconds: float) -> None:
        self._base = base
        trace = aiohttp.TraceConfig()
        trace.on_connection_reuseconn.append(_note_reuse)
        timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=connect_timeout_seconds, sock_read=SILENCE_S
        )
        self._pooled = _session(timeout, trace, keep=True)
        self._fresh = _session(timeout, trace, keep=False)

    async def close(self) -> None:
        """Close every connection."""
        await self._pooled.close()
        await self._fresh.close()

    async def healthy(self) -> bool:
        """Whether the engine answers its health check now."""
        return await self._probe("/health") is not None

    async def served_models(self) -> frozenset[str]:
        """Names that the engine serves now; empty if it is away."""
        body = await self._probe("/v1/models")
        try:
            return frozenset(entry["id"] for entry in json.loads(body or b"{}")["data"])
        except (ValueError, TypeError, KeyError):
            return frozenset()

    async def open(self, call: Call, deadline: float) -> Answer:
        """Send `call`, again and again while the engine is away, until its answer begins.

        Args:
            call: what to send.
            deadline: when to give up waiting, in the event loop's time.

        Raises:
            EngineAway: it was still away at the deadline.
            EngineFailed: it broke off before its answer began.
        """
        loop = asyncio.get_running_loop()
        attempt = 0
        while True:
            try:
                return await self._send(call)
            except EngineAway:
                left = deadline - loop.time()
                if left <= 0:
                    raise
                pause = pause_seconds(attempt, random.random())  # noqa: S311
                await asyncio.sleep(min(pause, left))
                attempt += 1

    async def _send(self, call: Call) -> Answer:
        trace = _Trace()
        try:
            return await self._send_once(self._pooled, call, trace)
        except _ConnectionBroke:
            if not trace.reused:
                raise
        # The engine may have closed an idle connection while the request was on its way.
        return await self._send_once(self._fresh, call, trace)

    async def _send_once(self, session: aiohttp.ClientSession, call: Call, trace: _Trace) -> Answer:
        try:
            response = await session.request(
                call.method,
                URL(self._base + call.target, encoded=True),
                headers=call.headers,
                data=io.BytesIO(call.body) if call.body else None,
                allow_redirects=False,
                trace_request_ctx=trace,
            )
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise EngineAway(_connect_text(error)) from None
        except TimeoutError:
            raise EngineFailed(f"silent for {SILENCE_S:g} s") from None
        except (aiohttp.ServerDisconnectedError, OSError) as error:
            raise _ConnectionBroke(f"the connection broke: {type(error).__name__}") from None
        except aiohttp.ClientError as error:
            raise EngineFailed(f"not understood: {type(error).__name__}") from None
        return await _told_apart(response) if response.status in (500, 503) else Answer(response)

    async def _probe(self, path: str) -> bytes | None:
        """The body of a 200 answer that came in time."""
        timeout = aiohttp.ClientTimeout(total=PROBE_S)
        try:
            async with self._fresh.get(self._base + path, timeout=timeout) as response:
                body = await response.read()
                return body if response.status == 200 else None
        except (aiohttp.ClientError, OSError):
            return None


async def _told_apart(response: aiohttp.ClientResponse) -> Answer:
    head = bytearray()
    try:
        while len(head) < HEAD_BYTES and (chunk := await response.content.readany()):
            head += chunk
    except (aiohttp.ClientError, OSError):
        response.close()
        raise EngineFailed(f"it broke off inside an answer {response.status}") from None
    except BaseException:
        response.close()
        raise
    if reason := away_reason(response.status, bytes(head)):
        response.close()
        raise EngineAway(reason)
    return Answer(response, bytes(head))


def _session(
    timeout: aiohttp.ClientTimeout, trace: aiohttp.TraceConfig, keep: bool
) -> aiohttp.ClientSession:
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
    if isinstance(trace, _Trace):
        trace.reused = True


def _connect_text(error: Exception) -> str:
    if isinstance(error, aiohttp.ClientConnectorError):
        return (error.os_error.strerror or "cannot be reached").lower()
    return "does not take connections"
