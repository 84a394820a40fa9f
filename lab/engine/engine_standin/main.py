"""The stand-in's main program: arguments, boot, serve."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from engine_standin import bootlog, faults, timing
from engine_standin.arguments import PROGRAM, Arguments, parse
from engine_standin.processes import (
    Boot,
    BootFailed,
    cards_occupied,
    start,
    state_folder,
    visible_cards,
)
from engine_standin.simulation import Engine

KNOWN_PREFIX = "VLLM_"
KNOWN_VARIABLES = {"VLLM_CACHE_ROOT", "VLLM_ENGINE_READY_TIMEOUT_S", "VLLM_NO_USAGE_STATS"}


def _bound(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet: clients are refused until the engine is ready."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    listener.bind((host, port))
    return listener


def _prepare(arguments: Arguments) -> Boot:
    """Read the environment.

    Raises:
        OSError, ValueError: a variable or what it points to is wrong.
    """
    environment = os.environ
    scale = float(environment.get("LAB_ENGINE_TIME_SCALE", "1"))
    if scale <= 0:
        raise ValueError(f"LAB_ENGINE_TIME_SCALE={scale} is not above 0")
    folder = state_folder(environment)
    with contextlib.suppress(PermissionError):
        folder.mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK):
        raise PermissionError(
            f"cannot register GPU memory in {folder}: make it mode 1777, or set LAB_GPU_STATE"
        )
    return Boot(
        arguments=arguments,
        timing=timing.load(Path(environment.get("LAB_ENGINE_TIMING", timing.DEFAULT_FILE))),
        faults=faults.read(environment),
        scale=scale,
        folder=folder,
        cards=visible_cards(environment, arguments.tensor_parallel),
    )


def _announce(boot: Boot) -> None:
    for line in bootlog.server_lines(boot.arguments, boot.faults):
        bootlog.emit("APIServer", os.getpid(), line)
    for name in sorted(os.environ):
        if name.startswith(KNOWN_PREFIX) and name not in KNOWN_VARIABLES:
            line = ("envs.py:1520", f"Unknown vLLM environment variable detected: {name}")
            bootlog.emit("APIServer", os.getpid(), line, "WARNING")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the server; returns the exit code (see the package)."""
    arguments = parse(sys.argv[1:] if argv is None else argv)
    try:
        boot = _prepare(arguments)
        listener = _bound(arguments.host, arguments.port)
        slowed = cards_occupied(boot.cards)
    except (OSError, ValueError) as error:
        print(f"{PROGRAM}: error: {error}", file=sys.stderr)
        return 1
    _announce(boot)
    try:
        core = start(boot, listener)
    except BootFailed:
        print(f"{PROGRAM}: error: engine core initialization failed", file=sys.stderr)
        return 1
    if "exit-after-boot" in boot.faults:
        core.stop()
        return 0
    slowdown = boot.timing.occupied_slowdown if slowed else 1.0
    engine = Engine(boot.timing, arguments.depth, arguments.max_num_seqs, slowdown)
    # Imported after the fork: the children stay small and know no event loop.
    from engine_standin.server import serve

    try:
        asyncio.run(serve(boot, core, engine, listener))
    finally:
        core.stop()
    return 0
