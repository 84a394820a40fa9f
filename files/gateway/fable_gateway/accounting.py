"""What is known of each request at its end: the journal's line, and the counters' input."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field
from typing import Any

from fable_gateway import log

# What a client put into the path otherwise is not for the journal.
PLAIN_PATH = re.compile(r"/v1(/[a-z_]{1,40}){1,4}")
FINISH_REASONS = frozenset(
    {"stop", "length", "tool_calls", "content_filter", "function_call", "abort"}
)


@dataclass
class Record:
    """One request. Nothing in it comes from a key, a prompt or an answer's text."""

    id: str
    method: str
    path: str
    key: str | None = None
    model: str | None = None
    status: int = 0
    error: str | None = None
    queue_s: float | None = None
    retries: int = 0
    start: float = field(default_factory=time.monotonic)
    duration_s: float = 0.0
    ttft_s: float | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    finish_reason: str | None = None

    def began(self, first_byte: float | None) -> None:
        """Take in when the answer's first byte came, in time.monotonic's seconds."""
        self.ttft_s = None if first_byte is None else first_byte - self.start

    def answered(self, usage: dict[str, Any] | None, finish_reason: str | None) -> None:
        """Take in what the answer says of itself."""
        counts = usage or {}
        self.prompt_tokens = _count(counts.get("prompt_tokens"))
        self.completion_tokens = _count(counts.get("completion_tokens"))
        self.finish_reason = finish_reason if finish_reason in FINISH_REASONS else None

    def close(self) -> None:
        """Stop the clock."""
        self.duration_s = time.monotonic() - self.start

    def write(self) -> None:
        """One line in the journal; durations are in milliseconds."""
        log.write(
            "request",
            id=self.id,
            key=self.key,
            method=self.method,
            path=self.path if PLAIN_PATH.fullmatch(self.path) else "other",
            model=self.model,
            status=self.status,
            queue_ms=_ms(self.queue_s),
            ttft_ms=_ms(self.ttft_s),
            duration_ms=_ms(self.duration_s),
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.completion_tokens,
            finish_reason=self.finish_reason,
            retries=self.retries or None,
            error=self.error,
        )


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 1)


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
