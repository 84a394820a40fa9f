"""The engine core as arithmetic: sequences, slots, rounds. No clock and no input or output.

A step prefills the sequences that get a slot (each yields its first token) and runs one decode
round for those already running: every one of them yields 1 + its accepted drafts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from engine_standin.timing import Timing, accepted_drafts, interpolate


@dataclass
class Counters:
    """What the engine counts, as in its metrics."""

    prompt_tokens: int = 0
    generation_tokens: int = 0
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_per_position: list[int] = field(default_factory=list)


@dataclass
class Running:
    """A sequence with its lengths in tokens."""

    name: str
    prompt_tokens: int
    output_tokens: int
    accepted: Iterator[int]
    emitted: int = 0


@dataclass(frozen=True)
class Step:
    """One step: how long it takes, and how many new tokens each sequence got by it."""

    seconds: float
    emitted: dict[str, int]


class Engine:
    """The scheduler: at most `slots` (max_num_seqs) sequences run, the others wait in order."""

    def __init__(self, timing: Timing, k: int, slots: int, slowdown: float = 1.0) -> None:
        self.timing = timing
        self.k = k
        self.slots = slots
        self.slowdown = slowdown
        self.counters = Counters(accepted_per_position=[0] * k)
        self.waiting: deque[Running] = deque()
        self.running: dict[str, Running] = {}
        self._jit_due = dict(timing.jit_seconds)

    def submit(self, name: str, prompt_tokens: int, output_tokens: int, domain: str) -> None:
        """Queue a sequence that will yield exactly `output_tokens` (at least 1)."""
        accepted = accepted_drafts(self.timing.length(self.k, domain), self.k)
        self.waiting.append(Running(name, prompt_tokens, output_tokens, accepted))

    def abort(self, name: str) -> None:
        """Forget a sequence, running or queued; unknown names are ignored."""
        self.running.pop(name, None)
        self.waiting = deque(one for one in self.waiting if one.name != name)

    def tokens_held(self) -> int:
        """Tokens in the KV pool: prompts and answers of the running sequences."""
        return sum(one.prompt_tokens + one.emitted for one in self.running.values())

    def step(self) -> Step | None:
        """Advance once; None when there is nothing to do."""
        decoding = list(self.running.values())
        seconds = self._decode_seconds(len(decoding))
        emitted: dict[str, int] = {}
        for one in decoding:
            emitted[one.name] = self._round(one)
        while self.waiting and len(self.running) < self.slots:
            one = self.waiting.popleft()
            self.running[one.name] = one
            seconds += interpolate(self.timing.prefill_seconds, one.prompt_tokens) * self.slowdown
            self.counters.prompt_tokens += one.prompt_tokens
            emitted[one.name] = one.emitted = 1
        for name in emitted:
            if self.running[name].emitted >= self.running[name].output_tokens:
                del self.running[name]
        self.counters.generation_tokens += sum(emitted.values())
        return Step(seconds, emitted) if emitted else None

    def _decode_seconds(self, sequences: int) -> float:
        if not sequences:
            return 0.0
        jit = self._jit_due.pop(sequences, 0.0)
        return self.timing.round(self.k, sequences) * self.slowdown + jit

    def _round(self, one: Running) -> int:
        accepted = next(one.accepted)
        if self.k:
            self.counters.drafts += 1
            self.counters.draft_tokens += self.k
            self.counters.accepted_tokens += accepted
            for position in range(accepted):
                self.counters.accepted_per_position[position] += 1
        tokens = min(1 + accepted, one.output_tokens - one.emitted)
        one.emitted += tokens
        return tokens


@dataclass(frozen=True)
class Finished:
    """When a sequence of a `replay` got its first and its last token, in seconds from the start."""

    first: float
    last: float


def replay(engine: Engine, requests: Sequence[tuple[int, int, str]]) -> list[Finished]:
    """The truth for a batch sent at once: (prompt tokens, output tokens, domain) each."""
    for index, (prompt_tokens, output_tokens, domain) in enumerate(requests):
        engine.submit(str(index), prompt_tokens, output_tokens, domain)
    clock = 0.0
    first: dict[str, float] = {}
    last: dict[str, float] = {}
    while step := engine.step():
        clock += step.seconds
        for name in step.emitted:
            first.setdefault(name, clock)
            last[name] = clock
    return [Finished(first[name], last[name]) for name in map(str, range(len(requests)))]
