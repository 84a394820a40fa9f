"""The HTTP server's edges: deadlines for whoever is slow, and errors in the OpenAI shape."""

from __future__ import annotations

import asyncio
import socket

from aiohttp import web

from fable_gateway import errors

# From the connection to the end of its first request's headers.
HEADERS_S = 30.0
# Between two requests of one connection.
IDLE_S = 75.0
# A client that takes no byte of its answer for this long is gone (tcp(7), TCP_USER_TIMEOUT).
STALLED_S = 120
REFUSED = frozenset({400, 413, 417})


class Protocol(web.RequestHandler):
    """aiohttp's server protocol for one connection."""

    def __init__(self, server: web.Server, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(server, loop=loop, keepalive_timeout=IDLE_S, access_log=None)  # type: ignore[arg-type]  # None is what AppRunner passes, too
        self._slow: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start the clock for the first request's headers."""
        super().connection_made(transport)
        self._slow = asyncio.get_running_loop().call_later(HEADERS_S, self._end_if_slow)

    def connection_lost(self, exc: BaseException | None) -> None:
        """Stop the clock."""
        if self._slow:
            self._slow.cancel()
        super().connection_lost(exc)

    @property
    def is_new(self) -> bool:
        """Whether no request has arrived on this connection yet."""
        return self._request_count == 0

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """The answer to what the parser refused or a handler could not do."""
        super().handle_error(request, status, exc, message)  # writes the journal's line
        response = errors.malformed() if status in REFUSED else errors.internal()
        response.force_close()
        return response

    def _end_if_slow(self) -> None:
        if self.is_new:
            self.force_close()


def prepare(listener: socket.socket) -> None:
    """Have the kernel notice, on every connection, clients that vanish or stop reading."""
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, 30),
        (socket.TCP_KEEPINTVL, 10),
        (socket.TCP_KEEPCNT, 3),
        (socket.TCP_USER_TIMEOUT, STALLED_S * 1000),
        (socket.TCP_NODELAY, 1),
    ):
        listener.setsockopt(socket.IPPROTO_TCP, option, value)
