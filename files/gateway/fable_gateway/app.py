"""The handlers: who asks, how large, when, and then through to the engine."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from urllib.parse import unquote

from aiohttp import web

from fable_gateway import errors, headers, log
from fable_gateway.config import Config
from fable_gateway.limits import Gauge
from fable_gateway.relay import relay
from fable_gateway.request import Asked, understand
from fable_gateway.upstream import Call, EngineAway, EngineFailed, Upstream

BODY_S = 300.0
# After SIGTERM; the unit's TimeoutStopSec is longer.
DRAIN_S = 60.0
CLIENT_GONE = 499
REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")


@dataclass
class _Record:
    """What the journal learns of one request."""

    id: str
    method: str
    path: str
    key: str | None = None
    status: int = 0
    error: str | None = None
    start: float = field(default_factory=time.monotonic)

    def write(self) -> None:
        duration_ms = round((time.monotonic() - self.start) * 1000, 1)
        log.write(
            "request",
            id=self.id,
            key=self.key,
            method=self.method,
            path=self.path[:200],
            status=self.status,
            duration_ms=duration_ms,
            error=self.error,
        )


class Gateway:
    """The handlers and what they share. `keys` may be replaced while it runs."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.keys = config.keys
        self.gauge = Gauge(config.max_in_flight)
        self.active = 0
        self._upstream: Upstream | None = None

    def app(self) -> web.Application:
        """The aiohttp application; connections to the engine live as long as it runs."""
        app = web.Application(client_max_size=self.config.max_body_bytes)
        app.router.add_get("/health", self.health)
        app.router.add_get("/ready", self.ready)
        app.router.add_route("*", "/v1/{rest:.*}", self.v1)
        app.router.add_route("*", "/{rest:.*}", self.elsewhere)
        app.cleanup_ctx.append(self._connections)
        app.on_shutdown.append(self._drain)
        return app

    async def health(self, _request: web.Request) -> web.Response:
        """200 as long as the gateway works; says which deployment it runs and how the engine is."""
        engine = "ok" if await self.upstream.healthy() else "away"
        return web.json_response(
            {"gateway": "ok", "engine": engine, "deployment": self.config.deployment}
        )

    async def ready(self, _request: web.Request) -> web.Response:
        """200 once the engine serves every configured model name, else 503 with what is missing."""
        served = await self.upstream.served_models()
        missing = [name for name in self.config.models if name not in served]
        body = {"ready": not missing, "missing_models": missing}
        return web.json_response(body, status=503 if missing else 200)

    async def elsewhere(self, request: web.Request) -> web.Response:
        """404 in the OpenAI shape: of the engine only /v1 is open to users."""
        return errors.not_found(request.path)

    async def v1(self, request: web.Request) -> web.StreamResponse:
        """Everything below /v1: count it, serve it, write its line."""
        request_id = self._request_id(request)
        record = _Record(request_id, request.method, request.path)
        self.active += 1
        try:
            response = await self._serve(request, record)
            record.status = response.status
        except asyncio.CancelledError:
            record.status = CLIENT_GONE
            raise
        finally:
            self.active -= 1
            record.write()
        return response

    def _request_id(self, request: web.Request) -> str:
        """The client's own id if it is a plain one (and no key: it goes into the log), or ours."""
        asked = request.headers.get("X-Request-Id", "")
        plain = REQUEST_ID.fullmatch(asked) and not self.keys.name_of(asked)
        return asked if plain else uuid.uuid4().hex

    @property
    def upstream(self) -> Upstream:
        """The connections to the engine, once the application runs."""
        assert self._upstream is not None
        return self._upstream

    async def _serve(self, request: web.Request, record: _Record) -> web.StreamResponse:
        record.key = self.keys.identify(request.headers)
        if record.key is None:
            return errors.unauthorized()
        if _leaves_v1(request.rel_url.raw_path):
            return errors.not_found(request.path)
        if (request.content_length or 0) > self.config.max_body_bytes:
            return errors.too_large(self.config.max_body_bytes)
        try:
            async with asyncio.timeout(BODY_S):
                body = await request.read()
        except web.HTTPRequestEntityTooLarge:
            return errors.too_large(self.config.max_body_bytes)
        except (web.RequestPayloadError, ValueError):
            return errors.bad_request("the request's body cannot be read as its headers say")
        except TimeoutError:
            return errors.body_too_slow(BODY_S)
        asked = understand(body, request.path) if request.method == "POST" else None
        call = Call(
            method=request.method,
            target=request.rel_url.raw_path_qs,
            headers=headers.to_engine(request.headers, record.id),
            body=asked.body if asked else body,
        )
        return await self._ask(request, call, record, asked)

    async def _ask(
        self, request: web.Request, call: Call, record: _Record, asked: Asked | None
    ) -> web.StreamResponse:
        deadline = asyncio.get_running_loop().time() + self.config.hold_seconds
        async with contextlib.AsyncExitStack() as stack:
            if call.method == "POST":
                try:
                    await stack.enter_async_context(self.gauge.slot(deadline))
                except TimeoutError:
                    record.error = "no free slot"
                    return errors.overloaded(self.config.hold_seconds)
            try:
                answer = await self.upstream.open(call, deadline)
            except EngineAway as away:
                record.error = f"engine away: {away}"
                return errors.engine_away(str(away))
            except EngineFailed as failed:
                record.error = f"engine failed: {failed}"
                return errors.engine_failed(str(failed))
            # Closes the connection to the engine unless the answer was read to its end.
            stack.callback(answer.response.close)
            try:
                relayed = await relay(request, answer, record.id, asked)
            except ConnectionError:
                # As when aiohttp notices it first.
                raise asyncio.CancelledError from None
        record.error = relayed.error
        return relayed.response

    async def _connections(self, _app: web.Application) -> AsyncIterator[None]:
        self._upstream = Upstream(self.config.upstream, self.config.connect_timeout_seconds)
        yield
        await self._upstream.close()

    async def _drain(self, _app: web.Application) -> None:
        """After the listening socket is closed: let what runs finish, up to the deadline."""
        deadline = time.monotonic() + DRAIN_S
        while self.active and time.monotonic() < deadline:
            await asyncio.sleep(0.05)


def _leaves_v1(raw_path: str) -> bool:
    """Whether the engine could read this path as one outside /v1."""
    return any(part in {".", ".."} for part in unquote(raw_path).split("/"))
