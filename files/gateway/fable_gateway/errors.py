"""Errors: one line for the operator, the OpenAI error shape for the client."""

from __future__ import annotations

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


def not_found(path: str) -> web.Response:
    """404 for what the gateway does not serve."""
    message = f"Nothing is served at {path}; the API is below /v1."
    return _refusal(404, message, "invalid_request_error", "not_found")


def too_large(limit_bytes: int) -> web.Response:
    """413 for a body above the limit."""
    message = f"The request body is larger than {limit_bytes} bytes."
    return _refusal(413, message, "invalid_request_error", "request_too_large")


def body_too_slow(seconds: float) -> web.Response:
    """408 for a body that did not arrive in time."""
    message = f"The request body did not arrive within {seconds:g} s."
    return _refusal(408, message, "invalid_request_error", "request_timeout")


def overloaded(hold_seconds: float) -> web.Response:
    """503 for a request that got no slot in time."""
    message = f"All slots were taken for {hold_seconds:g} s. Try again later."
    headers = {"Retry-After": str(RETRY_AFTER_S)}
    return _refusal(503, message, "server_error", "overloaded", **headers)


def engine_away(reason: str) -> web.Response:
    """503 for an engine that did not come back in time."""
    message = f"The engine is away ({reason}). Try again later."
    headers = {"Retry-After": str(RETRY_AFTER_S)}
    return _refusal(503, message, "server_error", "engine_away", **headers)


def engine_failed(reason: str) -> web.Response:
    """502 for an engine that took the request and gave no answer."""
    message = f"The engine gave no answer ({reason})."
    return _refusal(502, message, "server_error", "engine_failed")
