#!/usr/bin/env python3
"""What the toolkit's proof costs beside the compilations it consists of, and its second run.

    .venv/bin/python bench/toolkit_proof.py [--rounds N]

Seconds of whole processes, wall-clock and processor time, on real CUDA 12.8 parts from the lab's
mirror and tilelang's own header. The four are taken in turn in each round of one run, in the
opposite order every second round:

proof     `cuda-proof --deep`, stages 1 and 2
compiles  the same nvcc commands, as many at once as there are processors
stamp     `cuda-proof` again, with nothing changed
bare      `python3 -I` with the same imports and nothing to do

Printed are the medians and the ratios that the project holds itself to: 3 and 4.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(REPOSITORY), *(str(REPOSITORY / "files" / p) for p in ("toolkit", "hostlib"))]

from cuda_toolkit import proof  # noqa: E402
from cuda_toolkit.environment import STEERING  # noqa: E402
from cuda_toolkit.runner import Outcome, Runner  # noqa: E402
from cuda_toolkit.spec import SPEC_FILE, load_expected  # noqa: E402

from lab import mirror, proof_parts  # noqa: E402
from lab.debian import debian_mirror  # noqa: E402
from lab.places import CACHE  # noqa: E402
from tests.lab.toolkit_lab import apt_sources, new_site, tilelang_venv  # noqa: E402
from tests.unit.toolkit_support import lay_out_programs  # noqa: E402

PROOF_LIMIT, STAMP_LIMIT = 3, 4
ENVIRONMENT = {name: value for name, value in os.environ.items() if name not in STEERING}


def recorded_commands(tree: Path, venv: Path, folder: Path) -> list[list[str]]:
    """The nvcc commands of one proof, as they can be run in `folder`, longest first as there."""
    commands: list[list[str]] = []

    class Recorder(Runner):
        def run(self, command: Sequence[str | Path], deadline_s: float) -> Outcome:
            for source in self.work.glob("*.cu"):
                shutil.copy(source, folder)
            commands.append([str(word).replace(str(self.work), str(folder)) for word in command])
            return super().run(command, deadline_s)

    setattr(proof, "Runner", Recorder)  # noqa: B010
    try:
        expected = load_expected(tree / SPEC_FILE)
        report = proof.prove_subject(
            proof.Subject(tree, expected, ENVIRONMENT, venv=venv), deep=True
        )
    finally:
        setattr(proof, "Runner", Runner)  # noqa: B010
    if not report.ok:
        raise SystemExit(f"the toolkit does not pass: {report.failures}")
    return commands


def run_together(commands: list[list[str]], folder: Path) -> None:
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        list(pool.map(lambda command: quietly(command, folder), commands))


def quietly(command: Sequence[str | Path], folder: Path) -> None:
    # A session of its own, as the proof gives each compiler: the kernel shares time by session.
    subprocess.run(
        command, cwd=folder, env=ENVIRONMENT, check=True, capture_output=True,
        start_new_session=True,
    )  # fmt: skip


def seconds(work: Callable[[], None]) -> tuple[float, float]:
    """Wall-clock and processor seconds of `work`, which runs other programs alone."""
    start, used = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    work()
    wall, now = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7, help="default: %(default)s")
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory(prefix="bench-proof.") as name:
        folder = Path(name).resolve()
        programs = lay_out_programs(folder / "tools")
        site = new_site(folder, programs, mirror.build(CACHE, debian_mirror(apt_sources())))
        installed = site.run("install")
        if installed.returncode:
            raise SystemExit(installed.stderr)
        tree = site.link.resolve()
        venv = tilelang_venv(folder / "venv", proof_parts.part("tilelang-0.1.10")).resolve()
        commands = recorded_commands(tree, venv, folder)
        program: list[str | Path] = [programs / "cuda-proof", tree, f"--venv={venv}"]
        imports = (
            f"import sys; sys.path.insert(0, {str(programs.parent)!r}); import cuda_toolkit.proof"
        )
        columns: dict[str, Callable[[], None]] = {
            "proof": lambda: quietly([*program, "--deep"], folder),
            "compiles": lambda: run_together(commands, folder),
            "stamp": lambda: quietly(program, folder),
            "bare": lambda: quietly(["/usr/bin/python3", "-I", "-c", imports], folder),
        }
        taken: dict[str, list[tuple[float, float]]] = {column: [] for column in columns}
        for number in range(rounds):
            order = list(columns)
            for column in reversed(order) if number % 2 else order:
                taken[column].append(seconds(columns[column]))
    print(f"{rounds} rounds, {os.cpu_count()} processors, {len(commands)} nvcc commands")
    median = {}
    for column, values in taken.items():
        walls, used = ([pair[item] for pair in values] for item in (0, 1))
        median[column] = statistics.median(walls), statistics.median(used)
        print(
            f"{column:<9} {median[column][0]:7.3f} s ({min(walls):.3f} to {max(walls):.3f}), "
            f"processor {median[column][1]:7.3f} s"
        )
    for upper, lower, limit in (("proof", "compiles", PROOF_LIMIT), ("stamp", "bare", STAMP_LIMIT)):
        wall, used_ratio = (median[upper][item] / median[lower][item] for item in (0, 1))
        print(f"{upper} / {lower} = {wall:.2f}, processor {used_ratio:.2f}   (at most {limit})")


if __name__ == "__main__":
    main()
