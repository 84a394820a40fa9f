"""The process: listens, tells systemd, reloads keys on SIGHUP, drains on SIGTERM."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import socket
from pathlib import Path

import uvloop
from aiohttp import web

from fable_gateway import config as settings
from fable_gateway import log
from fable_gateway.app import Gateway
from fable_gateway.errors import EXIT_OK, EXIT_UNABLE, GatewayError

BACKLOG = 1024
CLIENT_IDLE_S = 75.0
# How long a connection may take to end after the drain, before it is cut.
CUT_S = 1.0


def serve(path: Path) -> int:
    """Serve with the config at `path` until SIGTERM or SIGINT.

    Raises:
        GatewayError: the config is wrong (1) or the address cannot be listened on (2).
    """
    config = settings.load(path)
    log.take_over()
    return uvloop.run(_serve(path, config))


async def _serve(path: Path, config: settings.Config) -> int:
    gateway = Gateway(config)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    loop.add_signal_handler(signal.SIGHUP, _reload_keys, gateway, path)
    runner = web.AppRunner(
        gateway.app(),
        handler_cancellation=True,
        access_log=None,
        keepalive_timeout=CLIENT_IDLE_S,
        shutdown_timeout=CUT_S,
    )
    await runner.setup()
    try:
        await _listen(runner, config)
        log.write("listening", host=config.host, port=config.port, keys=len(config.keys.digests))
        notify("READY=1")
        await stop.wait()
        notify("STOPPING=1")
        log.write("stopping", active=gateway.active)
    finally:
        await runner.cleanup()
    return EXIT_OK


async def _listen(runner: web.AppRunner, config: settings.Config) -> None:
    try:
        await web.TCPSite(runner, config.host, config.port, backlog=BACKLOG).start()
    except OSError as error:
        raise GatewayError(
            f"{config.host}:{config.port}: cannot be listened on "
            f"({os.strerror(error.errno) if error.errno else error}); "
            "free the port or change listen in the settings",
            EXIT_UNABLE,
        ) from None


def _reload_keys(gateway: Gateway, path: Path) -> None:
    """Take the keys from the file; keep the old ones if it is broken."""
    try:
        fresh = settings.load(path)
    except GatewayError as error:
        log.write("reload", error=str(error), kept_keys=len(gateway.keys.digests))
        return
    gateway.keys = fresh.keys
    changed = [
        item.name
        for item in dataclasses.fields(fresh)
        if item.name != "keys" and getattr(fresh, item.name) != getattr(gateway.config, item.name)
    ]
    log.write("reload", keys=len(fresh.keys.digests), needs_restart=changed or None)


def notify(state: str) -> None:
    """Tell systemd `state` (sd_notify(3)); nothing happens without a NOTIFY_SOCKET."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    if address.startswith("@"):
        address = "\0" + address[1:]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as channel:
        channel.sendto(state.encode(), address)
