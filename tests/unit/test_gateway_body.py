"""Request bodies that are slow, endless or without room: the reader itself, with short clocks."""

from __future__ import annotations

import asyncio
import json
import zlib
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from aiohttp import web
from fable_gateway import body
from fable_gateway.limits import Budget

from tests.unit.gateway_support import PATIENCE_S

Client = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]]
LIMIT = 1 << 20
HEAD = b"POST / HTTP/1.1\r\nHost: x\r\n"


async def answered(client: Client, budget: Budget, wait_s: float) -> tuple[int, bytes]:
    """Status and body for a client that sends what it likes; a body that is taken is echoed."""

    async def handle(request: web.Request) -> web.Response:
        deadline = asyncio.get_running_loop().time() + wait_s
        try:
            with budget.share() as share:
                return web.Response(body=await body.read(request, LIMIT, share, deadline))
        except body.Refused as refused:
            return refused.response

    app = web.Application()
    app.router.add_post("/", handle, expect_handler=body.expected)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    reader, writer = await asyncio.open_connection(*runner.addresses[0][:2])
    try:
        async with asyncio.timeout(PATIENCE_S):
            await client(reader, writer)
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            return int(head.split()[1]), await reader.readexactly(length)
    finally:
        writer.close()
        await runner.cleanup()


def asked(client: Client, size: int = 4 * LIMIT, wait_s: float = 60) -> tuple[int, bytes]:
    """See `answered`; afterwards the whole budget must be back."""

    async def run() -> tuple[int, bytes]:
        budget = Budget(size)
        result = await answered(client, budget, wait_s)
        assert budget.free == size
        return result

    return asyncio.run(run())


def sending(*pieces: bytes) -> Client:
    async def client(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()

    return client


def chunked(content: bytes) -> bytes:
    head = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
    return head + b"%x\r\n" % len(content) + content + b"\r\n0\r\n\r\n"


def code(content: bytes) -> object:
    return json.loads(content)["error"]["code"]


def test_a_client_that_stops_sending_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body, "STALL_S", 0.1)
    status, content = asked(sending(HEAD + b"Content-Length: 5\r\n\r\nab"))
    assert (status, code(content)) == (408, "request_timeout")


def test_a_client_that_never_ends_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body, "BODY_S", 0.3)

    async def drip(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + b"Content-Length: 1000\r\n\r\n")
        for _ in range(20):
            writer.write(b"x")
            await asyncio.sleep(0.05)

    status, content = asked(drip)
    assert (status, code(content)) == (408, "request_timeout")


def test_without_room_a_large_body_waits_and_is_refused_unread() -> None:
    announced = HEAD + b"Content-Length: %d\r\nExpect: 100-continue\r\n\r\n" % LIMIT
    status, content = asked(sending(announced), size=LIMIT // 2, wait_s=0.1)
    assert (status, code(content)) == (503, "overloaded")


def test_a_body_of_unknown_size_is_refused_when_the_room_ends() -> None:
    status, content = asked(sending(chunked(b"x" * (LIMIT // 2))), size=body.FREE_BYTES)
    assert (status, code(content)) == (503, "overloaded")


@pytest.mark.parametrize("size", [0, 1, body.FREE_BYTES, body.FREE_BYTES + 1, LIMIT])
def test_bodies_within_the_limit_arrive_whole(size: int) -> None:
    content = bytes(range(256)) * (size // 256) + b"x" * (size % 256)
    announced = HEAD + b"Content-Length: %d\r\n\r\n" % size + content
    assert asked(sending(announced)) == (200, content)
    if size:
        assert asked(sending(chunked(content))) == (200, content)
    packed = zlib.compress(content)
    head = HEAD + b"Content-Encoding: deflate\r\nContent-Length: %d\r\n\r\n" % len(packed)
    assert asked(sending(head + packed)) == (200, content)


def test_a_body_that_is_small_only_while_packed_is_refused() -> None:
    packed = zlib.compress(b"x" * (64 * LIMIT))
    head = HEAD + b"Content-Encoding: deflate\r\nContent-Length: %d\r\n\r\n" % len(packed)
    status, content = asked(sending(head + packed))
    assert (status, code(content)) == (413, "request_too_large")
