"""The host that pyinfra works on, as checked settings; and what one host must know of the other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pyinfra import host, inventory

from stack import artifacts, settings
from stack.errors import StackError


def inventory_file(groups: list[str]) -> str:
    """The inventory that the host came from: pyinfra makes its name a group."""
    names = [name for name in groups if name not in ("all", *settings.SECTIONS)]
    return f"inventory/{names[0]}.py" if names else "the inventory"


def engine_settings() -> settings.EngineHost:
    """Checked settings of the present host of group v100."""
    return settings.engine_host(_data(host), inventory_file(host.groups))


def gateway_settings() -> settings.GatewayHost:
    """Checked settings of the present host of group dgx."""
    return settings.gateway_host(_data(host), inventory_file(host.groups))


def locked_artifacts(of: settings.EngineHost) -> artifacts.Artifacts:
    """The lock of the present host, with these settings: the inventory's own, or the project's."""
    lock = Path(host.data.get("artifacts") or artifacts.LOCK)
    return artifacts.load(lock, of.checkpoint.source)


def peer_address(group: str) -> str:
    """The address of the one host in the other group.

    Raises:
        StackError: the inventory has none, several, or one without an address.
    """
    peers = list(inventory.get_group(group))
    if len(peers) != 1:
        raise StackError(
            f"{inventory_file(host.groups)}: group {group} has {len(peers)} hosts; exactly one is "
            "supported"
        )
    return settings.host_address(
        {"address": peers[0].data.get("address")}, group, inventory_file(host.groups)
    )


def _data(of: Any) -> dict[str, Any]:
    keys = ("address", "overrides", *settings.SECTIONS["v100"], *settings.SECTIONS["dgx"])
    return {key: of.data.get(key) for key in keys}
