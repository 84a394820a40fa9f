"""What the engine's HTTP server answers."""

from __future__ import annotations

import http.client
import json
import re
from dataclasses import dataclass
from typing import Any

from enginectl.release import Listen
from enginectl.timing import CHAT_SECONDS

PROBE_SECONDS = 5.0
LIMIT_BYTES = 4 << 20
# One line of each an engine, as vLLM's metrics name them.
_REQUESTS = re.compile(r"^vllm:num_requests_(?:running|waiting)\{.*\} ([0-9.e+]+)$", re.M)


@dataclass(frozen=True)
class Chat:
    """The outcome of one chat request; `tokens` is usage.completion_tokens."""

    succeeded: bool
    tokens: int
    detail: str


def healthy(listen: Listen) -> bool:
    """Whether /health answers 200."""
    try:
        return _request(listen, "GET", "/health")[0] == http.client.OK
    except (OSError, http.client.HTTPException):
        return False


def served_names(listen: Listen) -> tuple[str, ...] | None:
    """The names in /v1/models in the server's order; None if it gives no valid answer."""
    try:
        status, body = _request(listen, "GET", "/v1/models")
        if status != http.client.OK:
            return None
        return tuple(str(entry["id"]) for entry in json.loads(body)["data"])
    except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError):
        return None


def requests(listen: Listen) -> int | None:
    """Requests that run or wait, by /metrics; None if it gives no valid answer."""
    try:
        status, body = _request(listen, "GET", "/metrics")
    except (OSError, http.client.HTTPException):
        return None
    found = _REQUESTS.findall(body.decode("utf-8", "replace"))
    return int(sum(map(float, found))) if status == http.client.OK and found else None


def chat(listen: Listen, model: str) -> Chat:
    """One short chat request; it succeeds with string content and completion tokens counted."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": "Count from one to twenty in words."}],
        "max_tokens": 48,
        "temperature": 0,
        # thinking may use all of max_tokens and leave no content
        "chat_template_kwargs": {"enable_thinking": False},
    }
    try:
        status, answer = _request(listen, "POST", "/v1/chat/completions", body, CHAT_SECONDS)
    except (OSError, http.client.HTTPException) as error:
        return Chat(False, 0, f"no answer to a chat request: {error or type(error).__name__}")
    return judge_chat(status, answer)


def judge_chat(status: int, body: bytes) -> Chat:
    """Judge the answer to a chat request."""
    if status != http.client.OK:
        return Chat(False, 0, f"HTTP {status}: {body[:200].decode('utf-8', 'replace')}")
    try:
        answer = json.loads(body)
        content = answer["choices"][0]["message"]["content"]
        tokens = answer["usage"]["completion_tokens"]
    except (ValueError, KeyError, IndexError, TypeError):
        return Chat(False, 0, f"not a chat completion: {body[:200].decode('utf-8', 'replace')}")
    if type(content) is not str or type(tokens) is not int or tokens <= 0:
        return Chat(False, 0, f"content {content!r:.60}, completion_tokens {tokens!r}")
    return Chat(True, tokens, f"content {content!r:.60}, completion_tokens {tokens}")


def _request(
    listen: Listen,
    method: str,
    path: str,
    body: dict[str, Any] | None = None,
    seconds: float = PROBE_SECONDS,
) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(listen.connect_host, listen.port, timeout=seconds)
    try:
        content = None if body is None else json.dumps(body).encode()
        headers = {} if body is None else {"Content-Type": "application/json"}
        connection.request(method, path, body=content, headers=headers)
        response = connection.getresponse()
        return response.status, response.read(LIMIT_BYTES)
    finally:
        connection.close()
