"""The ways in which the stand-in fails on request.

Names (LAB_ENGINE_FAULTS, see the package):
    never-listen      boots and never opens its port
    exit-after-boot   exits 0 as soon as it is ready
    fail-gate-N       N in 1..11: gate N of a boot fails. Its line is missing; for 4 and 7 the
                      forbidden line is printed; for 1 chat completions answer 500; for 10 one
                      census line is missing
    refuse-module     one fused module is refused in the census (eligible=NO in place of YES)
    die-in-warmup     the engine core dies on the first request
    hang-on-sigterm   SIGTERM and SIGINT do nothing
    orphan-worker     the last worker outlives the server and keeps its memory
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

GATES = range(1, 12)
NAMES = frozenset(
    {
        "never-listen",
        "exit-after-boot",
        "refuse-module",
        "die-in-warmup",
        "hang-on-sigterm",
        "orphan-worker",
        *(f"fail-gate-{gate}" for gate in GATES),
    }
)


def read(environment: Mapping[str, str]) -> frozenset[str]:
    """The faults asked for by LAB_ENGINE_FAULTS.

    Raises:
        ValueError: an unknown name, or a file that is not a JSON list of names.
    """
    value = environment.get("LAB_ENGINE_FAULTS", "")
    names: object = [name.strip() for name in value.split(",") if name.strip()]
    if "/" in value:
        path = Path(value)
        names = json.loads(path.read_text()) if path.exists() else []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"LAB_ENGINE_FAULTS: {value} is not a JSON list of names")
    if unknown := set(names) - NAMES:
        raise ValueError(f"LAB_ENGINE_FAULTS: unknown {sorted(unknown)}; known: {sorted(NAMES)}")
    return frozenset(names)
