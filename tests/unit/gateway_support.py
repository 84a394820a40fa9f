"""What the gateway's tests share: an invented engine, and real gateway processes before it."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import http.client
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai
from aiohttp import web

ROOT = Path(__file__).parents[2]
MODELS = ["qwen38-27b", "qwen3.8-27b", "fable-27b"]
KEY = "fable-test-key-of-alice"
OTHER_KEY = "fable-test-key-of-bob"
# Long enough that only a hang ends a wait.
PATIENCE_S = 20.0


def free_port() -> int:
    """A port of 127.0.0.1 that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class Seen:
    """What the engine knows of one request."""

    method: str
    target: str
    headers: list[tuple[str, str]]
    body: bytes
    closed: threading.Event = field(default_factory=threading.Event)


class Engine:
    """An engine on loopback that does what the JSON body of each request asks for.

    `act`: chat (default), events, bytes, cut, wait, headers_then_wait, hold (until `release`).
    `refusals` are answers (status, text) given first, one a request.
    """

    def __init__(self) -> None:
        self.port = free_port()
        self.seen: queue.Queue[Seen] = queue.Queue()
        self.running = 0
        self.most_running = 0
        self.refusals: list[tuple[int, str]] = []
        self.refusal_s = 0.0
        # How many requests ran at each refusal.
        self.at_refusal: list[int] = []
        self.release = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._runner: web.AppRunner | None = None
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        self._run(self._start())

    def stop(self) -> None:
        """Refuse connections from now on, and cut those that are open."""
        self._run(self._stop())

    def close(self) -> None:
        self.release.set()
        self.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(PATIENCE_S)

    def next_seen(self) -> Seen:
        return self.seen.get(timeout=PATIENCE_S)

    def _run(self, work: Awaitable[None]) -> None:
        async def whole() -> None:
            await work

        asyncio.run_coroutine_threadsafe(whole(), self._loop).result(PATIENCE_S)

    async def _start(self) -> None:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{rest:.*}", self._handle)
        self._runner = web.AppRunner(
            app, handler_cancellation=True, shutdown_timeout=0.1, access_log=None
        )
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True).start()

    async def _stop(self) -> None:
        if self._runner:
            await self._runner.cleanup()
            self._runner = None

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        if request.path == "/health":
            return web.Response()
        body = await request.read()
        seen = Seen(request.method, request.path_qs, list(request.headers.items()), body)
        self.seen.put(seen)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            return await self._act(request, json.loads(body) if body else {})
        except (asyncio.CancelledError, ConnectionError):
            seen.closed.set()
            raise
        finally:
            self.running -= 1

    async def _act(self, request: web.Request, asked: dict[str, Any]) -> web.StreamResponse:
        if self.refusals:
            status, text = self.refusals.pop(0)
            self.at_refusal.append(self.running)
            await asyncio.sleep(self.refusal_s)
            return web.Response(status=status, text=text)
        if request.path == "/v1/models":
            return web.json_response(
                {"object": "list", "data": [{"id": n, "object": "model"} for n in MODELS]}
            )
        act = asked.get("act", "chat")
        if act == "hold":
            while not self.release.is_set():
                await asyncio.sleep(0.005)
        if act == "wait":
            await asyncio.sleep(3600)
        if act in {"chat", "hold"}:
            return await _chat(request, asked)
        if act == "length_cut":
            kind = asked.get("content_type", "text/plain")
            response = web.StreamResponse(headers={"Content-Length": "1000", "Content-Type": kind})
        else:
            kind = asked.get("content_type", "text/event-stream")
            response = web.StreamResponse(headers={"Content-Type": kind})
        await response.prepare(request)
        for chunk in asked.get("chunks", []):
            await response.write(bytes.fromhex(chunk))
            await asyncio.sleep(asked.get("pause", 0))
        if act == "headers_then_wait":
            await asyncio.sleep(3600)
        if act.endswith("cut"):
            await asyncio.sleep(0.05)
            assert request.transport
            request.transport.abort()
        return response


async def _chat(request: web.Request, asked: dict[str, Any]) -> web.StreamResponse:
    common = {"id": "chatcmpl-1", "created": 1, "model": asked.get("model", MODELS[0])}
    if not asked.get("stream"):
        message = {"role": "assistant", "content": "low tide at six"}
        choice = {"index": 0, "message": message, "finish_reason": "stop", "text": "low tide"}
        kind = "chat.completion" if "chat" in request.path else "text_completion"
        return web.json_response(common | {"object": kind, "choices": [choice]})
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for text, reason in (("low ", None), ("tide at ", None), ("six", "stop")):
        choice = {"index": 0, "delta": {"content": text}, "finish_reason": reason}
        event = common | {"object": "chat.completion.chunk", "choices": [choice]}
        await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        await asyncio.sleep(0.01)
    await response.write(b"data: [DONE]\n\n")
    return response


def digest(key: str) -> dict[str, str]:
    return {"sha256": hashlib.sha256(key.encode()).hexdigest()}


def config_for(upstream: str, **changes: object) -> dict[str, object]:
    """A valid config for a gateway before `upstream`."""
    return {
        "listen": {"host": "127.0.0.1", "port": free_port()},
        "upstreams": [upstream],
        "keys_file": "/nonexistent/keys.json",
        "max_in_flight": 8,
        "max_queued": 256,
        "hold_seconds": PATIENCE_S,
        "models": MODELS,
        "max_body_bytes": 64 << 20,
        "max_buffered_bytes": 128 << 20,
        "connect_timeout_seconds": 2,
        "deployment": "0123456789abcdef",
    } | changes


