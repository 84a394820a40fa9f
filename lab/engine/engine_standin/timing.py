"""The timing and memory model: data from timing.json and the formulas over it. Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path

DEFAULT_FILE = Path(__file__).with_name("timing.json")
BATCHED_TOKENS_MEASURED = 4096  # max_num_batched_tokens at which pool_tokens was measured
GOLDEN = (math.sqrt(5) - 1) / 2

Points = tuple[tuple[float, float], ...]


def interpolate(points: Points, x: float) -> float:
    """Piecewise linear through `points` (sorted by x), continued straight beyond both ends."""
    if len(points) == 1:
        return points[0][1]
    segment = sum(1 for point in points[1:-1] if x > point[0])
    (x0, y0), (x1, y1) = points[segment], points[segment + 1]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)


def mean_length(probability: float, k: int) -> float:
    """Mean tokens a round when each of k drafts is accepted with `probability` after the last."""
    return sum(probability**position for position in range(k + 1))


def acceptance_probability(length: float, k: int) -> float:
    """The probability whose `mean_length` at depth k is `length` (1 <= length <= k + 1)."""
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if mean_length(middle, k) < length else (low, middle)
    return (low + high) / 2


def accepted_drafts(length: float, k: int) -> Iterator[int]:
    """Endless accepted-draft counts, one a round, whose mean tends to `length` - 1.

    The inverse of the truncated geometric distribution, fed with a golden-ratio sequence in place
    of random numbers: the same for every request, and within a draft or two of the exact sum after
    any number of rounds.
    """
    probability = acceptance_probability(length, k) if k else 0.0
    uniform = 0.38  # starts the sums of the first few hundred rounds nearest to the mean
    while True:
        if probability <= 0.0:
            yield 0
        elif probability >= 1.0 or uniform <= 0.0:
            yield k
        else:
            yield min(k, int(math.log(uniform) / math.log(probability)))
        uniform = (uniform + GOLDEN) % 1.0


@dataclass(frozen=True)
class Timing:
    """timing.json, typed; the units stand in the file."""

    boot_seconds: float
    acceptance_length: Mapping[int, Mapping[str, float]]
    round_seconds: Points
    healthy_sequences: int
    batch_factor: Points
    collapsed_round_seconds: Points
    prefill_seconds: Points
    jit_seconds: Mapping[int, float]
    occupied_slowdown: float
    pool_tokens: Points
    pool_tokens_per_batched_token: float
    kv_bytes_per_token: float
    card_gb: Points

    def length(self, k: int, domain: str) -> float:
        """Acceptance length at depth k; from the nearest measured depth where k was not."""
        nearest = min(self.acceptance_length, key=lambda known: abs(known - k))
        length = self.acceptance_length[nearest][domain]
        if k == nearest:
            return length
        return mean_length(acceptance_probability(length, nearest), k)

    def round(self, k: int, sequences: int) -> float:
        """Seconds of one decode round with `sequences` running."""
        if sequences > self.healthy_sequences:
            return interpolate(self.collapsed_round_seconds, k)
        return interpolate(self.round_seconds, k) * interpolate(self.batch_factor, sequences)

    def pool(self, utilization: float, batched_tokens: int) -> int:
        """Tokens that the KV pool holds over all cards; 0 or less: there is no room for any."""
        lost = (batched_tokens - BATCHED_TOKENS_MEASURED) * self.pool_tokens_per_batched_token
        return math.floor(interpolate(self.pool_tokens, utilization) - lost)


def load(path: Path = DEFAULT_FILE) -> Timing:
    """Read a timing file.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not JSON, or a key is missing or unknown.
    """
    raw = json.loads(path.read_text())
    raw.pop("about", None)
    names = {field.name for field in fields(Timing)}
    if set(raw) != names:
        raise ValueError(f"{path}: missing or unknown keys: {sorted(set(raw) ^ names)}")
    for name, value in raw.items():
        if isinstance(value, list):
            raw[name] = tuple((float(x), float(y)) for x, y in value)
    for name in ("acceptance_length", "jit_seconds"):
        raw[name] = {int(key): value for key, value in raw[name].items()}
    return Timing(**raw)
