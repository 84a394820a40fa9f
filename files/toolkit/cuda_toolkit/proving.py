"""The installer's call of the proof."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from hostlib.errors import HostError

from cuda_toolkit.environment import clean
from cuda_toolkit.spec import Expected


def prove_clean(expected: Expected, tree: Path, name: str, way_out: str) -> None:
    """Prove `tree`, called `name`, without steering variables; one line a check.

    The tree is judged by itself here; the engine's own environment is judged by its preparation.

    Raises:
        HostError: a check failed, or the proof could not run (exit code 2).
    """
    from cuda_toolkit import proof

    report = proof.prove(tree, expected, clean(os.environ))
    for check in report.checks:
        say(f"{check.mark} {check.name}: {check.text}")
    failed = [check for check in report.checks if not check.ok]
    if failed:
        raise HostError(
            f"{name}: the proof failed ({', '.join(item.name for item in failed)}); {way_out}",
            *(line for item in failed for line in (f"{item.name}: {item.text}", *item.details)),
        )


def say(text: str) -> None:
    """One line of the installer's on standard error."""
    print(f"cuda-install: {text}", file=sys.stderr, flush=True)
