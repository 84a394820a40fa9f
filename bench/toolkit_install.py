#!/usr/bin/env python3
"""The toolkit's installer against tar and against an empty Python, on the lab's mirror.

    .venv/bin/python bench/toolkit_install.py [--rounds N]

Every round runs all contenders one after another, so that a busy machine slows all of them; the
figures are medians over the rounds, archives and programs warm in the page cache. "Installer" is
a process of its own that hashes, unpacks and merges the archives of a local folder, where it needs
no copy of them, without the proof; "over http" it fetches them first, from a server on this
machine's loopback that takes its own share of the processors; "durable" adds its sync and rename,
and sync(1) of the file system to tar. On two processors that others use as well, tar's many
processes get a larger share than the installer's threads: measure on a quiet machine. Memory is
the peak of the installer's own process over a whole installation, proof included; the compilers
that the proof starts are processes of their own.
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

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from lab import image, mirror
from lab.debian import debian_mirror
from lab.places import CACHE
from stack import FILES

PYTHON = ["/usr/bin/python3", "-I"]
LEAST_THROUGHPUT, MOST_IDLE, MOST_MEMORY_MB = 0.85, 4.0, 150
TOOLS_FIRST = "import sys; sys.path.insert(0, {tools!r}); "
STAGE = (
    TOOLS_FIRST
    + """
import json, time
from pathlib import Path
from cuda_toolkit.archives import make_tree
from cuda_toolkit.spec import load_spec
from hostlib.atomic import publish_dir
spec, folder = load_spec(Path({spec!r})), Path({folder!r})
(folder / "staging").mkdir()
tree = make_tree(spec.source, folder / "archives", folder / "staging")
began = time.monotonic()
publish_dir(tree, folder / "tree")
print(json.dumps(time.monotonic() - began))
"""
)
INSTALL = (
    TOOLS_FIRST
    + """
import json, resource
from cuda_toolkit.cli import run
run(["install", "--spec", {spec!r}, "--root", {root!r}, "--link", {link!r}])
own = sorted(name for name, module in sys.modules.items()
             if "." not in name and name not in ("cuda_toolkit", "hostlib", "__main__"))
