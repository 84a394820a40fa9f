#!/usr/bin/env python3
"""What the gateway adds to a request, beside nginx and the floor that Python has.

    .venv/bin/python bench/gateway.py [--rounds N]

Four ways to one simulated engine on loopback, each a single process: `direct`; `nginx` (if it is
installed; one worker, no buffering); `floor`, bytes copied between two sockets by asyncio on
uvloop; and `gateway`, with keys, cap and normalisation on. In each round every way is taken once,
in the opposite order every second round; printed are the medians of the rounds.

streamed  8 streams of 256 events at 50 a second, the requests declaring tools. An event carries
          the engine's clock; added is the median of (arrival - clock) over that of direct.
          Processor time is that of the way's own process, for 1,000 events.
unary     300 requests one after the other on one connection, 1 KiB of answer; added as above.
makespan  an engine with two slots, 8 requests at once of 40 events each; until the last one ends.
memory    resident, the most during 200 streams at once.

Held against: streamed 2.5 x nginx's added time and 3.3 x its processor time, unary 6 x, makespan
+1 % of direct, memory 80 MB.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import shutil
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import uvloop

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "files/gateway")]

from bench.gateway_ways import Copy, Engine, forked, nginx  # noqa: E402
from tests.unit.gateway_support import KEY, free_port, gateway_before  # noqa: E402

STREAMS, EVENTS = 8, 256
UNARY = 300
JOBS, JOB_EVENTS = 8, 40
MANY, MANY_EVENTS = 200, 60
CLOCK = re.compile(rb'(?: and |"created":)(\d{12,})[",]')
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    for name in ("ferry_times", "save_file", "shell")
]


@dataclass
class Way:
    """A way to the engine, and the process whose costs are counted."""

    name: str
    port: int
    pid: int | None


class Client(asyncio.Protocol):
    """Collects, for each answer, how late every clock in it was when it arrived."""

    def __init__(self) -> None:
        self.late_ns: list[int] = []
        self.ended = asyncio.Event()
        self._tail = b""

    def data_received(self, data: bytes) -> None:
        now = time.monotonic_ns()
        data = self._tail + data
        for found in CLOCK.finditer(data):
            self.late_ns.append(now - int(found[1]))
        whole_until = max(data.rfind(b"\n"), data.rfind(b"}"))
        self._tail = data[whole_until + 1 :]
        if data.endswith((b"0\r\n\r\n", b"]}")):
            self.ended.set()

    def connection_lost(self, _error: Exception | None) -> None:
        self.ended.set()


def request(**asked: object) -> bytes:
    """A chat request that declares tools."""
    value = {"model": "qwen38-27b", "messages": [{"role": "user", "content": "hi"}], "tools": TOOLS}
    body = json.dumps(value | {"stream_options": {"include_usage": True}} | asked).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


async def ask(way: Way, content: bytes) -> list[int]:
    loop = asyncio.get_running_loop()
    transport, client = await loop.create_connection(Client, "127.0.0.1", way.port)
    transport.write(content)
    await asyncio.wait_for(client.ended.wait(), 120)
    transport.close()
    return client.late_ns


async def streamed(way: Way) -> tuple[float, float]:
    """Median lateness in us, and processor seconds for 1,000 events."""
    before = cpu_s(way.pid)
    found = await asyncio.gather(
        *(ask(way, request(stream=True, seed=EVENTS)) for _ in range(STREAMS))
    )
    late = [each for answer in found for each in answer]
    if len(late) < STREAMS * EVENTS:
        raise SystemExit(f"{way.name}: {len(late)} events of {STREAMS * EVENTS} arrived")
    return statistics.median(late) / 1000, (cpu_s(way.pid) - before) * 1000 / len(late)


async def unary(way: Way) -> float:
    """Median of a whole request in us."""
    loop = asyncio.get_running_loop()
    transport, client = await loop.create_connection(Client, "127.0.0.1", way.port)
    content, taken = request(), []
    for _ in range(UNARY):
        client.ended.clear()
        start = time.monotonic_ns()
        transport.write(content)
        await asyncio.wait_for(client.ended.wait(), 30)
        taken.append(time.monotonic_ns() - start)
    transport.close()
    return statistics.median(taken) / 1000


async def makespan(way: Way) -> float:
    """Seconds until 8 requests have been through two slots."""
    start = time.monotonic()
    content = request(stream=True, seed=JOB_EVENTS, user="two slots")
    await asyncio.gather(*(ask(way, content) for _ in range(JOBS)))
    return time.monotonic() - start


async def memory(way: Way) -> float:
    """Resident MB, the most seen during many streams."""
    most = 0.0

    async def watch() -> None:
        nonlocal most
        while True:
            most = max(most, resident_mb(way.pid))
            await asyncio.sleep(0.1)

    watching = asyncio.ensure_future(watch())
    await asyncio.gather(*(ask(way, request(stream=True, seed=MANY_EVENTS)) for _ in range(MANY)))
    watching.cancel()
    return most


def cpu_s(pid: int | None) -> float:
    """Processor seconds of all threads of a process so far, by the scheduler's own clock."""
    threads = Path(f"/proc/{pid}/task").iterdir() if pid else ()
    return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9


