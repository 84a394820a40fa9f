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
    used = _query("--query-gpu=index,memory.used")
    return {card: mib for card, mib in used if mib >= FREE_BELOW_MIB}


def holders(card: int) -> dict[int, int]:
    """MiB that each process holds of card number `card`, by process id.

    Raises:
        HostError: nvidia-smi gives no answer.
    """
    return dict(_query(f"--id={card}", "--query-compute-apps=pid,used_memory"))


def parse(text: str) -> list[tuple[int, int]]:
    """Pairs of whole numbers, from lines of two columns without units.

    Memory that the driver does not tell (`[N/A]`) counts as a whole card's.

    Raises:
        ValueError: a line has another form.
    """
    pairs = [line.split(",") for line in text.splitlines() if line.strip()]
    return [(int(key), 1 << 15 if "N/A" in value else int(value)) for key, value in pairs]


def _query(*arguments: str) -> list[tuple[int, int]]:
    try:
        done = subprocess.run(
            ["nvidia-smi", *arguments, "--format=csv,noheader,nounits"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=QUERY_SECONDS,
            check=True,
        )
        return parse(done.stdout)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        raise HostError(
            f"nvidia-smi: gives no memory figures ({error}); check the driver",
            exit_code=EXIT_UNABLE,
        ) from None
