"""The handlers: who asks, how often, how large, when, and then through to the engine."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import datetime
import ipaddress
import re
import time
import uuid
from collections.abc import AsyncIterator, Callable
from urllib.parse import unquote

from aiohttp import web

from fable_gateway import body, errors, headers
from fable_gateway.accounting import Record
from fable_gateway.config import Config
from fable_gateway.keys import Key, KeyRing
from fable_gateway.limits import Budget, Gauge, QueueFull, Rates
from fable_gateway.metrics import CONTENT_TYPE, Metrics
from fable_gateway.relay import relay
from fable_gateway.request import Asked, certain_model, understand
from fable_gateway.upstream import Call, EngineAway, EngineFailed, Upstream

CLIENT_GONE = 499
REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
# These read; everything else makes the engine work and needs a slot.
WITHOUT_SLOT = frozenset({"GET", "HEAD", "OPTIONS"})


class Gateway:
    """The handlers and what they share. `keys` may be replaced while it runs."""

    def __init__(self, config: Config, keys: KeyRing) -> None:
        self.config = config
        self.keys = keys
        self.gauge = Gauge(config.max_in_flight, config.max_queued)
        self.rates = Rates()
        self.budget = Budget(config.max_buffered_bytes)
        self.active = 0
        self.draining = False
        self.metrics = Metrics(
            {
                "in_flight": ("Requests inside the engine", lambda: self.gauge.in_flight),
                "in_flight_limit": ("The cap on them", lambda: self.gauge.limit),
                "queued": ("Requests that wait for a slot", lambda: self.gauge.waiting),
                "active": ("Requests that have begun and not ended", lambda: self.active),
                "body_bytes_free": ("Memory left for large bodies", lambda: self.budget.free),
                "keys": ("Keys that are known", lambda: len(self.keys.keys)),
                "engine_away": ("1 while requests wait for the engine", self._engine_away),
            }
        )
        self._upstream: Upstream | None = None

    def app(self) -> web.Application:
        """The aiohttp application; connections to the engine live as long as it runs."""
        app = web.Application()
        app.router.add_get("/health", self.health)
        app.router.add_get("/ready", self.ready)
        app.router.add_get("/metrics", self.show_metrics)
        app.router.add_route("*", "/v1/{rest:.*}", self.v1, expect_handler=body.expected)
        app.router.add_route("*", "/{rest:.*}", self.elsewhere, expect_handler=body.expected)
        app.cleanup_ctx.append(self._connections)
        app.on_response_prepare.append(self._last_of_its_connection)
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
        is_ready = not missing and not self.draining
        content = {"ready": is_ready, "draining": self.draining, "missing_models": missing}
        return web.json_response(content, status=200 if is_ready else 503)

    async def show_metrics(self, request: web.Request) -> web.Response:
        """For the host itself, and for whoever has a key: it names the keys."""
        local = ipaddress.ip_address(request.remote or "0.0.0.0").is_loopback  # noqa: S104
        if not local and self._key(request) is None:
            return errors.unauthorized()
        return web.Response(body=self.metrics.text(), headers={"Content-Type": CONTENT_TYPE})

    async def elsewhere(self, request: web.Request) -> web.Response:
        """404 in the OpenAI shape: of the engine only /v1 is open to users."""
        return errors.not_found(request.path)

    async def v1(self, request: web.Request) -> web.StreamResponse:
        """Everything below /v1: count it, serve it, write its line."""
        record = Record(self._request_id(request), request.method, request.path)
        self.active += 1
        try:
            response = await self._admit(request, record)
            record.status = response.status
        except asyncio.CancelledError:
            record.status = CLIENT_GONE
            raise
        except body.Refused as refused:
            record.status = refused.response.status
            return refused.response
        except Exception:
            record.status = 500
            raise
        finally:
            self.active -= 1
            record.close()
            record.write()
            self.metrics.count(record)
        return response

    @property
    def upstream(self) -> Upstream:
        """The connections to the engine, once the application runs."""
        assert self._upstream is not None
        return self._upstream

    async def _admit(self, request: web.Request, record: Record) -> web.StreamResponse:
        """Everything that can be said before the engine is asked."""
        key = self._key(request)
        if key is None:
            return errors.unauthorized()
        record.key = key.name
        if _leaves_v1(request.rel_url.raw_path):
            return errors.not_found(request.path)
        now = asyncio.get_running_loop().time()
        if key.requests_per_minute is not None:
            wait_s = self.rates.wait_seconds(key.name, key.requests_per_minute, now)
            if wait_s > 0:
                return errors.rate_limited(key.requests_per_minute, wait_s)
        deadline = now + self.config.hold_seconds
        with self.budget.share() as share:
            content = await body.read(request, self.config.max_body_bytes, share, deadline)
            if key.models and request.method not in WITHOUT_SLOT:
                model = certain_model(content)
                if model not in key.models:
                    return errors.model_not_allowed(model)
            asked = understand(content, request.path) if request.method == "POST" else None
            call = Call(
                method=request.method,
                target=request.rel_url.raw_path_qs,
                headers=headers.to_engine(request.headers, record.id),
                body=asked.body if asked else content,
            )
            if asked:
                if asked.model is not None:
                    record.model = asked.model if asked.model in self.config.models else "unknown"
                asked = dataclasses.replace(asked, body=b"")
            del content
            return await self._ask(request, call, asked, record, key, deadline, share.release)

    async def _ask(
        self,
        request: web.Request,
        call: Call,
        asked: Asked | None,
        record: Record,
        key: Key,
        deadline: float,
        forget_body: Callable[[], None],
    ) -> web.StreamResponse:
        async with contextlib.AsyncExitStack() as stack:
            if call.method not in WITHOUT_SLOT:
                queued = time.monotonic()
                slot = self.gauge.slot(deadline, key.name, key.max_in_flight)
                try:
                    await stack.enter_async_context(slot)
                except QueueFull:
                    record.error = "queue full"
                    return errors.queue_full()
                except TimeoutError:
                    record.error = "no free slot"
                    return errors.overloaded(self.config.hold_seconds)
                finally:
                    record.queue_s = time.monotonic() - queued
            try:
                answer = await self.upstream.open(call, deadline)
            except EngineAway as away:
                record.error = f"engine away: {away}"
                return errors.engine_away(str(away), away.retry_after)
            except EngineFailed as failed:
                record.error = f"engine failed: {failed}"
                return errors.engine_failed(str(failed))
            finally:
                record.retries = max(0, call.tries - 1)
                call.body = b""
                forget_body()
            # Closes the connection to the engine unless the answer was read to its end.
            stack.callback(answer.response.close)
            try:
                relayed = await relay(request, answer, record.id, asked)
            except ConnectionError:
                # As when aiohttp notices it first.
                raise asyncio.CancelledError from None
            finally:
                record.began(answer.first_byte)
        record.error = relayed.error
        record.answered(relayed.usage, relayed.finish_reason)
        return relayed.response

    def _key(self, request: web.Request) -> Key | None:
        today = datetime.datetime.now(datetime.timezone.utc).date()
        return self.keys.identify(request.headers, today)

    def _request_id(self, request: web.Request) -> str:
        """The client's own id if it is a plain one (and no key: it goes into the log), or ours."""
        named = request.headers.get("X-Request-Id", "")
        plain = REQUEST_ID.fullmatch(named) and not self.keys.find(named)
        return named if plain else uuid.uuid4().hex

    def _engine_away(self) -> float:
        return float(self.upstream.patience.is_away)

    async def _last_of_its_connection(
        self, _request: web.Request, response: web.StreamResponse
    ) -> None:
        """Send clients to the next gateway once this one drains."""
        if self.draining:
            response.headers["Connection"] = "close"
            response.force_close()

    async def _connections(self, _app: web.Application) -> AsyncIterator[None]:
        self._upstream = Upstream(self.config.upstream, self.config.connect_timeout_seconds)
        yield
        await self._upstream.close()


def _leaves_v1(raw_path: str) -> bool:
    """Whether the engine could read this path as one outside /v1."""
    return any(part in {".", ".."} for part in unquote(raw_path).split("/"))
