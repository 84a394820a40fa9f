"""Units as the hosts run them: decided by what is loaded and running, not by what just changed.

A run that was cut off after it wrote a file leaves nothing for "did this run change it" to see.
"""

from __future__ import annotations

import shlex
from collections.abc import Generator
from typing import Any

from pyinfra import host
from pyinfra.api import StringCommand, operation

from stack.errors import StackError
from stack.facts.programs import (
    PORT_OWNER,
    JsonAnswer,
    PacketFilterTable,
    PortOwner,
    UnitProperties,
)

Commands = Generator[StringCommand, None, None]


@operation()
def units_read(units: list[str]) -> Commands:
    """Let systemd read its units again where a file is newer than what it knows."""
    stale = [unit for unit in units if _properties(unit).get("NeedDaemonReload") == "yes"]
    if not stale:
        host.noop("systemd knows the units as they are")
        return
    yield StringCommand("systemctl daemon-reload")


@operation()
def unit_enabled(unit: str) -> Commands:
    """Start `unit` at boot; leaves it as it runs now."""
    if _properties(unit).get("UnitFileState") == "enabled":
        host.noop(f"{unit} is enabled")
        return
    yield StringCommand(f"systemctl enable {shlex.quote(unit)}")


@operation()
def timer_running(unit: str) -> Commands:
    """Have the timer `unit` run now and after every boot."""
    found = _properties(unit)
    if found.get("UnitFileState") == "enabled" and found.get("ActiveState") == "active":
        host.noop(f"{unit} runs")
        return
    yield StringCommand(f"systemctl enable --now {shlex.quote(unit)}")


@operation()
def packet_filter_loaded(unit: str, table: str, version: str) -> Commands:
    """Have `table` loaded in this `version` (a text that only these rules hold), through `unit`."""
    active = _properties(unit).get("ActiveState") == "active"
    if active and version in host.get_fact(PacketFilterTable, table=table, _sudo=True):
        host.noop(f"table {table} is loaded")
        return
    yield StringCommand(f"systemctl reload-or-restart {shlex.quote(unit)}")


@operation()
def port_held(port: int, socket: str, service: str, take_over: bool, way_out: str) -> Commands:
    """Have systemd hold `port` by the unit `socket`, which `service` belongs to.

    Args:
        take_over: stop and disable whatever else listens there.
        way_out: the setting that says so, for the error.

    Raises:
        StackError: something else listens there and is not to be taken over; nothing was changed.
    """
    owner = host.get_fact(PortOwner, port=port, _sudo=True)
    if owner.get("unit") == socket:
        host.noop(f"{socket} holds port {port}")
        return
    if owner and owner.get("unit") != service and not take_over:
        raise StackError(f"{host.name}: {held_by_another(port, owner)}; look at it, then {way_out}")
    if owner:
        # Loaded or not, the unit that is about to have our text must not be disabled.
        release = ["python3", "-I", "-c", PORT_OWNER, "release", str(port), service]
        yield StringCommand(shlex.join(release))
    yield StringCommand(f"systemctl stop {shlex.quote(service)}")
    yield StringCommand(f"systemctl start {shlex.quote(socket)}")


def held_by_another(port: int, owner: dict[str, Any]) -> str:
    """The begin of the error for a port that is not ours."""
    unit = owner.get("unit") or "a process outside any unit"
    user = f" of user {owner['user']}" if owner.get("user") else ""
    return f"port {port} is held by {unit}{user} (process {owner['pid']}: {owner['command']})"


@operation()
def running_deployment(unit: str, url: str, deployment: str) -> Commands:
    """Have `unit` run `deployment`, which its server reports at `url` under that very key."""
    active = _properties(unit).get("ActiveState") == "active"
    if active and host.get_fact(JsonAnswer, url=url).get("deployment") == deployment:
        host.noop(f"{unit} runs deployment {deployment}")
        return
    yield StringCommand(f"systemctl restart {shlex.quote(unit)}")


def _properties(unit: str) -> dict[str, str]:
    found: dict[str, str] = host.get_fact(UnitProperties, unit=unit)
    return found