def resident_mb(pid: int | None) -> float:
    if pid is None:
        return 0.0
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE") / 1e6


def in_turn(ways: list[Way], number: int) -> list[Way]:
    return ways if number % 2 == 0 else ways[::-1]


async def measure(ways: list[Way], rounds: int) -> dict[str, dict[str, float]]:
    """Medians by way and figure."""
    seen: dict[str, dict[str, list[float]]] = {way.name: {} for way in ways}

    def note(way: Way, **figures: float) -> None:
        for name, value in figures.items():
            seen[way.name].setdefault(name, []).append(value)

    for number in range(rounds):
        for way in in_turn(ways, number):
            late, cpu = await streamed(way)
            note(way, late=late, cpu=cpu, unary=await unary(way), makespan=await makespan(way))
        print(f"round {number + 1} of {rounds} done", file=sys.stderr, flush=True)
    for way in ways:
        note(way, memory=await memory(way))
    return {
        way: {name: statistics.median(values) for name, values in figures.items()}
        for way, figures in seen.items()
    }


def report(found: dict[str, dict[str, float]]) -> None:
    direct = found["direct"]
    added = {
        name: figures
        | {key: figures[key] - direct[key] for key in ("late", "unary")}
        | {"makespan": figures["makespan"] / direct["makespan"] - 1}
        for name, figures in found.items()
    }
    print("         stream added us  cpu s/1000  unary added us  makespan  MB at 200")
    for name, own in added.items():
        print(
            f"{name:8}{own['late']:16.0f}{own['cpu']:12.3f}{own['unary']:16.0f}"
            f"{own['makespan']:10.2%}{own['memory']:11.1f}"
        )
    for name in ("floor", "gateway") if "nginx" in added else ():
        ratios = {key: added[name][key] / added["nginx"][key] for key in ("late", "cpu", "unary")}
        print(f"{name} / nginx:", ", ".join(f"{key} {r:.2f}" for key, r in ratios.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        engine, floor, other = free_port(), free_port(), free_port()
        stack.enter_context(forked(Engine, engine))
        ways = [Way("direct", engine, None)]
        if shutil.which("nginx"):
            ways.append(Way("nginx", other, stack.enter_context(nginx(engine, other, folder))))
        copying = lambda: Copy(engine)  # noqa: E731
        ways.append(Way("floor", floor, stack.enter_context(forked(copying, floor))))
        gateway = stack.enter_context(
            gateway_before(f"http://127.0.0.1:{engine}", folder, max_in_flight=MANY)
        )
        ways.append(Way("gateway", gateway.port, gateway.process.pid))
        time.sleep(1)
        report(uvloop.run(measure(ways, rounds)))


if __name__ == "__main__":
    main()
