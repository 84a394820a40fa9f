#!/usr/bin/env python3
"""What a switch costs beside the engine's own stop and boot; what status, settle and gates cost.

    .venv/bin/python bench/switch.py [--rounds N] [--lines N]

No lab and no systemd: engines that boot at once, a small program in systemd's place (the one of the
unit tests), a proof that answers at once. Measured in rounds of one run, in turn, wall-clock:

switch   a whole switch, less the steps that the engine is waited for in (drain and stop, boot, warm
         request): what the switch itself adds
status   `enginectl status`, and how many processes it starts (strace)
settle   the unattended settle, which finds nothing to do, and its processes
bare     `python3 -I` with the same imports and nothing to do
gates    all 11 over a log of many lines, with the peak of its own memory (resident, less that of
         the bare process)

Printed are medians, ratios to the bare start, and the limits: 1.5 s, 3 processes, 4 x, 1 s, 50 MB.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(REPOSITORY), *(str(REPOSITORY / "files" / p) for p in ("engine", "hostlib"))]

from tests.unit.enginectl_host import SETTLE, Host  # noqa: E402
from tests.unit.enginectl_support import good_log, install  # noqa: E402

ENGINES_OWN = ("drain and stop", "boot", "warm request")
BARE = "import sys; sys.path.insert(0, sys.argv[1]); from enginectl import cli"
GATES = """
import resource, sys, time
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from enginectl import bootlog, cli, gates
from enginectl.release import GateSettings
settings = GateSettings(7, 4, 128, 248320)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
begun = time.monotonic()
seen = gates.observe(bootlog.read_lines(Path(sys.argv[2])), settings)
results = gates.evaluate(seen, settings, None)
seconds = time.monotonic() - begun
assert [gate.verdict for gate in results[1:]] == ["pass"] * 10, results
print(seconds, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""


def main() -> int:
    """Measure and print; returns 0 if every limit holds."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--lines", type=int, default=300_000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        program = install(folder / "lib")
        (folder / "host").mkdir()
        host = Host(folder / "host", program)
        try:
            return measure(host, folder, options.rounds, options.lines)
        finally:
            host.systemctl("stop", "fable-engine.service")


def measure(host: Host, folder: Path, rounds: int, lines: int) -> int:
    """All of it on a serving host."""
    names = [host.release("one"), host.release("two")]
    assert host.switch(names[0])[0] == 0
    library = str(host.program.parent.parent)
    bare = [sys.executable, "-I", "-c", BARE, library]
    # the interpreter that the tests run with, for all three
    status = [sys.executable, "-I", str(host.program), "status", "--root", str(host.root)]
    settle = [sys.executable, "-I", "-c", SETTLE, library, str(host.root)]
    log = folder / "boot.log"
    log.write_text("\n".join(padded(lines)) + "\n")
    seconds: dict[str, list[float]] = {}
    for number in range(rounds):
        begun = time.monotonic()
        code, record, err = host.switch(names[(number + 1) % 2], "--retry")
        assert code == 0, err
        whole = time.monotonic() - begun
        own = sum(step["seconds"] for step in record["steps"] if step["step"] in ENGINES_OWN)
        seconds.setdefault("switch", []).append(whole - own)
        for key, command in (("bare", bare), ("status", status), ("settle", settle)):
            begun = time.monotonic()
            subprocess.run(command, env=host.environment, capture_output=True, check=False)
            seconds.setdefault(key, []).append(time.monotonic() - begun)
        shown = subprocess.run(
            [sys.executable, "-I", "-c", GATES, library, str(log)],
            capture_output=True, text=True, check=True,
        ).stdout  # fmt: skip
        took, memory = map(float, shown.split())
        seconds.setdefault("gates", []).append(took)
        seconds.setdefault("memory", []).append(memory)
    median = {key: statistics.median(values) for key, values in seconds.items()}
    rows = [
        ("switch, less the engine's own time", median["switch"], 1.5, "s"),
        ("status, of a bare start", median["status"] / median["bare"], 4, "x"),
        ("settle, of a bare start", median["settle"] / median["bare"], 4, "x"),
        ("status, processes", children(status, host), 3, ""),
        ("settle, processes", children(settle, host), 3, ""),
        (f"gates over {lines:,} lines", median["gates"], 1.0, "s"),
        ("gates, memory", median["memory"], 50, "MB"),
    ]
    print(f"median of {rounds} rounds; a bare start takes {median['bare'] * 1000:.0f} ms")
    for words, value, limit, sign in rows:
        verdict = "ok" if value <= limit else "ABOVE"
        print(f"{words:36} {value:8.2f} {sign:2} (at most {limit}) {verdict}")
    return 0 if all(value <= limit for _, value, limit, _ in rows) else 1


def padded(count: int) -> list[str]:
    """A good boot's log among lines that no gate reads."""
    lines = good_log()
    noise = "(APIServer pid=4000) INFO 11-30 12:03:00 [loggers.py:1] Engine 000: 71.2 tokens/s"
    return [*lines, *[noise] * (count - len(lines))]


def children(command: list[str], host: Host) -> int:
    """How many programs a command executes besides itself; a program not found does not count."""
    with tempfile.NamedTemporaryFile("r") as trace:
        follow = ["strace", "-f", "-e", "trace=execve", "-e", "signal=none", "-o", trace.name]
        subprocess.run([*follow, *command], env=host.environment, capture_output=True, check=False)
        # the stand-in in systemd's place is one program
        return sum(") = 0" in line for line in trace.read().splitlines()) - 1


if __name__ == "__main__":
    sys.exit(main())
