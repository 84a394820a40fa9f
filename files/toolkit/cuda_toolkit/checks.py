"""What a proof finds: one check a line, all of them a report."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, TextIO


@dataclass(frozen=True)
class Check:
    """One finding: a line of text, and what a person needs to know below it.

    Attributes:
        ok: it does not fail the proof.
        applies: False where there is nothing to check; `text` says what is not there.
    """

    name: str
    ok: bool
    text: str
    details: tuple[str, ...] = ()
    applies: bool = True

    @property
    def mark(self) -> str:
        """The first word of its line, four columns wide."""
        if not self.applies:
            return "n/a "
        return "ok  " if self.ok else "FAIL"


def not_applicable(name: str, text: str) -> Check:
    """A check that has nothing to look at, and says what is not there."""
    return Check(name, ok=True, text=text, applies=False)


@dataclass(frozen=True)
class Report:
    """All findings about one toolkit. `from_stamp`: they were read, not made."""

    prefix: str
    from_stamp: bool
    checks: tuple[Check, ...]

    @property
    def ok(self) -> bool:
        return all(check.ok for check in self.checks)

    @property
    def failures(self) -> list[str]:
        """One line for each check that failed."""
        return [f"{check.name}: {check.text}" for check in self.checks if not check.ok]

    def as_json(self) -> dict[str, Any]:
        """The report in plain JSON types."""
        return {
            "ok": self.ok,
            "prefix": self.prefix,
            "from_stamp": self.from_stamp,
            "checks": [asdict(check) for check in self.checks],
            "failures": self.failures,
        }


def show(check: Check, stream: TextIO, from_stamp: bool = False) -> None:
    """Print one check: its line, and its details below."""
    origin = " (from the stamp)" if from_stamp and check.applies else ""
    print(f"{check.mark} {check.name}: {check.text}{origin}", file=stream)
    for line in check.details:
        print(f"       {line}", file=stream)
    stream.flush()
