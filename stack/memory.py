"""Whether the KV cache holds what may run at once: settings → demand, pool, verdict.

Calibrated on what was measured on four V100 with this engine and checkpoint:

- pool by GMU, at 4096 batched tokens: 0.40 → 126,670 tokens, 0.50 → 351,436. The two differ in
  their window as well, so between them the straight line is an estimate, outside it none;
- 332,000 tokens shrink to 183,000 when the batched tokens go from 4096 to 32768, and with 131,072
  there is no room for a cache at all, as the straight line through both says too.
"""

from __future__ import annotations

from stack.settings import Engine

POOL_BY_GMU = ((0.40, 126_670), (0.50, 351_436))
BATCHED_TOKENS = (4_096, 32_768)
POOL_BY_BATCHED_TOKENS = (332_000, 183_000)
RANKS = 4


def expected_pool(engine: Engine) -> int:
    """Tokens that the KV cache is expected to hold over all cards; 0 where it has no room."""
    (low, low_pool), (high, high_pool) = POOL_BY_GMU
    slope = (high_pool - low_pool) / (high - low)
    by_gmu = low_pool + (engine.gpu_memory_utilization - low) * slope
    cost = (POOL_BY_BATCHED_TOKENS[0] - POOL_BY_BATCHED_TOKENS[1]) / (
        BATCHED_TOKENS[1] - BATCHED_TOKENS[0]
    )
    return max(0, round(by_gmu - (engine.max_num_batched_tokens - BATCHED_TOKENS[0]) * cost))


def measured_near(engine: Engine) -> bool:
    """Whether these settings lie between measured points, so that the estimate can be trusted."""
    return (
        POOL_BY_GMU[0][0] <= engine.gpu_memory_utilization <= POOL_BY_GMU[1][0]
        and BATCHED_TOKENS[0] <= engine.max_num_batched_tokens <= BATCHED_TOKENS[1]
        and engine.tensor_parallel_size == RANKS
    )


def verdict(engine: Engine) -> dict[str, object]:
    """The release's `memory`: `fits`, `short`, or `unsure` where nothing near was measured."""
    pool = expected_pool(engine)
    demand = engine.max_num_seqs * engine.max_model_len
    words = (
        f"{engine.max_num_seqs} sequences of {engine.max_model_len:,} tokens need {demand:,}, the "
        f"KV cache is expected to hold {pool:,}"
    )
    if not measured_near(engine):
        kind = "unsure"
        words += ", by extrapolation: nothing near these settings was measured"
    else:
        kind = "fits" if demand <= pool else "short"
    return {"verdict": kind, "demand_tokens": demand, "pool_tokens": pool, "reason": words}
