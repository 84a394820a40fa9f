"""GPU memory in use, as nvidia-smi reports it."""

from __future__ import annotations

import shutil
import subprocess

from hostlib.errors import EXIT_UNABLE, HostError

# An idle V100 with its driver loaded shows a few MiB; an engine on a card that holds more does
# not fail, it runs at a fraction of its speed.
FREE_BELOW_MIB = 200
QUERY_SECONDS = 30


def occupied() -> dict[int, int]:
    """MiB in use on each card that is not free; empty where there is no nvidia-smi.

    Raises:
        HostError: nvidia-smi is there but gives no answer.
    """
    if shutil.which("nvidia-smi") is None:
        return {}
    query = ["nvidia-smi", "--query-gpu=index,memory.used", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(
            query,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=QUERY_SECONDS,
            check=True,
        )
        used = parse(done.stdout)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        raise HostError(
            f"nvidia-smi: gives no memory figures ({error}); check the driver",
            exit_code=EXIT_UNABLE,
        ) from None
    return {card: mib for card, mib in used.items() if mib >= FREE_BELOW_MIB}


def parse(text: str) -> dict[int, int]:
    """MiB in use by card index, from `index, memory.used` lines without units.

    Raises:
        ValueError: a line has another form.
    """
    pairs = (line.split(",") for line in text.splitlines() if line.strip())
    return {int(card): int(mib) for card, mib in pairs}
