"""What is known of each request at its end: the journal's line, and the counters' input."""

from __future__ import annotations

import json
import re
import time
from dataclasses import dataclass, field

from fable_gateway import log

TAIL_BYTES = 4096
END_OF_EVENT = re.compile(rb"\r?\n\r?\n")
# Inside an answer's text the quotes would be escaped.
USAGE = re.compile(rb'"usage":\s*(\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\})')
FINISH = re.compile(rb'"finish_reason":\s*"(\w{1,32})"')
# What a client put into the path otherwise is not for the journal.
PLAIN_PATH = re.compile(r"/v1(/[a-z_]{1,40}){1,4}")


class Tail:
    """Reads an answer's end as its bytes pass: usage and finish_reason.

    With `strip` it holds back the usage event, for which the client did not ask.
    """

    def __init__(self, strip: bool = False) -> None:
        self.first_byte: float | None = None
        self._strip = strip
        self._pending = b""
        self._tail = b""

    def feed(self, chunk: bytes) -> bytes:
        """The bytes that the client gets now; `b""` ends the answer."""
        if chunk:
            if self.first_byte is None:
                self.first_byte = time.monotonic()
            self._tail = (self._tail + chunk)[-TAIL_BYTES:]
        return self._stripped(chunk) if self._strip else chunk

    def _stripped(self, chunk: bytes) -> bytes:
        held = self._pending + chunk
        if not chunk:
            self._pending = b""
            return held
        end = 0
        for boundary in END_OF_EVENT.finditer(held):
            end = boundary.end()
        events, self._pending = held[:end], held[end:]
        if b'"usage"' not in events:
            return events
        kept, start = b"", 0
        for boundary in END_OF_EVENT.finditer(events):
            event = events[start : boundary.end()]
            kept += b"" if _is_usage_only(event) else event
            start = boundary.end()
        return kept

    def usage(self) -> dict[str, object]:
        """The engine's own count; empty if it gave none."""
        found = USAGE.findall(self._tail)
        try:
            value = json.loads(found[-1]) if found else {}
        except ValueError:
            return {}
        return value if isinstance(value, dict) else {}

    def finish_reason(self) -> str | None:
        """The last one that the engine gave."""
        found = FINISH.findall(self._tail)
        return found[-1].decode() if found else None


def _is_usage_only(event: bytes) -> bool:
    name, _, data = event.partition(b":")
    if name.strip() != b"data" or b'"usage"' not in data:
        return False
    try:
        value = json.loads(data)
    except ValueError:
        return False
    return (
        isinstance(value, dict)
        and value.get("choices") == []
        and isinstance(value.get("usage"), dict)
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
    tail: Tail = field(default_factory=Tail)
    start: float = field(default_factory=time.monotonic)
    duration_s: float = 0.0
    ttft_s: float | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    finish_reason: str | None = None

    def close(self) -> None:
        """Read what the answer said; call it once, at the end."""
        self.duration_s = time.monotonic() - self.start
        if self.tail.first_byte is None:
            return
        self.ttft_s = self.tail.first_byte - self.start
        usage = self.tail.usage()
        self.prompt_tokens = _count(usage.get("prompt_tokens"))
        self.completion_tokens = _count(usage.get("completion_tokens"))
        self.finish_reason = self.tail.finish_reason()

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
