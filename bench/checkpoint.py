#!/usr/bin/env python3
"""The checkpoint's programs against cp, openssl and the safetensors library, on a miniature pair.

    .venv/bin/python bench/checkpoint.py [--bytes N] [--rounds N]

Every round runs all contenders one after another, every second round in the opposite order;
figures are medians over the rounds. Sources are in the page cache; what was written is removed and
the disk synced before the next one begins. "Layout" writes the assembled shards and fsyncs each,
timed inside a process of its own; cp writes the same bytes and sync(1) fsyncs them. "Library"
loads shard after shard with the safetensors package and saves each under its new names, one fsync
each; "assemble" is all phases of the command. Memory is the process's peak (VmHWM). The quick
verify is of the whole architecture's 2,194 tensors, in files that are holes behind their headers,
and is a whole process with its start.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path[:0] = [
    str(REPOSITORY),
    *(str(REPOSITORY / "files" / p) for p in ("checkpoint", "hostlib")),
]

from lab.checkpoint import Pair, build_pair  # noqa: E402
from lab.checkpoint_config import Size  # noqa: E402
from lab.places import CACHE  # noqa: E402
from stack import FILES  # noqa: E402
from tests.unit.checkpoint_support import full_sized  # noqa: E402
from tests.unit.test_checkpoint_census import FULL  # noqa: E402

PYTHON = ["/usr/bin/python3", "-I"]
LEAST_AGAINST_CP = LEAST_AGAINST_OPENSSL = 0.9
MOST_MEMORY_MB, MOST_QUICK_S = 100, 0.3
PEAK = """
def peak_mb():
    line = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024 / 1e6
"""
LAYOUT = (
    PEAK
    + """
import json, sys, time
sys.path.insert(0, {tools!r})
from pathlib import Path
from checkpoint import layout, parents
files = layout.plan_files(*parents.read_pair(Path({trunk!r}), Path({base!r})))
began = time.perf_counter()
layout.lay_out(files, Path({target!r}))
print(json.dumps([time.perf_counter() - began, peak_mb()]))
"""
)
ASSEMBLE = (
    PEAK
    + """
import json, sys, time
sys.path.insert(0, {tools!r})
from checkpoint.cli import main
began = time.perf_counter()
main(["assemble", "--trunk", {trunk!r}, "--base", {base!r}, "--out", {target!r} + "/link"])
print(json.dumps([time.perf_counter() - began, peak_mb()]))
"""
)
LIBRARY = (
    PEAK
    + """
import ctypes, json, os, sys, time
from pathlib import Path
import safetensors
NAMES = {{"F32": "float32", "BF16": "bfloat16", "U8": "uint8", "F8_E4M3": "float8_e4m3fn"}}
def taken(name, trunk):
    if trunk:
        return "model.language_model." + name[6:] if name.startswith("model.") else name
    wanted = name.startswith(("mtp.", "model.visual.")) or name.endswith("input_scale")
    return name if wanted else ""
began, number = time.perf_counter(), 0
for folder, trunk in (({trunk!r}, True), ({base!r}, False)):
    for path in sorted(Path(folder).glob("*.safetensors")):
        specs, kept = {{}}, []
        for name, tensor in safetensors.deserialize(path.read_bytes()):
            if taken(name, trunk):
                data = tensor["data"]
                kept.append(data)
                pointer = ctypes.addressof(ctypes.c_char.from_buffer(data))
                specs[taken(name, trunk)] = safetensors.TensorSpec(
                    dtype=NAMES[tensor["dtype"]], shape=tensor["shape"], data_ptr=pointer,
                    data_len=len(data))
        number += 1
        file = {target!r} + f"/{{number}}.safetensors"
        safetensors.serialize_file(specs, file, {{"format": "pt"}})
        handle = os.open(file, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)