print(json.dumps([resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, own]))
"""
)


def run(command: list[str], text: str = "") -> str:
    """Run it quietly; its standard output."""
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=True)
    return done.stdout


def timed(action: Callable[[], object]) -> float:
    """Seconds that `action` takes."""
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


@contextlib.contextmanager
def served(folder: str) -> Iterator[str]:
    """The address of a server of `folder`, in a process of its own."""
    command = [
        *PYTHON,
        "-u",
        "-m",
        "http.server",
        "--bind",
        "127.0.0.1",
        "--directory",
        folder,
        "0",
    ]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as server:
        assert server.stdout is not None
        try:
            yield server.stdout.readline().split("(")[1].split(")")[0].rstrip("/")
        finally:
            server.terminate()


class Bench:
    """The mirror, the programs as they lie on a host, and a scratch folder on one disk."""

    def __init__(self, work: Path) -> None:
        base = CACHE / f"base-{image.recipe_digest()}"
        self.info = mirror.build(CACHE, debian_mirror(image.apt_sources(base)))
        self.work, self.tools, self.spec = work, work / "tools", work / "spec.json"
        shutil.copytree(FILES / "toolkit", self.tools)
        shutil.copytree(FILES / "hostlib/hostlib", self.tools / "hostlib")
        self.folder = str(self.info.folder)
        self.spec.write_text(json.dumps(self.info.lock(self.folder)))
        self.archives = [
            str(self.info.folder / component.relative_path) for component in self.info.components
        ]
        self.bytes = sum(component.size for component in self.info.components)
        self.root, self.link = work / "toolkits", work / "cuda"

    def tar(self) -> tuple[float, float]:
        """Seconds of `xargs -P2 tar xJf`, and of the same with a sync of the file system."""
        folder = self.work / "tar"
        folder.mkdir()
        command = ["xargs", "-P2", "-n1", "tar", "-C", str(folder), "-xJf"]
        plain = timed(lambda: run(command, "\n".join(self.archives)))
        durable = plain + timed(lambda: run(["sync", "-f", str(folder)]))
        shutil.rmtree(folder)
        return plain, durable

    def installer(self, base_url: str) -> tuple[float, float]:
        """Seconds of the installer up to the merged tree, and up to the published one."""
        self.spec.write_text(json.dumps(self.info.lock(base_url)))
        folder = self.work / "staged"
        folder.mkdir()
        code = STAGE.format(tools=str(self.tools), spec=str(self.spec), folder=str(folder))
        told: list[str] = []
        durable = timed(lambda: told.append(run([*PYTHON, "-c", code])))
        shutil.rmtree(folder)
        return durable - float(told[0]), durable

    def whole(self) -> tuple[int, list[str]]:
        """A whole installation, or one with nothing to do: peak kB, and the modules it loaded."""
        code = INSTALL.format(
            tools=str(self.tools), spec=str(self.spec), root=str(self.root), link=str(self.link)
        )
        kilobytes, modules = json.loads(run([*PYTHON, "-c", code]).splitlines()[-1])
        return int(kilobytes), list(modules)

    def idle(self) -> float:
        """Seconds of the installer with nothing to do."""
        return timed(
            lambda: run(
                [str(self.tools / "bin/cuda-install"), "install", "--spec", str(self.spec),
                 "--root", str(self.root), "--link", str(self.link)]
            )
        )  # fmt: skip


def main() -> int:
    """Measure and print; exit code 1 when a figure misses its bound."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    with (
        tempfile.TemporaryDirectory(prefix="toolkit-bench.", dir=CACHE) as work,
        contextlib.ExitStack() as stack,
    ):
        bench = Bench(Path(work))
        address = stack.enter_context(served(bench.folder))
        memory, _ = bench.whole()
        _, modules = bench.whole()
        imports = [*PYTHON, "-c", f"import {', '.join(modules)}"]
        samples: dict[str, list[float]] = {}

        def add(name: str, *seconds: float) -> None:
            for kind, value in zip(("", ", durable"), seconds, strict=False):
                samples.setdefault(name + kind, []).append(value)

        for number in range(rounds):
            print(f"round {number + 1} of {rounds}", file=sys.stderr, flush=True)
            add("tar", *bench.tar())
            add("installer", *bench.installer(bench.folder))
            add("installer over http", *bench.installer(address))
            add("nothing to do", bench.idle())
            add("same imports", timed(lambda: run(imports)))
            add("python", timed(lambda: run([*PYTHON, "-c", "pass"])))
    median = {name: statistics.median(values) for name, values in samples.items()}
    print(
        f"{len(bench.archives)} archives, {bench.bytes / 1e6:.1f} MB, {rounds} rounds, "
        f"{os.cpu_count()} processors, load {os.getloadavg()[0]:.1f}; medians (least, most)"
    )
    for name, values in samples.items():
        rate = (
            f"{bench.bytes / 1e6 / median[name]:8.1f} MB/s"
            if name.startswith(("tar", "installer"))
            else ""
        )
        low, high = min(values), max(values)
        print(f"  {name:<28} {median[name]:7.3f} s ({low:.3f}, {high:.3f}) {rate}")
    least = {name: min(values) for name, values in samples.items()}
    print(f"  fastest rounds alone: {least['tar'] / least['installer']:.2f} of tar's throughput")
    verdicts = [
        ("throughput against tar", median["tar"] / median["installer"], LEAST_THROUGHPUT, "least"),
        (
            "the same over http",
            median["tar"] / median["installer over http"],
            LEAST_THROUGHPUT,
            "least",
        ),
        (
            "nothing to do against the same imports",
            median["nothing to do"] / median["same imports"],
            MOST_IDLE,
            "most",
        ),
        ("peak memory, MB", memory * 1024 / 1e6, MOST_MEMORY_MB, "most"),
    ]
    missed = 0
    for name, value, bound, kind in verdicts:
        met = value >= bound if kind == "least" else value <= bound
        missed += not met
        print(f"  {name:<40} {value:7.2f}, at {kind} {bound}: {'met' if met else 'MISSED'}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
