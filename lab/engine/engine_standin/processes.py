"""The process tree: API server, engine core, one worker a rank; and the GPU memory they hold.

The children only sleep: the simulation runs in the API server. They exist so that a control group,
a signal and a killed process behave as with the engine:
- a worker that dies takes the engine core with it, and a dead core takes its workers;
- a killed API server leaves core and workers behind for ORPHAN_SECONDS (the engine: over 40).
"""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NoReturn

from engine_standin import bootlog
from engine_standin.arguments import Arguments
from engine_standin.timing import Timing, interpolate

ORPHAN_SECONDS = 60.0
ABANDONED_WORKER_SECONDS = 600.0
STOP_SECONDS = 5.0
CARD_MIB = 32768
OCCUPIED_MIB = 200
CORE_SIGNALS = {signal.SIGTERM, signal.SIGCHLD}


def state_folder(environment: Mapping[str, str]) -> Path:
    """Where GPU memory is registered, one file `holder-<pid>.json` a process."""
    return Path(environment.get("LAB_GPU_STATE", "/run/lab-gpu"))


def visible_cards(environment: Mapping[str, str], ranks: int) -> list[int]:
    """The card of each rank, by CUDA_VISIBLE_DEVICES.

    Raises:
        ValueError: fewer cards are visible than there are ranks.
    """
    value = environment.get("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    cards = [int(part) for part in value.split(",") if part.strip().isdecimal()]
    if len(cards) < ranks:
        raise ValueError(f"CUDA_VISIBLE_DEVICES={value} shows fewer cards than {ranks} ranks")
    return cards[:ranks]


def cards_occupied(cards: Collection[int]) -> bool:
    """Whether nvidia-smi reports a visible card in use; without nvidia-smi none is."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return False
    query = [program, "--query-gpu=index,memory.used", "--format=csv,noheader,nounits"]
    answer = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout
    rows = (map(int, line.split(",")) for line in answer.splitlines())
    return any(card in cards and used >= OCCUPIED_MIB for card, used in rows)


def start_ticks(pid: int) -> int:
    """Start time of a process in clock ticks since boot: with the pid, its identity."""
    stat = Path(f"/proc/{pid}/stat").read_text()
    return int(stat.rpartition(")")[2].split()[19])


def holder_file(folder: Path, pid: int) -> Path:
    """The registration of one process."""
    return folder / f"holder-{pid}.json"


def register(folder: Path, card: int, mib: int) -> None:
    """Register that this process holds `mib` MiB of card number `card`."""
    pid = os.getpid()
    entry = {
        "pid": pid,
        "start_ticks": start_ticks(pid),
        "gpu": card,
        "mib": mib,
        "user": getpass.getuser(),
    }
    target = holder_file(folder, pid)
    staged = target.with_suffix(".part")
    staged.write_text(json.dumps(entry))
    staged.rename(target)


@dataclass(frozen=True)
class Boot:
    """Everything that a boot needs to know."""

    arguments: Arguments
    timing: Timing
    faults: frozenset[str]
    scale: float
    folder: Path
    cards: list[int]

    @property
    def card_mib(self) -> int:
        """Memory that a worker holds [MiB]."""
        held = interpolate(self.timing.card_gb, self.arguments.gpu_memory_utilization)
        return max(0, min(CARD_MIB, round(held * 1024)))


@dataclass
class Core:
    """The engine core as its parent sees it; `pipe` ends when the core does."""

    pid: int
    pipe: int
    workers: list[int]

    def stop(self) -> None:
        """End the core and its workers; does nothing when the core is gone."""
        try:
            os.kill(self.pid, signal.SIGTERM)
        except ProcessLookupError:
            return
        if not _reap({self.pid}, STOP_SECONDS):
            os.kill(self.pid, signal.SIGKILL)
            _reap({self.pid}, STOP_SECONDS)


class BootFailed(Exception):
    """The engine core ended before it was ready; the log says why."""


def start(boot: Boot, listener: socket.socket) -> Core:
    """Fork the engine core and wait until all workers are ready.

    The children give up their copies of `listener`: orphans hold memory, not the port.

    SIGTERM during the boot ends core and process with exit code 0.

    Raises:
        BootFailed: the core gave up.
    """
    pipe, ready = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(pipe)
        listener.close()
        _child(lambda: _core_main(boot, ready))
    os.close(ready)
    core = Core(pid, pipe, [])

    def leave(_signal: int, _frame: object) -> None:
        core.stop()
        raise SystemExit(0)

    if "hang-on-sigterm" not in boot.faults:
        signal.signal(signal.SIGTERM, leave)
        signal.signal(signal.SIGINT, leave)
    with os.fdopen(os.dup(pipe)) as stream:
        line = stream.readline()
    if not line:
        os.waitpid(pid, 0)
        raise BootFailed
    core.workers = json.loads(line)
    return core


def _child(work: Callable[[], int]) -> NoReturn:
    """Run `work` in a forked child and never return to the parent's code."""
    code = 1
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        code = work()
    finally:
        os._exit(code)


def _name(title: str) -> None:
    Path("/proc/self/comm").write_text(title[:15])


def _reap(pids: set[int], seconds: float) -> bool:
    """Wait for children to end, up to `seconds`; whether all did. Removes the ended from `pids`."""
    deadline = time.monotonic() + seconds
    while pids and time.monotonic() < deadline:
        for pid in list(pids):
            try:
                if os.waitpid(pid, os.WNOHANG)[0]:
                    pids.discard(pid)
            except ChildProcessError:
                pids.discard(pid)
        if pids:
            time.sleep(0.01)
    return not pids


def _worker_main(boot: Boot, rank: int, loaded: int, core_alive: int) -> int:
    _name(f"VLLM::Worker_TP{rank}")
    abandoned = "orphan-worker" in boot.faults and rank == boot.arguments.tensor_parallel - 1
    if abandoned:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, CORE_SIGNALS)
    for line in bootlog.worker_lines(boot.arguments, rank, boot.faults):
        bootlog.emit(f"Worker_TP{rank}", os.getpid(), line)
    register(boot.folder, boot.cards[rank], boot.card_mib)
    time.sleep(boot.timing.boot_seconds * boot.scale)
    os.write(loaded, b".")
    os.close(loaded)
    os.read(core_alive, 1)  # returns when the core is gone
    if abandoned:
        time.sleep(ABANDONED_WORKER_SECONDS)
    return 0