print(json.dumps([time.perf_counter() - began, peak_mb()]))
"""
)


def run(command: list[str], text: str | None = None, cwd: Path | None = None) -> str:
    """Run it quietly; its standard output."""
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False, cwd=cwd)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)[:300]}: {done.stderr[-2000:]}")
    return done.stdout


def timed(action: Callable[[], object]) -> float:
    """Seconds that `action` takes."""
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


class Bench:
    """A pair on one file system, what is assembled from it, and the programs of a host."""

    def __init__(self, work: Path, pair: Pair) -> None:
        self.work, self.pair = work, pair
        self.tools = work / "tools"
        shutil.copytree(FILES / "checkpoint", self.tools)
        shutil.copytree(FILES / "hostlib/hostlib", self.tools / "hostlib")
        self.peaks: dict[str, list[float]] = {}

    @contextlib.contextmanager
    def target(self) -> Iterator[Path]:
        """An empty folder, on a disk that has nothing left to write."""
        folder = self.work / "target"
        folder.mkdir()
        os.sync()
        yield folder
        shutil.rmtree(folder)

    def script(self, name: str, code: str, python: list[str]) -> float:
        """Seconds that a script tells of itself; its peak memory is kept."""
        with self.target() as target:
            return self.tell(name, code, python, target)

    def tell(self, name: str, code: str, python: list[str], target: Path) -> float:
        """As `script`, into a folder that stands."""
        filled = code.format(
            tools=str(self.tools), trunk=str(self.pair.trunk), base=str(self.pair.base),
            target=str(target),
        )  # fmt: skip
        seconds, peak = json.loads(run([*python, "-c", filled]).splitlines()[-1])
        self.peaks.setdefault(name, []).append(peak)
        return float(seconds)

    def layout(self) -> float:
        """Seconds of the layout phase."""
        return self.script("layout", LAYOUT, PYTHON)

    def cp(self, files: list[str]) -> float:
        """Seconds of cp and sync of `files`."""
        with self.target() as target:

            def copy() -> None:
                run(["cp", "--reflink=never", *files, str(target)])
                run(["sync", *(str(path) for path in target.iterdir())])

            return timed(copy)


def compare(work: Path, least_bytes: int, rounds: int) -> bool:
    """Measure and print; whether every figure meets its bound."""
    (work / "pair").mkdir()
    bench = Bench(work, build_pair(work / "pair", Size.of_bytes(least_bytes)))
    whole = work / "whole"
    whole.mkdir()
    bench.tell("assemble", ASSEMBLE, PYTHON, whole)
    result = (whole / "link").resolve()
    full = full_sized(work / "full", FULL)
    ckpt = str(bench.tools / "bin/ckpt")
    files = [
        str(path) for path in result.iterdir() if path.name not in ("manifest.json", "stamp.json")
    ]
    size = sum(Path(file).stat().st_size for file in files)
    openssl = ["xargs", f"-P{os.cpu_count()}", "-n1", "openssl", "dgst", "-sha256"]
    contenders: dict[str, Callable[[], float]] = {
        "layout": bench.layout,
        "cp": lambda: bench.cp(files),
        "library": lambda: bench.script("library", LIBRARY, [sys.executable]),
        "assemble": lambda: bench.script("assemble", ASSEMBLE, PYTHON),
        "deep verify": lambda: timed(lambda: run([ckpt, "verify", "--deep", str(result)])),
        "openssl": lambda: timed(lambda: run(openssl, "\n".join(files))),
        "quick verify": lambda: timed(lambda: run([ckpt, "verify", str(full)])),
    }
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(rounds):
        print(f"round {number + 1} of {rounds}", file=sys.stderr, flush=True)
        order = list(contenders)
        for name in reversed(order) if number % 2 else order:
            samples[name].append(contenders[name]())
    median = {name: statistics.median(values) for name, values in samples.items()}
    print(
        f"{size / 1e9:.2f} GB assembled of {_gigabytes(bench.pair.trunk):.2f} and"
        f" {_gigabytes(bench.pair.base):.2f} GB, {rounds} rounds, {os.cpu_count()} processors,"
        f" load {os.getloadavg()[0]:.1f}; medians (least, most)"
    )
    for name, values in samples.items():
        rate = "" if name == "quick verify" else f"{size / 1e6 / median[name]:8.0f} MB/s"
        peak = f"{max(bench.peaks[name]):7.0f} MB" if name in bench.peaks else ""
        print(
            f"  {name:<22} {median[name]:7.3f} s ({min(values):.3f}, {max(values):.3f})"
            f" {rate} {peak}"
        )
    memory = max(bench.peaks["layout"] + bench.peaks["assemble"])
    print(
        f"  library / layout: time {median['library'] / median['layout']:.2f},"
        f" memory {max(bench.peaks['library']) / max(bench.peaks['layout']):.1f}"
    )
    met = [
        _verdict("layout against cp", median["cp"] / median["layout"], LEAST_AGAINST_CP),
        _verdict("peak memory, MB", memory, MOST_MEMORY_MB, most=True),
        _verdict(
            "deep verify against openssl", median["openssl"] / median["deep verify"],
            LEAST_AGAINST_OPENSSL,
        ),
        _verdict("quick verify, s", median["quick verify"], MOST_QUICK_S, most=True),
    ]  # fmt: skip
    return all(met)


def _gigabytes(folder: Path) -> float:
    return sum(path.stat().st_size for path in folder.iterdir()) / 1e9


def _verdict(name: str, value: float, bound: float, most: bool = False) -> bool:
    met = value <= bound if most else value >= bound
    kind = "most" if most else "least"
    print(f"  {name:<30} {value:7.2f}, at {kind} {bound}: {'met' if met else 'MISSED'}")
    return met


def main() -> int:
    """Measure and print; exit code 1 when a figure misses its bound."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--bytes", type=int, default=3_000_000_000, help="least bytes of the base")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=CACHE, help="on the disk to use")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="checkpoint-bench.", dir=options.folder) as name:
        return 0 if compare(Path(name), options.bytes, options.rounds) else 1


if __name__ == "__main__":
    sys.exit(main())
