"""The way back: the engine's answer to the client, strict where it was not, never a false end."""

from __future__ import annotations

import asyncio
import socket
import struct
from dataclasses import dataclass

import aiohttp
from aiohttp import web

from fable_gateway import errors, headers
from fable_gateway.arguments import Json
from fable_gateway.message import normalised
from fable_gateway.request import Asked
from fable_gateway.stream import AnswerStream, error_event
from fable_gateway.upstream import Answer

EVENT_STREAM = "text/event-stream"
JSON = "application/json"
# A whole answer larger than this passes as it comes.
MAX_WHOLE_BYTES = 64 << 20
# How long the engine may stay silent once every choice has its finish_reason.
END_S = 3.0


@dataclass
class Relayed:
    """What became of an answer.

    Attributes:
        response: what the client got.
        error: why it was cut; None if it is whole.
        usage: the engine's own count of tokens, where it gave one.
        finish_reason: of the first choice, as the client saw it.
    """

    response: web.StreamResponse
    error: str | None = None
    usage: Json | None = None
    finish_reason: str | None = None


async def relay(
    request: web.Request, answer: Answer, request_id: str, asked: Asked | None
) -> Relayed:
    """Send `answer` to the client as it comes.

    After a cut the connection to the client is closed without an end of the body.

    Args:
        request: the client's request.
        answer: the engine's answer, not read yet except for its head.
        request_id: goes out as X-Request-Id.
        asked: what a request to a model asked for; None for all else, which passes untouched.

    Raises:
        ConnectionError: the client is gone.
    """
    upstream = answer.response
    # In an encoding that nobody asked for it can only pass.
    plain = upstream.headers.get("Content-Encoding", "identity") == "identity"
    if asked and plain and upstream.status == 200:
        if upstream.content_type == EVENT_STREAM:
            return await _events(request, answer, request_id, asked)
        if upstream.content_type == JSON:
            return await _whole(request, answer, request_id, asked)
    response = _response(answer, request_id)
    await response.prepare(request)
    return await _rest(request, answer, response, answer.head)


def _response(answer: Answer, request_id: str) -> web.StreamResponse:
    return web.StreamResponse(
        status=answer.response.status,
        reason=answer.response.reason,
        headers=headers.to_client(answer.response.headers, request_id),
    )


async def _rest(
    request: web.Request, answer: Answer, response: web.StreamResponse, chunk: bytes
) -> Relayed:
    """Everything from `chunk` on, untouched."""
    try:
        while True:
            if chunk:
                await response.write(chunk)
            chunk = await _read(answer)
            if not chunk:
                return Relayed(response)
    except _BrokeOff as broke:
        _reset(request)
        return Relayed(response, str(broke))


async def _whole(request: web.Request, answer: Answer, request_id: str, asked: Asked) -> Relayed:
    """An answer in one piece: read to its end before the client gets any of it."""
    response = _response(answer, request_id)
    body = bytearray(answer.head)
    try:
        while chunk := await _read(answer):
            body += chunk
            if len(body) > MAX_WHOLE_BYTES:
                await response.prepare(request)
                return await _rest(request, answer, response, bytes(body))
    except _BrokeOff as broke:
        return Relayed(errors.engine_failed(str(broke)), str(broke))
    whole = normalised(bytes(body), asked)
    response.content_length = len(whole.body)
    await response.prepare(request)
    await response.write(whole.body)
    return Relayed(response, None, whole.usage, whole.finish_reason)


async def _events(request: web.Request, answer: Answer, request_id: str, asked: Asked) -> Relayed:
    response = _response(answer, request_id)
    response.headers.popall("Content-Length", None)
    response.headers.setdefault("Cache-Control", "no-cache")
    response.headers.setdefault("X-Accel-Buffering", "no")
    await response.prepare(request)
    stream = AnswerStream(asked)
    chunk = answer.head
    while True:
        out = stream.feed(chunk)
        if out:
            await response.write(out)
        if stream.cut:
            break
        try:
            chunk = await _read(answer, END_S if stream.complete or stream.done else None)
        except _BrokeOff as broke:
            if not stream.complete:
                stream.cut = str(broke)
                break
            chunk = b""
        if not chunk and (last := stream.end()):
            await response.write(last)
        if not chunk:
            break
    if stream.cut:
        await response.write(b"\n\n" + error_event(stream.cut, "stream_cut"))
        if request.transport:
            request.transport.close()
    return Relayed(response, stream.cut, stream.usage, stream.finish_reason)


class _BrokeOff(Exception):
    """The engine's answer ended before its end."""


async def _read(answer: Answer, limit_s: float | None = None) -> bytes:
    """The next bytes, empty at the end.

    Raises:
        _BrokeOff: the connection to the engine broke, or nothing came within `limit_s`.
    """
    try:
        if limit_s is None:
            return await answer.read()
        async with asyncio.timeout(limit_s):
            return await answer.read()
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        raise _BrokeOff(f"the engine broke off: {type(error).__name__}") from None


def _reset(request: web.Request) -> None:
    """End the client's connection so that not even HTTP/1.0 takes it for the end of the body."""
    if request.transport is not None:
        connection = request.transport.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        request.transport.abort()
