"""Request bodies: read whole, within a limit, a deadline and the memory for all of them."""

from __future__ import annotations

import asyncio

from aiohttp import web

from fable_gateway import errors
from fable_gateway.limits import Share

BODY_S = 300.0
# Between two pieces; whoever stops sending must not keep memory from the others.
STALL_S = 30.0
# Bodies up to here need no share: aiohttp has buffered as much before anything is read.
FREE_BYTES = 64 << 10
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class Refused(Exception):
    """The body is not taken; `response` says why."""

    def __init__(self, response: web.Response) -> None:
        super().__init__()
        self.response = response


async def expected(_request: web.Request) -> None:
    """aiohttp's hook for `Expect`: nothing is promised before the request is admitted."""


async def read(request: web.Request, limit: int, share: Share, deadline: float) -> bytes:
    """The whole body, decompressed.

    Args:
        request: not read yet.
        limit: largest body, in bytes.
        share: grows to the body's size.
        deadline: until when to wait for memory, in the event loop's time.

    Raises:
        Refused: it is too large, too slow, broken, or there is no memory for it.
    """
    announced = request.content_length or 0
    if announced > limit:
        raise Refused(errors.too_large(limit))
    granted = FREE_BYTES
    if announced > granted and "Content-Encoding" not in request.headers:
        try:
            await share.reserve(announced - granted, deadline)
        except TimeoutError:
            raise Refused(errors.bodies_full()) from None
        granted = announced
    if request.headers.get("Expect", "").lower() == "100-continue":
        await request.writer.write(CONTINUE)
        request.writer.output_size = 0
    pieces: list[bytes] = []
    size = 0
    end = asyncio.get_running_loop().time() + BODY_S
    try:
        while piece := await _piece(request, end):
            pieces.append(piece)
            size += len(piece)
            if size > limit:
                raise Refused(errors.too_large(limit))
            if size > granted:
                if not share.grow(size - granted):
                    raise Refused(errors.bodies_full())
                granted = size
    except (web.RequestPayloadError, ValueError):
        text = "the request's body cannot be read as its headers say"
        raise Refused(errors.bad_request(text)) from None
    except TimeoutError:
        raise Refused(errors.body_too_slow()) from None
    return b"".join(pieces) if len(pieces) != 1 else pieces[0]


async def _piece(request: web.Request, end: float) -> bytes:
    """The next bytes; empty at the end of the body.

    Raises:
        TimeoutError: nothing came for a while, or `end`, in the event loop's time, has come.
    """
    if request.content.is_eof():  # all of it is here: no clock is needed
        return await request.content.readany()
    now = asyncio.get_running_loop().time()
    async with asyncio.timeout_at(min(end, now + STALL_S)):
        return await request.content.readany()
