"""The HTTP surface: aiohttp over the simulated engine, with vLLM's manners.

Where the engine goes away while streams are open, so do its manners: with a shutdown timeout of 0
the engine is gone at once and open streams stay silent until the client leaves; with N seconds
they finish, /health stays 200 and new requests get 500; after N the rest is treated as with 0.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

from aiohttp import web

from engine_standin import bootlog, metrics
from engine_standin.processes import Boot, Core
from engine_standin.requests import Job, Refused, make_job, parse_body
from engine_standin.simulation import Counters, Engine
from engine_standin.text import Piece

KEEP_ALIVE_SECONDS = 5.0
DEAD_SECONDS = 3.0  # how long a server without an engine answers 503 before it exits
LOG_SECONDS = 10.0  # between two lines on speculation
MAX_BODY = 64 << 20  # bytes
ROLE = "APIServer"
Json = dict[str, Any]
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class EngineDead(Exception):
    """The engine core is gone while a request was in flight."""


ENGINE_ERROR = Refused(500, "InternalServerError", "EngineCore encountered an issue.")
STOPPING_ERROR = Refused(500, "InternalServerError", "cannot schedule new futures after shutdown")


class Server:
    """One API server over one engine core."""

    def __init__(self, boot: Boot, core: Core, engine: Engine) -> None:
        self.boot = boot
        self.core = core
        self.engine = engine
        self.stopping = False
        self.dead = False
        self.first_use = True
        self.handlers = 0
        self.finished = {"stop": 0, "length": 0, "abort": 0}
        self.histograms = {name: metrics.Histogram() for name in metrics.HISTOGRAMS}
        self._streams: dict[str, asyncio.Queue[int]] = {}
        self._work = asyncio.Event()
        self._idle = asyncio.Event()
        self.created = int(time.time())

    # The engine's loop and its requests

    async def run_engine(self) -> None:
        """Step the engine in (scaled) real time and hand new tokens to the requests.

        Steps end at points on one time line, so that a late wake-up does not add up.
        """
        clock = logged = time.monotonic()
        before = Counters(accepted_per_position=[0] * self.engine.k)
        while True:
            step = self.engine.step()
            if step is None:
                self._work.clear()
                await self._work.wait()
                clock = time.monotonic()
                continue
            if self.first_use:
                self._first_use()
            clock += step.seconds * self.boot.scale
            await asyncio.sleep(max(0.0, clock - time.monotonic()))
            for name, tokens in step.emitted.items():
                if name in self._streams:
                    self._streams[name].put_nowait(tokens)
            if clock - logged >= LOG_SECONDS * self.boot.scale:
                before, logged = self._log_acceptance(before), clock

    def _first_use(self) -> None:
        self.first_use = False
        if "die-in-warmup" in self.boot.faults:
            os.kill(self.core.pid, signal.SIGKILL)
        for rank, pid in enumerate(self.core.workers):
            lines = bootlog.first_use_lines(self.boot.arguments, os.environ, self.boot.faults)
            for line in lines:
                bootlog.emit(f"Worker_TP{rank}", pid, line)

    def _log_acceptance(self, before: Counters) -> Counters:
        now = self.engine.counters
        fresh = Counters(
            drafts=now.drafts - before.drafts,
            draft_tokens=now.draft_tokens - before.draft_tokens,
            accepted_tokens=now.accepted_tokens - before.accepted_tokens,
            accepted_per_position=[
                a - b
                for a, b in zip(
                    now.accepted_per_position, before.accepted_per_position, strict=True
                )
            ],
        )
        if fresh.drafts:
            bootlog.emit(ROLE, os.getpid(), bootlog.acceptance_line(fresh))
        return replace(now, accepted_per_position=list(now.accepted_per_position))

    def engine_lost(self) -> None:
        """The core is gone: every request in flight ends with an error."""
        self.dead = True
        for stream in self._streams.values():
            stream.put_nowait(0)

    async def _pieces(self, name: str, job: Job) -> AsyncIterator[Sequence[Piece]]:
        """The answer in the slices in which the engine yields it.

        Raises:
            EngineDead: the engine went away in between.
        """
        pieces = job.answer.pieces
        stream = self._streams[name] = asyncio.Queue()
        self.engine.submit(name, job.prompt_tokens, len(pieces), job.domain)
        self._work.set()
        started = last = time.monotonic()
        done = 0
        try:
            while done < len(pieces):
                tokens = await stream.get()
                if self.dead:
                    raise EngineDead
                now = time.monotonic()
                self._observe(done, now, started, last)
                last = now
                yield pieces[done : done + tokens]
                done += tokens
        finally:
            del self._streams[name]
            self.engine.abort(name)
            self.finished[job.answer.finish if done == len(pieces) else "abort"] += 1
        self.histograms["vllm:e2e_request_latency_seconds"].observe(time.monotonic() - started)

    def _observe(self, done: int, now: float, started: float, last: float) -> None:
        if done:
            self.histograms["vllm:inter_token_latency_seconds"].observe(now - last)
        else:
            self.histograms["vllm:time_to_first_token_seconds"].observe(now - started)

    # Generation

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/chat/completions"""
        return await self._generate(request, chat=True)

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/completions"""
        return await self._generate(request, chat=False)

    async def _generate(self, request: web.Request, *, chat: bool) -> web.StreamResponse:
        arguments = self.boot.arguments
        body = parse_body(await request.read())
        job = make_job(body, arguments, chat=chat)
        if self.dead:
            raise ENGINE_ERROR
        if self.stopping:
            raise STOPPING_ERROR
        prefix = "chatcmpl" if chat else "cmpl"
        name = f"{prefix}-{request.headers.get('X-Request-Id') or uuid.uuid4().hex}"
        envelope = {
            "id": name,
            "object": "chat.completion" if chat else "text_completion",
            "created": int(time.time()),
            "model": arguments.served_names[0],
        }
        internal = f"{name}-{uuid.uuid4().hex[:8]}"  # clients may repeat their ids
        self.handlers += 1
        try:
            if chat and "fail-gate-1" in self.boot.faults:
                await self._unary(internal, job, envelope)  # the other gates' lines are printed
                raise Refused(500, "InternalServerError", "fault asked for: fail-gate-1")
            if job.stream:
                return await self._stream(request, internal, job, envelope)
            return await self._unary(internal, job, envelope)
        finally:
            self.handlers -= 1
            self._idle.set()

    async def _unary(self, name: str, job: Job, envelope: Json) -> web.Response:
        try:
            pieces = [piece async for part in self._pieces(name, job) for piece in part]
        except EngineDead:
            raise ENGINE_ERROR from None
        call = job.answer.call
        choice: Json = {"index": 0, "logprobs": None, "finish_reason": job.answer.finish}
        if job.chat:
            message: Json = {
                "role": "assistant",
                "content": _text(pieces, "content") or None,
                "reasoning": _text(pieces, "reasoning") or None,
                "tool_calls": [],
            }
            if call:
                message["tool_calls"] = [_tool_call(*call)]
                choice["finish_reason"] = "tool_calls"
            choice["message"] = message
        else:
            choice["text"] = _text(pieces, "content")
        return web.json_response(
            {**envelope, "choices": [choice], "usage": _usage(job, len(pieces))}
        )

    async def _stream(
        self, request: web.Request, name: str, job: Job, envelope: Json
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)  # 200 and headers at once, also for a queued request
        if job.chat:
            envelope["object"] = "chat.completion.chunk"
        done = 0

        async def send(payload: Json) -> None:
            text = json.dumps(payload, ensure_ascii=False, separators=(",", ":"))
            await response.write(f"data: {text}\n\n".encode())

        async def send_choice(finish: str | None = None, **content: Any) -> None:
            choice: Json = {"index": 0, **content, "logprobs": None, "finish_reason": finish}
            chunk: Json = {**envelope, "choices": [choice]}
            if job.continuous_usage:
                chunk["usage"] = _usage(job, done)
            await send(chunk)

        try:
            async for pieces in self._pieces(name, job):
                if job.chat and not done:
                    await send_choice(delta={"role": "assistant", "content": ""})
                before, done = done, done + len(pieces)
                finish = job.answer.finish if done == len(job.answer.pieces) else None
                if job.chat:
                    for delta in _deltas(job, before, done):
                        await send_choice(delta=delta)
                    if finish:
                        await send_choice("tool_calls" if job.answer.call else finish, delta={})
                else:
                    await send_choice(finish, text=_text(pieces, "content"))
            if job.include_usage:
                await send({**envelope, "choices": [], "usage": _usage(job, done)})
        except EngineDead:
            await send(ENGINE_ERROR.body)
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    # The rest

    async def health(self, _request: web.Request) -> web.Response:
        """GET /health: 200, or 503 when the engine is dead."""
        return web.Response(status=503 if self.dead else 200)

    async def models(self, _request: web.Request) -> web.Response:
        """GET /v1/models: every served name."""
        arguments = self.boot.arguments
        cards = [
            {
                "id": name,
                "object": "model",
                "created": self.created,
                "owned_by": "vllm",
                "root": arguments.model,
                "parent": None,
                "max_model_len": arguments.max_model_len,
            }
            for name in arguments.served_names
        ]
        return web.json_response({"object": "list", "data": cards})

    async def metrics(self, _request: web.Request) -> web.Response:
        """GET /metrics in Prometheus text format."""
        arguments, timing = self.boot.arguments, self.boot.timing
        pool = timing.pool(arguments.gpu_memory_utilization, arguments.max_num_batched_tokens)
        page = metrics.Page(
            model_name=arguments.served_names[0],
            counters=self.engine.counters,
            running=len(self.engine.running),
            waiting=len(self.engine.waiting),
            cache_usage=min(1.0, self.engine.tokens_held() / pool),
            pool_tokens=pool,
            utilization=arguments.gpu_memory_utilization,
            finished=self.finished,
            histograms=self.histograms,
        )
        return web.Response(text=metrics.render(page), content_type="text/plain")

    def application(self) -> web.Application:
        """The aiohttp application."""
        app = web.Application(middlewares=[_errors], client_max_size=MAX_BODY)
        app.router.add_get("/health", self.health)
        app.router.add_get("/metrics", self.metrics)
        app.router.add_get("/v1/models", self.models)
        app.router.add_post("/v1/completions", self.completions)
        app.router.add_post("/v1/chat/completions", self.chat)
        return app

    async def drained(self) -> None:
        """Return when no request is in flight."""
        while self.handlers:
            self._idle.clear()
            await self._idle.wait()


def _text(pieces: Sequence[Piece], channel: str) -> str:
    return "".join(text for kind, text in pieces if kind == channel)


def _usage(job: Job, done: int) -> Json:
    return {
        "prompt_tokens": job.prompt_tokens,
        "total_tokens": job.prompt_tokens + done,
        "completion_tokens": done,
    }


def _tool_call(name: str, arguments: str) -> Json:
    return {
        "id": f"call_{uuid.uuid4().hex[:24]}",
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def _deltas(job: Job, start: int, end: int) -> list[Json]:
    """What the pieces from `start` to `end` add to a streamed chat answer."""
    pieces = job.answer.pieces
    part = {key: _text(pieces[start:end], key) for key in ("reasoning", "content")}
    deltas: list[Json] = [{key: value for key, value in part.items() if value}]
    if job.answer.call:
        name, arguments = job.answer.call
        places = [place for place, piece in enumerate(pieces) if piece[0] == "tool"]
        if start <= places[0] < end:
            deltas.append({"tool_calls": [{"index": 0, **_tool_call(name, "")}]})
        if start <= places[-1] < end:
            middle = len(arguments) // 2
            deltas += [
                {"tool_calls": [{"index": 0, "function": {"arguments": half}}]}
                for half in (arguments[:middle], arguments[middle:])
            ]
    return [delta for delta in deltas if delta]


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Errors in vLLM's shapes."""
    try:
        return await handler(request)
    except Refused as refused:
        return web.json_response(refused.body, status=refused.status)
    except web.HTTPException as error:
        return web.json_response({"detail": error.reason}, status=error.status)


