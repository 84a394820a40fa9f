"""State tests: read-only, over ssh, on the hosts of any inventory (FABLE_INVENTORY)."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from testinfra.host import Host, get_host

from stack import artifacts, inventory, settings
from stack.errors import StackError
from tests.state.state_support import Target, read_starts

INVENTORY = os.environ.get("FABLE_INVENTORY", "inventory/lab.py")
EXIT_USAGE = 4
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
    try:
        groups = inventory.read(INVENTORY)
    except StackError as error:
        pytest.exit(f"script/verify: {error}", returncode=EXIT_USAGE)
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
        for name, _data in found.values():
            _reach(name, config)
        yield {
            group: Target(name, data, get_host(f"ssh://{name}", ssh_config=str(config), sudo=True))
            for group, (name, data) in found.items()
        }


def _reach(name: str, config: Path) -> None:
    """End the whole run in one line where a host does not let us in, instead of failing each."""
    command = ["ssh", "-F", str(config), "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", name]
    done = subprocess.run(
        [*command, "sudo -n true"], stdin=subprocess.DEVNULL, capture_output=True, text=True,
        timeout=60, check=False,
    )  # fmt: skip
    if done.returncode != 0:
        said = done.stderr.strip().splitlines() or ["no reason given"]
        pytest.exit(
            f"script/verify: {name} ({INVENTORY}): ssh or its sudo does not let us in "
            f"({said[-1]}); mend that until `ssh {name} sudo -n true` works",
            returncode=EXIT_USAGE,
        )


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
