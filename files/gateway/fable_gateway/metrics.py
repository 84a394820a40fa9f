"""What /metrics tells: counters a key, and gauges that are read when they are asked for."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)

from fable_gateway.accounting import Record

CONTENT_TYPE = CONTENT_TYPE_LATEST
# Seconds; a long answer takes minutes.
BUCKETS = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
NOBODY = "none"


class Metrics:
    """Counts requests; one of its own for each gateway, never the library's global one."""

    def __init__(self, gauges: dict[str, tuple[str, Callable[[], float]]]) -> None:
        """`gauges`: name → help text and what to read."""
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        for name, (text, read) in gauges.items():
            Gauge(f"fable_gateway_{name}", text, registry=self._registry).set_function(read)
        self._requests = self._counter("requests", "Requests that ended", "status")
        self._tokens = self._counter("tokens", "Tokens by the engine's own count", "kind")
        self._retries = self._counter("retries", "Times that a request was sent again")
        self._durations = {
            name: Histogram(
                f"fable_gateway_{name}_seconds", text, registry=self._registry, buckets=BUCKETS
            )
            for name, text in (
                ("queue_wait", "Waiting for a slot"),
                ("time_to_first_byte", "From the request to the answer's first byte"),
                ("duration", "From the request to the answer's end"),
            )
        }

    def count(self, record: Record) -> None:
        """Take in a request that ended."""
        key = record.key or NOBODY
        self._requests.labels(key, str(record.status)).inc()
        for kind, tokens in (
            ("prompt", record.prompt_tokens),
            ("completion", record.completion_tokens),
        ):
            if tokens and tokens > 0:
                self._tokens.labels(key, kind).inc(tokens)
        if record.retries:
            self._retries.labels(key).inc(record.retries)
        for name, seconds in (
            ("queue_wait", record.queue_s),
            ("time_to_first_byte", record.ttft_s),
            ("duration", record.duration_s),
        ):
            if seconds is not None:
                self._durations[name].observe(seconds)

    def text(self) -> bytes:
        """All of it in Prometheus' text format."""
        return generate_latest(self._registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"fable_gateway_{name}", text, ("key", *labels), registry=self._registry)
