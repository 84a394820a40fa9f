"""What bench/gateway.py measures: a simulated engine, nginx, and bytes that are only copied."""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import uvloop

GAP_S, ANSWER_BYTES, SLOTS = 0.02, 1024, 2
NGINX = """\
daemon off; master_process off; worker_processes 1; pid {folder}/pid; error_log {folder}/log;
events {{ worker_connections 1024; }}
http {{
  access_log off; client_body_temp_path {folder}/b; proxy_temp_path {folder}/p;
  fastcgi_temp_path {folder}/f; uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
  upstream engine {{ server 127.0.0.1:{engine}; keepalive 64; }}
  server {{
    listen 127.0.0.1:{port};
    location / {{
      proxy_pass http://engine; proxy_http_version 1.1; proxy_set_header Connection "";
      proxy_buffering off; keepalive_requests 100000;
    }}
  }}
}}
"""


class Engine(asyncio.Protocol):
    """Answers every request as its body asks: `stream` events, or a whole answer."""

    slots = asyncio.Semaphore(1 << 20)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are none of asyncio's classes.
        self._transport = cast(asyncio.Transport, transport)
        self._data = b""
        self._task: asyncio.Task[None] | None = None

    def data_received(self, data: bytes) -> None:
        self._data += data
        head, end, body = self._data.partition(b"\r\n\r\n")
        found = re.search(rb"content-length: *(\d+)", head, re.IGNORECASE)
        if end and len(body) >= (int(found[1]) if found else 0):
            self._data = b""
            asked = json.loads(body) if body else {}
            self._task = asyncio.ensure_future(self._answer(asked))

    def connection_lost(self, _error: Exception | None) -> None:
        if self._task:
            self._task.cancel()

    async def _answer(self, asked: dict[str, object]) -> None:
        if not asked.get("stream"):
            body = whole_answer()
            head = (
                b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
            )
            self._transport.write(head % len(body) + body)
            return
        kind = b"Content-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        self._transport.write(b"HTTP/1.1 200 OK\r\n" + kind)
        slots = two_slots if asked.get("user") == "two slots" else Engine.slots
        async with slots:
            count = int(str(asked["seed"]))
            start = time.monotonic()
            for number in range(count):
                await asyncio.sleep(max(0.0, start + number * GAP_S - time.monotonic()))
                self._write(event(b'{"content":" word and %d"}' % time.monotonic_ns(), b"null"))
        self._write(event(b"{}", b'"stop"') + b"data: [DONE]\n\n")
        self._transport.write(b"0\r\n\r\n")

    def _write(self, content: bytes) -> None:
        self._transport.write(b"%x\r\n%b\r\n" % (len(content), content))


two_slots = asyncio.Semaphore(SLOTS)


def event(delta: bytes, finish: bytes) -> bytes:
    """A chunk as vLLM writes it."""
    return (
        b'data: {"id":"chatcmpl-0123456789abcdef0123456789abcdef",'
        b'"object":"chat.completion.chunk","created":1,"model":"qwen38-27b","choices":[{"index":0,'
        b'"delta":%b,"logprobs":null,"finish_reason":%b}]}\n\n' % (delta, finish)
    )


def whole_answer() -> bytes:
    message = {"role": "assistant", "content": "x" * ANSWER_BYTES}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    return json.dumps({"created": time.monotonic_ns(), "choices": [choice]}).encode()


class Copy(asyncio.Protocol):
    """Passes what it receives to its peer."""

    def __init__(self, port: int | None, peer: asyncio.Transport | None = None) -> None:
        self._port, self._peer, self._early = port, peer, b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are none of asyncio's classes.
        self._transport = cast(asyncio.Transport, transport)
        if self._port:
            self._connecting = asyncio.ensure_future(self._connect(self._port))

    async def _connect(self, port: int) -> None:
        loop = asyncio.get_running_loop()
        made = lambda: Copy(None, self._transport)  # noqa: E731
        self._peer, _ = await loop.create_connection(made, "127.0.0.1", port)
        self._peer.write(self._early)

    def data_received(self, data: bytes) -> None:
        if self._peer:
            self._peer.write(data)
        else:
            self._early += data

    def connection_lost(self, _error: Exception | None) -> None:
        if self._peer:
            self._peer.close()


def serve(make: Callable[[], asyncio.Protocol], port: int) -> None:
    async def forever() -> None:
        server = await asyncio.get_running_loop().create_server(make, "127.0.0.1", port)
        await server.serve_forever()

    uvloop.run(forever())


@contextlib.contextmanager
def forked(make: Callable[[], asyncio.Protocol], port: int) -> Iterator[int]:
    process = multiprocessing.Process(target=serve, args=(make, port), daemon=True)
    process.start()
    try:
        yield process.pid or 0
    finally:
        process.terminate()
        process.join()


@contextlib.contextmanager
def nginx(engine: int, port: int, folder: Path) -> Iterator[int]:
    config = folder / "nginx.conf"
    config.write_text(NGINX.format(folder=folder, engine=engine, port=port))
    process = subprocess.Popen(["nginx", "-c", config, "-e", folder / "log"])
    try:
        yield process.pid
    finally:
        process.terminate()
        process.wait()