async def serve(boot: Boot, core: Core, engine: Engine, listener: socket.socket) -> None:
    """Serve on a bound socket until SIGTERM or SIGINT, or until the engine is dead."""
    loop = asyncio.get_running_loop()
    server = Server(boot, core, engine)
    stop, lost = asyncio.Event(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        ignore = "hang-on-sigterm" in boot.faults
        loop.add_signal_handler(number, (lambda: None) if ignore else stop.set)

    def core_gone() -> None:
        loop.remove_reader(core.pipe)
        if not server.stopping:
            server.engine_lost()
            lost.set()

    loop.add_reader(core.pipe, core_gone)
    runner = web.AppRunner(
        server.application(),
        access_log=None,
        handler_cancellation=True,
        keepalive_timeout=KEEP_ALIVE_SECONDS,
        shutdown_timeout=0.0,
    )
    await runner.setup()
    site = web.SockSite(runner, listener, backlog=2048)
    steps = asyncio.create_task(server.run_engine())
    if "never-listen" not in boot.faults:
        await site.start()
        bootlog.emit(ROLE, os.getpid(), ("api_server.py:1419", "Application startup complete."))
    ends = [asyncio.create_task(event.wait()) for event in (stop, lost)]
    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    if lost.is_set():
        message = ("async_llm.py:720", "AsyncLLM output_handler failed: the engine core died")
        bootlog.emit(ROLE, os.getpid(), message, "ERROR")
        await asyncio.sleep(DEAD_SECONDS * boot.scale)
    else:
        server.stopping = True
        with contextlib.suppress(TimeoutError, asyncio.TimeoutError):
            await asyncio.wait_for(server.drained(), boot.arguments.shutdown_timeout)
        steps.cancel()
        await asyncio.to_thread(core.stop)
        if "never-listen" not in boot.faults:
            await site.stop()
        await server.drained()
    steps.cancel()
    await runner.cleanup()
