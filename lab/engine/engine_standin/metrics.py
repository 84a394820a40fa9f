"""The /metrics page: vLLM's names over the stand-in's counters, in Prometheus text format."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from engine_standin.simulation import Counters

BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
BLOCK_SIZE = 16  # tokens
HISTOGRAMS = (
    "vllm:time_to_first_token_seconds",
    "vllm:inter_token_latency_seconds",
    "vllm:e2e_request_latency_seconds",
)


@dataclass
class Histogram:
    """Observations in wall-clock seconds, in buckets by upper bound."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS) + 1))
    total: float = 0.0

    def observe(self, seconds: float) -> None:
        """Count one observation."""
        self.counts[sum(seconds > bound for bound in BOUNDS)] += 1
        self.total += seconds


@dataclass
class Page:
    """Everything that /metrics shows at one moment."""

    model_name: str
    counters: Counters
    running: int
    waiting: int
    cache_usage: float
    pool_tokens: int
    utilization: float
    finished: Mapping[str, int]
    histograms: Mapping[str, Histogram]


def _labels(**labels: object) -> str:
    quoted = (
        '{}="{}"'.format(key, str(value).replace("\\", r"\\").replace('"', r"\""))
        for key, value in labels.items()
    )
    return "{" + ",".join(quoted) + "}"


def _lines(page: Page) -> Iterator[str]:
    base = {"engine": "0", "model_name": page.model_name}
    counters = page.counters

    def family(name: str, kind: str, rows: Mapping[str, float]) -> Iterator[str]:
        # A counter family's own name has no _total: its samples have.
        yield f"# TYPE {name} {kind}"
        suffix = "_total" if kind == "counter" else ""
        for labels, value in rows.items():
            yield f"{name}{suffix}{labels} {value}"

    plain = _labels(**base)
    yield from family("vllm:num_requests_running", "gauge", {plain: page.running})
    yield from family("vllm:num_requests_waiting", "gauge", {plain: page.waiting})
    yield from family("vllm:kv_cache_usage_perc", "gauge", {plain: page.cache_usage})
    for name, value in {
        "vllm:prompt_tokens": counters.prompt_tokens,
        "vllm:generation_tokens": counters.generation_tokens,
        "vllm:spec_decode_num_drafts": counters.drafts,
        "vllm:spec_decode_num_draft_tokens": counters.draft_tokens,
        "vllm:spec_decode_num_accepted_tokens": counters.accepted_tokens,
    }.items():
        yield from family(name, "counter", {plain: value})
    positions = {
        _labels(**base, position=position): float(count)
        for position, count in enumerate(counters.accepted_per_position)
    }
    yield from family("vllm:spec_decode_num_accepted_tokens_per_pos", "counter", positions)
    reasons = {
        _labels(**base, finished_reason=reason): float(count)
        for reason, count in page.finished.items()
    }
    yield from family("vllm:request_success", "counter", reasons)
    cache = _labels(
        block_size=BLOCK_SIZE,
        cache_dtype="auto",
        engine="0",
        gpu_memory_utilization=page.utilization,
        kv_cache_size_tokens=page.pool_tokens,
        num_gpu_blocks=page.pool_tokens // BLOCK_SIZE,
    )
    yield from family("vllm:cache_config_info", "gauge", {cache: 1.0})
    for name, histogram in page.histograms.items():
        yield f"# TYPE {name} histogram"
        below = 0
        for bound, count in zip((*BOUNDS, "+Inf"), histogram.counts, strict=True):
            below += count
            yield f"{name}_bucket{_labels(**base, le=bound)} {below}"
        yield f"{name}_sum{plain} {histogram.total}"
        yield f"{name}_count{plain} {below}"


def render(page: Page) -> str:
    """The page as text."""
    return "\n".join(_lines(page)) + "\n"
