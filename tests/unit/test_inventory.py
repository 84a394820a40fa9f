"""What is read of an inventory: the limit, what it leaves unchecked, a host that is away."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from stack.errors import StackError, UsageError
from stack.inventory import read

REPOSITORY = Path(__file__).resolve().parent.parent.parent
GOOD_KEY: dict[str, object] = {"gateway.keys": {"somebody": "0" * 64}}
NOBODY: dict[str, object] = {"access.consumers": []}


def write(folder: Path, v100: dict[str, object], dgx: dict[str, object]) -> str:
    path = folder / "production.py"
    path.write_text(f"v100 = [('v100', {v100!r})]\ndgx = [('dgx', {dgx!r})]\n")
    return str(path)


def host(address: str | None, overrides: dict[str, object]) -> dict[str, object]:
    return {"address": address, "overrides": overrides}


def test_a_limit_leaves_the_other_hosts_settings_unchecked(tmp_path: Path) -> None:
    undecided = write(tmp_path, host("198.51.100.1", {}), host("198.51.100.2", GOOD_KEY))
    assert set(read(undecided, "dgx")) == {"v100", "dgx"}
    with pytest.raises(StackError, match="consumers: not decided"):
        read(undecided)
    keyless = write(tmp_path, host("198.51.100.1", NOBODY), host("198.51.100.2", {}))
    assert set(read(keyless, "v100")) == {"v100", "dgx"}
    with pytest.raises(StackError, match=r"gateway\.keys: nobody .*script/key NAME"):
        read(keyless)


@pytest.mark.parametrize(("address", "said"), [(None, "is not set"), ("here", "is no IP address")])
def test_a_limit_still_needs_the_other_hosts_address(
    tmp_path: Path, address: str | None, said: str
) -> None:
    inventory = write(tmp_path, host(address, NOBODY), host("198.51.100.2", GOOD_KEY))
    with pytest.raises(StackError, match=rf"v100\.address.* {said}"):
        read(inventory, "dgx")


def test_a_limit_that_is_no_host_is_wrong_usage(tmp_path: Path) -> None:
    inventory = write(tmp_path, host("198.51.100.1", {}), host("198.51.100.2", {}))
    with pytest.raises(UsageError, match=r"--limit nobody: .* knows dgx, v100"):
        read(inventory, "nobody")


def test_an_inventory_that_is_no_python_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "production.py"
    path.write_text("v100 = [(\n")
    with pytest.raises(StackError, match="cannot be read") as refused:
        read(str(path))
    assert "\n" not in str(refused.value)


def test_verify_says_in_one_line_that_a_host_is_away(tmp_path: Path) -> None:
    with socket.socket() as listener:  # bound, not listening: refuses
        listener.bind(("127.0.0.1", 0))
        away = {"ssh_hostname": "127.0.0.1", "ssh_port": listener.getsockname()[1]}
        inventory = write(
            tmp_path, host("198.51.100.1", NOBODY) | away, host("198.51.100.2", GOOD_KEY) | away
        )
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "tests/state"],
            cwd=REPOSITORY, env={"FABLE_INVENTORY": inventory, "PATH": "/usr/bin:/bin"},
            capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
    assert done.returncode == 4
    said = [line for line in done.stdout.splitlines() if "script/verify: v100" in line]
    assert len(said) == 1
    assert "Connection refused" in said[0]
    assert " failed" not in done.stdout
