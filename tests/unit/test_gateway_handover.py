"""Which instance takes over, and who holds a port: decisions, and a real process that listens."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest
from gateway_handover import INSTANCES, RUNNING, is_restart, next_instance
from hypothesis import given
from hypothesis import strategies as st
from port_owner import listening_inodes, socket_unit, unit_of

from stack.operations.units import held_by_another

PROGRAM = "files/handover/port_owner.py"
STATES = st.sampled_from(
    ["active", "reloading", "activating", "deactivating", "inactive", "failed"]
)


@given(STATES, STATES, st.booleans())
def test_one_instance_is_started_and_never_instead_of_a_free_one(
    first: str, second: str, restart: bool
) -> None:
    states = dict(zip(INSTANCES, (first, second), strict=True))
    chosen = next_instance(states, restart)
    running = [name for name, state in states.items() if state in RUNNING]
    if running and not restart:
        assert chosen is None
    elif len(running) == len(INSTANCES):
        assert chosen in running
    else:
        assert chosen is not None
        assert chosen not in running
        others = [name for name in states if name not in (*running, chosen)]
        if others and states[chosen] == "deactivating":
            assert states[others[0]] == "deactivating"


JOBS = """\
  812 fable-gateway@a.service stop    running
  811 fable-gateway.service   restart running
"""


@pytest.mark.parametrize(
    ("jobs", "restart"),
    [
        (JOBS, True),
        (JOBS.replace(" restart ", " stop "), False),
        (JOBS.replace("gateway.service ", "gateway@b.service "), False),
        ("No jobs running.\n", False),
        ("", False),
    ],
)
def test_a_restart_is_told_from_a_stop(jobs: str, restart: bool) -> None:
    assert is_restart(jobs) is restart


@pytest.mark.parametrize(
    ("cgroup", "unit"),
    [
        ("0::/system.slice/gw.service\n", ("gw.service", "")),
        ("0::/system.slice/system-fable\\x2dgateway.slice/fable-gateway@a.service\n",
         ("fable-gateway@a.service", "")),
        ("0::/user.slice/user-1000.slice/user@1000.service/app.slice/gw.service\n",
         ("gw.service", "1000")),
        ("0::/user.slice/user-1000.slice/session-3.scope\n", ("session-3.scope", "")),
        ("0::/\n", ("", "")),
        ("1:name=systemd:/x.service\n", ("", "")),
    ],
)  # fmt: skip
def test_a_cgroup_names_its_unit(cgroup: str, unit: tuple[str, str]) -> None:
    assert unit_of(cgroup) == unit


def test_a_socket_of_systemd_names_its_unit() -> None:
    listing = """\
/run/systemd/journal/stdout systemd-journald.socket systemd-journald.service
0.0.0.0:18777               fable-gateway.socket    fable-gateway.service
[::]:187                    other.socket            other.service
"""
    assert socket_unit(listing, 18777) == "fable-gateway.socket"
    assert socket_unit(listing, 187) == "other.socket"
    assert socket_unit(listing, 8777) == ""


@given(st.text())
def test_any_table_is_read_without_an_error(text: str) -> None:
    assert listening_inodes(f"header\n{text}", 18777) == set()


LISTEN = """
import socket, sys, time
listener = socket.create_server((sys.argv[1], 0), family=int(sys.argv[2]))
print(listener.getsockname()[1], flush=True)
time.sleep(600)
"""


@pytest.fixture(params=["127.0.0.1", "::1"])
def holder(request: pytest.FixtureRequest) -> Iterator[tuple[subprocess.Popen[str], int]]:
    family = socket.AF_INET6 if ":" in request.param else socket.AF_INET
    command = [sys.executable, "-c", LISTEN, request.param, str(int(family))]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout
    yield process, int(process.stdout.readline())
    process.kill()
    process.wait()
    process.stdout.close()


def owner_of(port: int) -> dict[str, object]:
    command = [sys.executable, "-I", PROGRAM, "find", str(port)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, object] = json.loads(done.stdout)
    return found


def test_a_process_that_listens_is_found_and_named(
    holder: tuple[subprocess.Popen[str], int],
) -> None:
    process, port = holder
    found = owner_of(port)
    assert found["pid"] == process.pid
    assert str(found["command"]).startswith(sys.executable)
    said = held_by_another(port, found)
    assert re.search(rf"port {port} is held by .*process {process.pid}: ", said)


def test_a_process_outside_any_unit_is_stopped(
    holder: tuple[subprocess.Popen[str], int],
) -> None:
    process, port = holder
    if owner_of(port)["unit"]:
        return  # inside a unit it is the unit's to stop; the lab's tests do that
    command = [sys.executable, "-I", PROGRAM, "release", str(port), "fable-gateway.service"]
    assert subprocess.run(command, check=False).returncode == 0
    assert process.wait(20) == -signal.SIGTERM
    assert owner_of(port) == {}
