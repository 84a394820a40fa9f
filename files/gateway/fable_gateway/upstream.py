"""The way to the engine: its connections, and what may be tried again."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import aiohttp
from multidict import CIMultiDict
from yarl import URL

from fable_gateway.connections import Trace, session
from fable_gateway.patience import ACCEPTED_S, Patience

# No answer, or silence inside one, for this long means that the engine hangs.
SILENCE_S = 1800.0
PROBE_S = 2.0
PIECE_BYTES = 64 << 10
HEAD_BYTES = 64 << 10
RETRY_AFTER = re.compile(r"[0-9]{1,6}")
SHUTTING_DOWN = b"cannot schedule new futures"


class EngineAway(Exception):
    """The engine has not begun with this request; it may be sent again.

    `retry_after` is what it said itself, in seconds.
    """

    def __init__(self, reason: str, retry_after: int | None = None) -> None:
        super().__init__(reason)
        self.retry_after = retry_after


class EngineFailed(Exception):
    """The engine took the request and gave no answer; it is not sent again."""


class _ConnectionBroke(EngineFailed):
    """The connection ended before the answer began."""


@dataclass
class Call:
    """One request to the engine.

    Attributes:
        method: as the client sent it.
        target: path and query as the client encoded them.
        headers: as the engine may see them.
        body: the bytes to send.
        tries: how often it was sent.
    """

    method: str
    target: str
    headers: CIMultiDict[str]
    body: bytes
    tries: int = 0


@dataclass
class Answer:
    """An answer.

    Attributes:
        response: the engine's, read with `read` only.
        head: first bytes, read already.
        first_byte: when the first byte came, in time.monotonic's seconds.
    """

    response: aiohttp.ClientResponse
    head: bytes = b""
    first_byte: float | None = None

    async def read(self) -> bytes:
        """The next bytes; empty at the end.

        Raises:
            aiohttp.ClientError, OSError: the engine broke off.
        """
        chunk = await self.response.content.readany()
        if chunk and self.first_byte is None:
            self.first_byte = time.monotonic()
        return chunk


def away_reason(status: int, head: bytes) -> str | None:
    """Why an answer means that the engine is not serving; None if it is an answer to pass on."""
    if status == 503:
        return "it answers 503"
    if status == 500 and SHUTTING_DOWN in head:
        return "it is shutting down"
    return None


class Upstream:
    """Connections to one engine. Make, use and close it inside the same event loop."""

    def __init__(self, base: str, connect_timeout_seconds: float) -> None:
        self._base = base
        self.patience = Patience()
        self._health: asyncio.Task[bytes | None] | None = None
        timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=connect_timeout_seconds, sock_read=SILENCE_S
        )
        self._pooled = session(timeout, keep=True)
        self._fresh = session(timeout, keep=False)

    async def close(self) -> None:
        """Close every connection."""
        await self._pooled.close()
        await self._fresh.close()

    async def healthy(self) -> bool:
        """Whether the engine answers its health check now; all who ask at once share one."""
        if self._health is None or self._health.done():
            self._health = asyncio.create_task(self._probe("/health"))
        return await asyncio.shield(self._health) is not None

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
        away = EngineAway("it has been away for a while")
        while True:
            try:
                trying = await self.patience.turn(deadline)
            except TimeoutError:
                raise away from None
            try:
                return await self._try(call, trying)
            except EngineAway as error:
                away = error
                left = deadline - asyncio.get_running_loop().time()
                if left <= (error.retry_after or 0):
                    raise

    async def _try(self, call: Call, trying: bool) -> Answer:
        """Send once; everybody who waits learns of the outcome."""
        accepted: asyncio.TimerHandle | None = None

        def give_up_waiting() -> None:
            # Once told, the news is no longer this one's to take back.
            nonlocal trying
            trying = False
            self.patience.back()

        def sent() -> None:
            nonlocal accepted
            if trying:
                accepted = asyncio.get_running_loop().call_later(ACCEPTED_S, give_up_waiting)

        call.tries += 1
        try:
            answer = await self._send(call, sent)
        except EngineAway:
            self.patience.away(trying=trying)
            raise
        except BaseException:
            self.patience.gone(trying=trying)
            raise
        finally:
            if accepted:
                accepted.cancel()
        if self.patience.is_away:
            self.patience.back()
        return answer

    async def _send(self, call: Call, sent: Callable[[], None]) -> Answer:
        trace = Trace(on_sent=sent)
        try:
            return await self._send_once(self._pooled, call, trace)
        except _ConnectionBroke:
            if not trace.reused:
                raise
        # The engine may have closed an idle connection while the request was on its way.
        call.tries += 1
        return await self._send_once(self._fresh, call, trace)

    async def _send_once(self, pool: aiohttp.ClientSession, call: Call, trace: Trace) -> Answer:
        if call.body:
            call.headers["Content-Length"] = str(len(call.body))
        try:
            response = await pool.request(
                call.method,
                URL(self._base + call.target, encoded=True),
                headers=call.headers,
                data=_data(call.body),
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
        answer = Answer(response)
        if response.status in (500, 503):
            answer.head = await _head(response)
            answer.first_byte = time.monotonic()
        return answer

    async def _probe(self, path: str) -> bytes | None:
        """The body of a 200 answer that came in time."""
        timeout = aiohttp.ClientTimeout(total=PROBE_S)
        try:
            async with self._fresh.get(self._base + path, timeout=timeout) as response:
                body = await response.read()
                return body if response.status == 200 else None
        except (aiohttp.ClientError, OSError):
            return None


async def _head(response: aiohttp.ClientResponse) -> bytes:
    """The begin of an answer 500 or 503, unless it means that the engine is away."""
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
        later = response.headers.get("Retry-After", "")
        raise EngineAway(reason, int(later) if RETRY_AFTER.fullmatch(later) else None)
    return bytes(head)


def _data(body: bytes) -> bytes | AsyncIterator[bytes] | None:
    """Small bodies go out with the headers; large ones piece by piece, at the engine's pace."""
    if len(body) <= PIECE_BYTES:
        return body or None
    return _pieces(body)


async def _pieces(body: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(body), PIECE_BYTES):
        yield body[start : start + PIECE_BYTES]


def _connect_text(error: Exception) -> str:
    if isinstance(error, aiohttp.ClientConnectorError):
        return (error.os_error.strerror or "cannot be reached").lower()
    return "does not take connections"
