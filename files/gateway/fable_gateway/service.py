"""The process: listens, tells systemd, follows the key file, drains on SIGTERM."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import time
from pathlib import Path

import uvloop
from aiohttp import web

from fable_gateway import config as settings
from fable_gateway import keyfile, log
from fable_gateway.app import Gateway
from fable_gateway.errors import EXIT_OK, EXIT_UNABLE, GatewayError
from fable_gateway.protocol import Protocol, prepare

BACKLOG = 1024
FIRST_INHERITED = 3  # sd_listen_fds(3)
KEYS_LOOK_S = 1.0
# After SIGTERM; the unit's TimeoutStopSec is longer.
DRAIN_S = 60.0
# For connections that are open and silent: what they send within it is still answered.
GRACE_S = 1.0
# How long a connection may take to end after the drain, before it is cut.
CUT_S = 1.0


def serve(path: Path) -> int:
    """Serve with the config at `path` until SIGTERM or SIGINT.

    Raises:
        GatewayError: the config or a key is wrong (1), or a file cannot be read or the address not
            listened on (2).
    """
    config = settings.load(path)
    seen = keyfile.mark(config.keys_file)
    keys = keyfile.load(config.keys_file)
    log.take_over()
    return uvloop.run(_serve(Gateway(config, keys), seen))


async def _serve(gateway: Gateway, seen: keyfile.Mark) -> int:
    config = gateway.config
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    listener, is_inherited = _listener(config)
    runner = web.AppRunner(gateway.app(), handler_cancellation=True, shutdown_timeout=CUT_S)
    await runner.setup()
    web_server = runner.server
    assert web_server is not None
    server = await loop.create_server(
        lambda: Protocol(web_server, loop), sock=listener, backlog=BACKLOG
    )
    following = asyncio.create_task(_follow_keys(gateway, seen))
    try:
        log.write(
            "listening",
            host=config.host,
            port=config.port,
            inherited=is_inherited or None,
            keys=len(gateway.keys.keys),
        )
        notify("READY=1")
        await stop.wait()
        notify("STOPPING=1")
        # Until they end, requests here count beside the cap of the gateway that follows.
        log.write("stopping", active=gateway.active, in_flight_beside_next=gateway.gauge.in_flight)
        server.close()
        await _drain(gateway, web_server)
    finally:
        following.cancel()
        await runner.cleanup()
    log.write("stopped", cut=gateway.active or None)
    return EXIT_OK


def _listener(config: settings.Config) -> tuple[socket.socket, bool]:
    """systemd's socket if there is one, or a socket of our own; whether it is systemd's."""
    if os.environ.get("LISTEN_PID") == str(os.getpid()):
        inherited = socket.socket(fileno=FIRST_INHERITED)
        prepare(inherited)
        return inherited, True
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    try:
        own = socket.create_server((config.host, config.port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise GatewayError(
            f"{config.host}:{config.port}: cannot be listened on "
            f"({os.strerror(error.errno) if error.errno else error}); "
            "free the port or change listen in the settings",
            EXIT_UNABLE,
        ) from None
    prepare(own)
    return own, False


async def _drain(gateway: Gateway, server: web.Server) -> None:
    """After the listener is closed: let what runs finish, up to the deadline.

    A connection that was accepted and has not asked yet is not sent away either.
    """
    gateway.draining = True
    begun = time.monotonic()
    while (elapsed := time.monotonic() - begun) < DRAIN_S:
        if not gateway.active and (not server.connections or elapsed >= GRACE_S):
            return
        await asyncio.sleep(0.02)


async def _follow_keys(gateway: Gateway, seen: keyfile.Mark) -> None:
    """Take in the key file on SIGHUP and whenever it changes."""
    path = gateway.config.keys_file
    asked = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, asked.set)
    while True:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(KEYS_LOOK_S):
                await asked.wait()
        mark = keyfile.mark(path)
        if asked.is_set() or mark != seen:
            asked.clear()
            seen = mark
            _reload_keys(gateway, path)


def _reload_keys(gateway: Gateway, path: Path) -> None:
    """Take the keys from the file; keep the old ones if it is broken."""
    try:
        gateway.keys = keyfile.load(path)
    except GatewayError as error:
        log.write("reload", error=str(error), kept_keys=len(gateway.keys.keys))
        return
    log.write("reload", keys=len(gateway.keys.keys))


def notify(state: str) -> None:
    """Tell systemd `state` (sd_notify(3)); nothing happens without a NOTIFY_SOCKET."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    if address.startswith("@"):
        address = "\0" + address[1:]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as channel:
        channel.sendto(state.encode(), address)
