"""What a switch did: one line of the history, and the answer of `switch --json`."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class Record:
    """One switch from beginning to end; `id` is its systemd invocation.

    `drain` has the requests that ran when the engine was told to stop, and those cut off.
    """

    by: str
    reason: str
    before: str | None
    to: str
    id: str = ""
    outcome: str = ""
    detail: str = ""
    drain: dict[str, int | None] = field(default_factory=dict)
    steps: list[dict[str, Any]] = field(default_factory=list)
    gates: list[dict[str, Any]] = field(default_factory=list)

    @contextlib.contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Time a step, also one that fails, and say that it begins."""
        say(f"{name} ...")
        start = time.monotonic()
        try:
            yield
        finally:
            self.steps.append({"step": name, "seconds": round(time.monotonic() - start, 3)})

    def as_dict(self) -> dict[str, Any]:
        """The record in plain JSON types."""
        return asdict(self)


def say(text: str) -> None:
    """One line of progress. The terminal may be gone: the switch goes on without it."""
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


def gate_text(gate: dict[str, Any]) -> str:
    """One gate's result, as `asdict` of `gates.Gate`, in one line."""
    evidence = gate["evidence"]
    place = f" [line {evidence['line']}: {evidence['text']}]" if evidence else ""
    return f"{gate['number']:>2} {gate['verdict']:<11} {gate['name']}: {gate['reason']}{place}"