def _core_main(boot: Boot, ready: int) -> int:
    _name("VLLM::EngineCore")
    server = os.getppid()
    signal.pthread_sigmask(signal.SIG_BLOCK, CORE_SIGNALS)
    for line in bootlog.core_lines(boot.arguments, boot.faults):
        bootlog.emit("EngineCore_DP0", os.getpid(), line)
    loading, loaded = os.pipe()
    core_alive, alive = os.pipe()
    workers: list[int] = []
    for rank in range(boot.arguments.tensor_parallel):
        pid = os.fork()
        if not pid:
            for descriptor in (ready, loading, alive):
                os.close(descriptor)
            _child(partial(_worker_main, boot, rank, loaded, core_alive))
        workers.append(pid)
    os.close(loaded)
    os.close(core_alive)
    try:
        return _core_life(boot, server, workers, loading, ready)
    finally:
        _end_workers(boot, workers)


def _core_life(boot: Boot, server: int, workers: list[int], loading: int, ready: int) -> int:
    """Wait for the workers to load, report the pool, then live until told or left alone."""
    own = os.getpid()
    expected = len(workers)
    while expected:
        count = len(os.read(loading, expected))  # b"" when a worker died before it had loaded
        if not count:
            message = ("core.py:890", "EngineCore failed to start: a worker died")
            bootlog.emit("EngineCore_DP0", own, message, "ERROR")
            return 1
        expected -= count
    try:
        if boot.arguments.dtype == "bfloat16":
            raise ValueError("Bfloat16 is only supported on GPUs with compute capability 8.0 or up")
        for line in bootlog.memory_lines(boot.arguments, boot.timing):
            bootlog.emit("EngineCore_DP0", own, line)
    except ValueError as error:
        message = ("core.py:890", f"EngineCore failed to start. ValueError: {error}")
        bootlog.emit("EngineCore_DP0", own, message, "ERROR")
        return 1
    os.write(ready, json.dumps(workers).encode() + b"\n")
    left_alone: float | None = None
    while True:
        got = signal.sigtimedwait(CORE_SIGNALS, 0.5)
        if got and got.si_signo == signal.SIGTERM:
            return 0
        if any(_reap({pid}, 0.001) for pid in workers):
            return 1
        if os.getppid() != server:
            left_alone = left_alone or time.monotonic()
            if time.monotonic() - left_alone > ORPHAN_SECONDS:
                return 0


def _end_workers(boot: Boot, workers: list[int]) -> None:
    spared = {workers[-1]} if "orphan-worker" in boot.faults else set()
    left = set(workers) - spared
    for number in (signal.SIGTERM, signal.SIGKILL):
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        if _reap(left, STOP_SECONDS / 2):
            break
    for pid in set(workers) - spared:
        holder_file(boot.folder, pid).unlink(missing_ok=True)
