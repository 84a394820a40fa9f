"""Units as the hosts run them: decided by what is loaded and running, not by what just changed.

A run that was cut off after it wrote a file leaves nothing for "did this run change it" to see.
"""

from __future__ import annotations

import shlex
from collections.abc import Generator

from pyinfra import host
from pyinfra.api import StringCommand, operation

from stack.facts.programs import JsonAnswer, PacketFilterTable, UnitProperties

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
