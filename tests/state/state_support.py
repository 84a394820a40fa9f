"""What the state tests share: a host of the inventory, and what is read of both."""

from __future__ import annotations

from typing import Any

from testinfra.host import Host


class Target:
    """One host of the inventory: its name, its data, and a connection."""

    def __init__(self, name: str, data: dict[str, Any], host: Host) -> None:
        self.name = name
        self.data = data
        self.host = host


def read_starts(v100: Host, dgx: Host) -> dict[str, str]:
    """Unit → its main process and its restart count."""
    show = "systemctl show -p MainPID -p NRestarts -p ExecMainStartTimestamp "
    return {
        "fable-engine": v100.check_output(show + "fable-engine"),
        "fable-gateway": dgx.check_output(show + "fable-gateway@a fable-gateway@b"),
    }
