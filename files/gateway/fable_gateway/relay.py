"""The way back: the engine's bytes to the client, untouched, and never a false end."""

from __future__ import annotations

import json
import socket
import struct

import aiohttp
from aiohttp import web

from fable_gateway import headers
from fable_gateway.errors import error_body
from fable_gateway.upstream import Answer

DONE = b"data: [DONE]"
TAIL_BYTES = 64
EVENT_STREAM = "text/event-stream"


async def relay(
    request: web.Request, answer: Answer, request_id: str, ends_with_done: bool
) -> tuple[web.StreamResponse, str | None]:
    """Send `answer` to the client as it comes.

    Args:
        request: the client's request.
        answer: the engine's answer, not read yet except for its head.
        request_id: goes out as X-Request-Id.
        ends_with_done: whether an event stream of this path is complete only with `[DONE]`.

    Returns:
        The response, and why it was cut (None if it is complete). After a cut the connection to
        the client is closed without an end of the body.

    Raises:
        ConnectionError: the client is gone.
    """
    upstream = answer.response
    response = web.StreamResponse(
        status=upstream.status,
        reason=upstream.reason,
        headers=headers.to_client(upstream.headers, request_id),
    )
    await response.prepare(request)
    events = upstream.content_type == EVENT_STREAM
    chunk, tail = b"", b""
    while True:
        if chunk:
            await response.write(chunk)
            tail = (tail + chunk[-TAIL_BYTES:])[-TAIL_BYTES:]
        try:
            chunk = await answer.read()
        except (aiohttp.ClientError, OSError) as error:
            reason = f"the engine broke off: {type(error).__name__}"
            break
        if not chunk:
            if not (events and ends_with_done) or tail.rstrip().endswith(DONE):
                return response, None
            reason = "the engine's stream ended without [DONE]"
            break
    await _cut(request, response, reason if events else None)
    return response, reason


async def _cut(request: web.Request, response: web.StreamResponse, event: str | None) -> None:
    """Close the client's connection in the middle of the body.

    An event stream gets an error event first. Anything else is reset, which also a client of
    HTTP/1.0, where a plain close is a proper end, cannot take for the whole.
    """
    transport = request.transport
    if event is not None:
        error = json.dumps(error_body(event, "server_error", "stream_cut"))
        await response.write(b"\n\ndata: " + error.encode() + b"\n\n")
        if transport is not None:
            transport.close()
    elif transport is not None:
        connection = transport.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        transport.abort()
