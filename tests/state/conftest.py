"""State tests: read-only, over ssh, on the hosts of any inventory (FABLE_INVENTORY)."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from testinfra.host import Host, get_host

from stack import artifacts, inventory, settings
from tests.state.state_support import Target, read_starts

INVENTORY = os.environ.get("FABLE_INVENTORY", "inventory/lab.py")
SSH_OPTIONS = {
    "ssh_hostname": "HostName",
    "ssh_port": "Port",
    "ssh_user": "User",
    "ssh_key": "IdentityFile",
    "ssh_known_hosts_file": "UserKnownHostsFile",
    "ssh_strict_host_key_checking": "StrictHostKeyChecking",
}


@pytest.fixture(scope="session")
def targets() -> Iterator[dict[str, Target]]:
    """Group name → its one host, connected with one multiplexed ssh connection a host."""
    groups = inventory.read(INVENTORY)
    with tempfile.TemporaryDirectory(prefix="fable-ssh-") as folder:
        config = Path(folder) / "config"
        blocks = []
        found = {}
        for group, (member,) in groups.items():
            data = member.data
            lines = [
                f"  {option} {data[key]}" for key, option in SSH_OPTIONS.items() if data.get(key)
            ]
            blocks.append("\n".join([f"Host {member.name}", *lines]))
            found[group] = (member.name, data)
        blocks.append(
            f"Host *\n  ControlMaster auto\n  ControlPath {folder}/%C\n  ControlPersist 60\n"
            "Include ~/.ssh/config"
        )
        config.write_text("\n".join(blocks) + "\n")
        yield {
            group: Target(name, data, get_host(f"ssh://{name}", ssh_config=str(config), sudo=True))
            for group, (name, data) in found.items()
        }


@pytest.fixture(scope="session")
def v100(targets: dict[str, Target]) -> Host:
    """The engine's host."""
    return targets["v100"].host


@pytest.fixture(scope="session")
def dgx(targets: dict[str, Target]) -> Host:
    """The gateway's host."""
    return targets["dgx"].host


@pytest.fixture(scope="session")
def engine_settings(targets: dict[str, Target]) -> settings.EngineHost:
    """The settings that the engine's host was deployed from."""
    return settings.engine_host(targets["v100"].data, INVENTORY)


@pytest.fixture(scope="session")
def gateway_settings(targets: dict[str, Target]) -> settings.GatewayHost:
    """The settings that the gateway's host was deployed from."""
    return settings.gateway_host(targets["dgx"].data, INVENTORY)


@pytest.fixture(scope="session")
def locked(targets: dict[str, Target], engine_settings: settings.EngineHost) -> artifacts.Artifacts:
    """The lock that the engine's host was deployed from."""
    lock = Path(targets["v100"].data.get("artifacts") or artifacts.LOCK)
    return artifacts.load(lock, engine_settings.checkpoint.source)


@pytest.fixture(scope="session", autouse=True)
def starts_before(v100: Host, dgx: Host) -> dict[str, str]:
    """Main process and restart count of both servers before the first test."""
    return read_starts(v100, dgx)
