"""Errors: one line for the operator, the OpenAI error shape for the client."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable

from aiohttp import web

EXIT_OK = 0
EXIT_REFUSED = 1
EXIT_UNABLE = 2
EXIT_INTERRUPTED = 130

RETRY_AFTER_S = 10


class GatewayError(Exception):
    """Something an operator can cause or cure: one line, and the exit code that goes with it."""

    def __init__(self, message: str, exit_code: int = EXIT_REFUSED) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def run_main(main: Callable[[], int]) -> int:
    """Run `main`; turn operators' errors and Ctrl-C into one line and an exit code."""
    try:
        return main()
    except GatewayError as error:
        print(f"fable_gateway: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_REFUSED


def error_body(message: str, kind: str, code: str) -> dict[str, object]:
    """The OpenAI error shape."""
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def _refusal(status: int, message: str, kind: str, code: str, **headers: str) -> web.Response:
    return web.json_response(error_body(message, kind, code), status=status, headers=headers)


def bad_request(message: str) -> web.Response:
    """400 for a request that cannot be understood."""
    return _refusal(400, message, "invalid_request_error", "bad_request")


def unauthorized() -> web.Response:
    """401; a missing, an unknown and a revoked key look the same."""
    message = "Missing or incorrect API key. Send it as 'Authorization: Bearer KEY'."
    headers = {"WWW-Authenticate": "Bearer"}
    return _refusal(401, message, "invalid_request_error", "invalid_api_key", **headers)


def model_not_allowed(model: str | None) -> web.Response:
    """403 for a model that is not the key's, or that cannot be told from the body."""
    asked = "names no model that can be told" if model is None else f"asks for {model[:100]!r}"
    message = f"This API key is for certain models only, and the request {asked}."
    return _refusal(403, message, "invalid_request_error", "model_not_allowed")


def malformed() -> web.Response:
    """400 for bytes that are no proper HTTP request; they are not quoted: there may be a key."""
    return bad_request("This is no HTTP request that can be understood.")


def internal() -> web.Response:
    """500 for a fault of the gateway's own; the journal has its place."""
    return _refusal(500, "The gateway failed.", "server_error", "internal_error")


def not_found(path: str) -> web.Response:
    """404 for what the gateway does not serve."""
    message = f"Nothing is served at {path}; the API is below /v1."
    return _refusal(404, message, "invalid_request_error", "not_found")


def too_large(limit_bytes: int) -> web.Response:
    """413 for a body above the limit."""
    message = f"The request body is larger than {limit_bytes} bytes."
    return _refusal(413, message, "invalid_request_error", "request_too_large")


def body_too_slow() -> web.Response:
    """408 for a body that did not arrive in time."""
    message = "The request body did not arrive in time."
    return _refusal(408, message, "invalid_request_error", "request_timeout")


def bodies_full() -> web.Response:
    """503 for a body for which there is no memory beside the others."""
    message = "Too many large requests are being received. Try again later."
    return _later(503, message, "server_error", "overloaded")


def rate_limited(per_minute: int, wait_seconds: float) -> web.Response:
    """429 for a key that asks too often."""
    message = f"This API key may make {per_minute} requests a minute."
    return _later(429, message, "requests", "rate_limit_exceeded", wait_seconds)


def queue_full() -> web.Response:
    """429 for a request that may not even wait."""
    message = "Too many requests are waiting already. Try again later."
    return _later(429, message, "requests", "queue_full")


def overloaded(hold_seconds: float) -> web.Response:
    """503 for a request that got no slot in time."""
    message = f"All slots were taken for {hold_seconds:g} s. Try again later."
    return _later(503, message, "server_error", "overloaded")


def engine_away(reason: str, retry_after: int | None = None) -> web.Response:
    """503 for an engine that did not come back in time."""
    message = f"The engine is away ({reason}). Try again later."
    return _later(503, message, "server_error", "engine_away", retry_after)


def _later(
    status: int, message: str, kind: str, code: str, wait_seconds: float | None = None
) -> web.Response:
    seconds = RETRY_AFTER_S if wait_seconds is None else max(1, math.ceil(wait_seconds))
    return _refusal(status, message, kind, code, **{"Retry-After": str(seconds)})


def engine_failed(reason: str) -> web.Response:
    """502 for an engine that took the request and gave no answer."""
    message = f"The engine gave no answer ({reason})."
    return _refusal(502, message, "server_error", "engine_failed")
