"""The lab's own manners: it refuses in one line, and leaves nothing, also after a crash."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest

from tests.lab.lab_support import REPOSITORY, environment

pytestmark = pytest.mark.timeout(300)
CRASH_LAB = f"crash-{os.getpid()}"
FOLDER = Path("/run/fable-lab") / CRASH_LAB


def script_lab(*arguments: str, name: str = CRASH_LAB) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["script/lab", *arguments],
        cwd=REPOSITORY,
        env=environment(name),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def traces() -> list[str]:
    """Whatever of the crash lab can be seen on this machine."""
    found = [
        line for line in Path("/proc/self/mounts").read_text().splitlines() if CRASH_LAB in line
    ]
    cgroups = Path("/sys/fs/cgroup")
    found += [str(path) for path in cgroups.rglob(f"fable-lab-{CRASH_LAB}-*")]
    listing = subprocess.run(["ps", "-eo", "pid,args"], capture_output=True, text=True, check=True)
    found += [line for line in listing.stdout.splitlines() if f"/{CRASH_LAB}/" in line]
    found += [line for line in listing.stdout.splitlines() if f'"name": "{CRASH_LAB}"' in line]
    if FOLDER.exists():
        found.append(str(FOLDER))
    links = subprocess.run(["ip", "-br", "link"], capture_output=True, text=True, check=True)
    return found + [line for line in links.stdout.splitlines() if line.startswith("lab0")]


def test_down_after_a_crash_leaves_nothing() -> None:
    assert script_lab("up").returncode == 0
    pid = json.loads((FOLDER / "lab.json").read_text())["pid"]
    os.kill(pid, signal.SIGKILL)
    done = script_lab("down")
    assert done.returncode == 0, done.stderr
    assert traces() == []


def test_up_after_a_crash_starts_afresh_and_down_leaves_nothing() -> None:
    assert script_lab("up").returncode == 0
    pid = json.loads((FOLDER / "lab.json").read_text())["pid"]
    os.kill(pid, signal.SIGKILL)
    assert script_lab("up").returncode == 0
    assert script_lab("down").returncode == 0
    assert traces() == []


def test_killed_in_the_middle_of_up_it_can_be_brought_down() -> None:
    starting = subprocess.Popen(
        ["script/lab", "up"],
        cwd=REPOSITORY,
        env=environment(CRASH_LAB),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 60
    while not (FOLDER / "lab.json").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    starting.kill()
    starting.wait()
    assert script_lab("down").returncode == 0
    assert traces() == []


def test_it_goes_down_with_the_process_it_watches() -> None:
    with subprocess.Popen(["sleep", "600"]) as watched:
        assert script_lab("up", "--watch", str(watched.pid)).returncode == 0
        pid = json.loads((FOLDER / "lab.json").read_text())["pid"]
        watched.kill()
    deadline = time.monotonic() + 30
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(f"/proc/{pid}").exists()
    assert traces() == []


def test_a_port_in_use_is_named() -> None:
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            taken.bind(("127.0.0.1", 18777))
            taken.listen()
        except OSError:
            pass  # somebody else holds it: the case stands as well
        state = Path("/run/fable-lab/lab/lab.json")
        if state.exists():
            pytest.skip("the default lab is up on this machine: it holds the port itself")
        done = script_lab("up", name="lab")
    assert done.returncode == 7, done.stderr
    assert "127.0.0.1:18777" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "code"), [(("ssh", "v100", "true"), 1), (("reboot", "v100"), 1), (("up", "x"), 2)]
)
def test_what_cannot_be_done_is_said_in_one_line(arguments: tuple[str, ...], code: int) -> None:
    done = script_lab(*arguments)
    assert done.returncode == code
    assert "Traceback" not in done.stderr
    assert done.stderr.strip()


def test_two_commands_at_once_bring_up_one_lab() -> None:
    starts = [
        subprocess.Popen(
            ["script/lab", "up"],
            cwd=REPOSITORY,
            env=environment(CRASH_LAB),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        for _ in range(2)
    ]
    try:
        assert [start.wait(timeout=240) for start in starts] == [0, 0]
        assert script_lab("ssh", "dgx", "hostname").stdout.strip() == "dgx"
    finally:
        assert script_lab("down").returncode == 0
    assert traces() == []


def test_two_labs_stand_side_by_side() -> None:
    names = (f"{CRASH_LAB}-a", f"{CRASH_LAB}-b")
    try:
        for name in names:
            done = script_lab("up", name=name)
            assert done.returncode == 0, done.stderr
        ports = [
            json.loads((Path("/run/fable-lab") / name / "lab.json").read_text())["ports"]
            for name in names
        ]
        assert not set(ports[0].values()) & set(ports[1].values())
        for name in names:
            assert script_lab("ssh", "v100", "hostname", name=name).stdout.strip() == "v100"
    finally:
        for name in names:
            assert script_lab("down", name=name).returncode == 0
