"""The lab's own manners: it refuses in one line, and leaves nothing, also after a crash."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
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


@pytest.mark.parametrize("damage", ["cut off", "of another version", "lost"])
def test_a_lab_whose_description_is_damaged_can_be_brought_down(damage: str) -> None:
    assert script_lab("up").returncode == 0
    description = FOLDER / "lab.json"
    text = description.read_text()
    if damage == "cut off":
        description.write_text(text[: len(text) // 2])
    elif damage == "of another version":
        description.write_text(text.replace('"recipe"', '"revision"'))
    else:
        description.unlink()
    if damage != "lost":
        refused = script_lab("up")
        assert refused.returncode == 8, refused.stderr
        assert f"FABLE_LAB={CRASH_LAB} script/lab down" in refused.stderr
    done = script_lab("down")
    assert done.returncode == 0, done.stderr
    assert "gone" in done.stdout
    assert traces() == []


@pytest.fixture
def readable_clone() -> Iterator[Path]:
    """A copy of the project, `.venv` included, that every user of this machine may read."""
    leave_out = shutil.ignore_patterns(".git", "__pycache__", ".*_cache", ".hypothesis")
    with tempfile.TemporaryDirectory(prefix="fable-clone-") as folder:
        clone = Path(folder) / "clone"
        shutil.copytree(REPOSITORY, clone, symlinks=True, ignore=leave_out)
        subprocess.run(["chmod", "-R", "a+rX", folder], check=True)
        yield clone


def test_the_person_behind_sudo_uses_the_lab_without_it(readable_clone: Path) -> None:
    """Root brings the lab up as sudo does; an ordinary user then looks, logs in and plans."""
    nobody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--"]
    python = str(readable_clone / ".venv/bin/python")

    def as_person(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*nobody, python, "-B", "-m", *arguments],
            cwd=readable_clone,
            env={**environment(CRASH_LAB), "HOME": "/nonexistent"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    invoker = {**environment(CRASH_LAB), "SUDO_UID": "65534", "SUDO_GID": "65534"}
    try:
        subprocess.run(["script/lab", "up"], cwd=REPOSITORY, env=invoker, check=True)
        shown = as_person("lab", "status")
        assert shown.returncode == 0, shown.stderr
        assert shown.stdout.count(" up ") == 2
        assert as_person("lab", "ssh", "v100", "hostname").stdout.strip() == "v100"
        assert as_person("lab", "reboot", "dgx").returncode == 0
        plan = as_person("pyinfra", "--dry", "inventory/lab.py", "deploy.py")
        assert plan.returncode == 0, plan.stderr
        assert "Engine: enabled at boot" in plan.stdout + plan.stderr
        os.chown(FOLDER / "id", 0, 0)
        refused = as_person("lab", "status")
        assert refused.returncode == 1
        assert "belongs to" in refused.stderr
    finally:
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