def install(folder: Path) -> Path:
    """Lay the gateway out as on a host; returns the launcher."""
    (folder / "bin").mkdir()
    place = folder / "fable-gateway"
    place.mkdir()
    (place / "app").symlink_to(ROOT / "files/gateway")
    (place / "tools").symlink_to(ROOT / "files/hostlib")
    (place / "venv").symlink_to(sys.prefix)
    launcher = folder / "bin/fable_gateway.py"
    launcher.write_bytes((ROOT / "files/gateway/bin/fable_gateway.py").read_bytes())
    return launcher


class Gateway:
    """A gateway process and its journal."""

    def __init__(self, folder: Path, config: dict[str, Any], env: dict[str, str]) -> None:
        self.keys_file = folder / "keys.json"
        self.keys = config.pop("keys", {"alice": digest(KEY)})
        self.keys_file.write_text(json.dumps(self.keys))
        self.config = config | {"keys_file": str(self.keys_file)}
        self.file = folder / "config.json"
        self.file.write_text(json.dumps(self.config))
        self.port = int(config["listen"]["port"])
        self.lines: list[dict[str, Any]] = []
        self.text = ""
        self._news = threading.Condition()
        self.process = subprocess.Popen(
            [sys.executable, install(folder), "serve", "--config", self.file],
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | env,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.wait_for(lambda line: line["event"] == "listening")

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def wait_for(self, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """The first line of the journal that is `wanted`."""
        with self._news:
            arrived = self._news.wait_for(
                lambda: any(map(wanted, self.lines)) or self.process.poll() is not None, PATIENCE_S
            )
            assert arrived, f"not in the journal: {self.text}"
            return next(line for line in self.lines if wanted(line))

    def reload(self, content: str, *, hup: bool = True) -> dict[str, Any]:
        """Replace the key file, send SIGHUP, return the line that the gateway writes about it."""
        before = len(self._reloads())
        beside = self.keys_file.with_name("beside")
        beside.write_text(content)
        beside.replace(self.keys_file)
        if hup:
            self.process.send_signal(signal.SIGHUP)
        self.wait_for(lambda _line: len(self._reloads()) > before)
        return self._reloads()[-1]

    def _reloads(self) -> list[dict[str, Any]]:
        return [line for line in self.lines if line["event"] == "reload"]

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)

    def ask(
        self,
        body: dict[str, Any] | None = None,
        *,
        method: str = "POST",
        path: str = "/v1/chat/completions",
        headers: dict[str, str] | None = None,
    ) -> tuple[int, dict[str, str], bytes]:
        """One request on its own connection: status, headers with lower-case names, body."""
        connection = self.connect()
        try:
            connection.request(
                method,
                path,
                json.dumps(body or {}) if method == "POST" else None,
                {"Authorization": f"Bearer {KEY}"} if headers is None else headers,
            )
            response = connection.getresponse()
            found = {name.lower(): value for name, value in response.getheaders()}
            return response.status, found, response.read()
        finally:
            connection.close()

    def open_raw(self, body: dict[str, Any], version: str = "1.1", **more: str) -> socket.socket:
        """A chat request sent on a plain socket, its answer unread."""
        content = json.dumps(body).encode()
        headers = (
            {"Host": "gateway", "Authorization": f"Bearer {KEY}"}
            | {"Content-Length": str(len(content))}
            | more
        )
        lines = [f"POST /v1/chat/completions HTTP/{version}"]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        connection = socket.create_connection(("127.0.0.1", self.port), PATIENCE_S)
        connection.sendall("\r\n".join([*lines, "", ""]).encode() + content)
        return connection

    def stop(self) -> int:
        """End the process with SIGTERM; its exit code."""
        if self.process.poll() is None:
            self.process.terminate()
        code = self.process.wait(PATIENCE_S)
        self._reader.join(PATIENCE_S)
        return code

    def _read(self) -> None:
        assert self.process.stderr
        with self.process.stderr as stream:
            for line in stream:
                with self._news:
                    self.text += line
                    self.lines.append(json.loads(line))
                    self._news.notify_all()
        with self._news:
            self._news.notify_all()


@contextlib.contextmanager
def gateway_before(
    upstream: str, folder: Path, env: dict[str, str] | None = None, **changes: object
) -> Iterator[Gateway]:
    """A gateway process before `upstream`, installed in a new folder below `folder`."""
    home = folder / f"home-{time.monotonic_ns()}"
    home.mkdir()
    gateway = Gateway(home, config_for(upstream, **changes), env or {})
    try:
        yield gateway
    finally:
        if gateway.process.poll() is None:
            gateway.stop()


def client(gateway: Gateway, key: str = KEY) -> openai.OpenAI:
    """The official client before `gateway`."""
    return openai.OpenAI(base_url=f"{gateway.url}/v1", api_key=key, max_retries=0)


@contextlib.contextmanager
def engine() -> Iterator[Engine]:
    """An engine for one block."""
    invented = Engine()
    try:
        yield invented
    finally:
        invented.close()
