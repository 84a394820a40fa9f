"""The switch with real engines, real launches and real signals.

Only systemd is replaced, by a small program of its name that starts and stops one process; what
depends on systemd itself is tried in the lab.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from enginectl import cards, systemd

from tests.unit.enginectl_support import content, free_port, good_log, install, lay_down

WAIT_S = 30.0

SYSTEMCTL = r"""#!/usr/bin/python3 -IS
import json, os, pathlib, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_DFL)  # units inherit nothing from the one who asks
home = pathlib.Path(os.environ["STANDIN"])
file = home / "engine.json"
words = [word for word in sys.argv[1:] if word != "--no-block"]
engine = json.loads(file.read_text()) if file.exists() else {"pid": 0, "invocation": ""}
def alive(pid):
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
def stop():
    if alive(engine["pid"]):
        os.kill(engine["pid"], signal.SIGTERM)
        for _ in range(100):
            if not alive(engine["pid"]):
                return
            time.sleep(0.05)
        os.kill(engine["pid"], signal.SIGKILL)
def start():
    invocation = os.urandom(16).hex()
    process = subprocess.Popen(
        [os.environ["PROGRAM"], "launch", "--root", str(home)],
        env={"PATH": os.environ["PATH"], "STANDIN": str(home), "INVOCATION_ID": invocation},
        stdin=subprocess.DEVNULL, stdout=(home / "journal").open("a"), stderr=subprocess.STDOUT,
        start_new_session=True)
    file.write_text(json.dumps({"pid": process.pid, "invocation": invocation}))
if words[0] == "show":
    for unit in words[3:]:
        if unit == "fable-switch.service":
            print("LoadState=loaded\nActiveState=active\nInvocationID=" + "5" * 32 + "\n")
        else:
            on = alive(engine["pid"])
            print(f"LoadState=loaded\nActiveState={'active' if on else 'inactive'}\nNRestarts=0\n"
                  f"MainPID={engine['pid'] if on else 0}\nInvocationID={engine['invocation']}\n"
                  "ControlGroup=\n")
if words[0] in ("stop", "restart"):
    stop()
if words[0] in ("start", "restart"):
    start()
"""

RUN = r"""
import json, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from enginectl import exits, switch
from enginectl.paths import Places
from hostlib.errors import run_main
def main():
    record = switch.run(Places(Path(sys.argv[2])), sys.argv[3], "a reason", "someone")
    print(json.dumps(record.as_dict()))
    return exits.EXIT_OF_OUTCOME[record.outcome]
sys.exit(run_main("enginectl", main))
"""


class Host:
    """A root folder with an installed program, a stand-in for systemd, and one port."""

    def __init__(self, root: Path, program: Path) -> None:
        self.root = root
        self.program = program
        self.port = free_port()
        self.lines = root / "lines"
        self.lines.write_text("\n".join(good_log()))
        tools = root / "tools"
        tools.mkdir()
        (tools / "systemctl").write_text(SYSTEMCTL)
        (tools / "systemctl").chmod(0o755)
        self.environment = {
            "PATH": f"{tools}:/usr/bin:/bin",
            "STANDIN": str(root),
            "PROGRAM": str(program),
        }

    def release(self, mark: str, **changes: Any) -> str:
        env = {"LINES": str(self.lines), "MARK": mark, **changes.pop("env", {})}
        return lay_down(
            self.root, content(self.root / "parts" / mark, self.port, env=env, **changes)
        )

    def begin(self, name: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", RUN, str(self.program.parent.parent), str(self.root), name],
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def switch(self, name: str) -> tuple[int, dict[str, Any], str]:
        """Exit code, record (empty if refused) and what was said."""
        process = self.begin(name)
        out, err = process.communicate(timeout=WAIT_S)
        assert "Traceback" not in err, err
        return process.returncode, json.loads(out) if out else {}, err

    def systemctl(self, *words: str) -> str:
        return subprocess.run(
            ["systemctl", *words],
            env=self.environment,
            capture_output=True,
            text=True,
            check=True,
        ).stdout

    @property
    def pid(self) -> int:
        return systemd.parse_properties(self.systemctl("show", "--property", "", "x")).main_pid

    @property
    def running(self) -> str:
        """The mark of the release whose engine runs, read from the process itself."""
        variables = Path(f"/proc/{self.pid}/environ").read_bytes().split(b"\0")
        return next(word[5:].decode() for word in variables if word.startswith(b"MARK="))

    def running_or_none(self) -> str | None:
        """As `running`; None while no process of an engine is there."""
        try:
            return self.running
        except (OSError, StopIteration):
            return None

    @property
    def state(self) -> dict[str, Any]:
        file = self.root / "var/lib/fable-engine/state.json"
        found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
        return found

    @property
    def history(self) -> list[dict[str, Any]]:
        file = self.root / "var/lib/fable-engine/history.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()]

    @property
    def trial(self) -> Path:
        return self.root / "run/fable-engine/trial"


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install(tmp_path_factory.mktemp("lib"))


@pytest.fixture(scope="module")
def steady(tmp_path_factory: pytest.TempPathFactory, program: Path) -> Iterator[tuple[Host, str]]:
    """A serving host for the tests that must not change it."""
    one = Host(tmp_path_factory.mktemp("steady"), program)
    name = one.release("one")
    assert one.switch(name)[0] == 0
    yield one, name
    one.systemctl("stop", "fable-engine.service")


@pytest.fixture
def host(tmp_path: Path, program: Path) -> Iterator[Host]:
    one = Host(tmp_path, program)
    yield one
    one.systemctl("stop", "fable-engine.service")


@pytest.fixture
def serving(host: Host) -> tuple[Host, str]:
    """A host on which a first release was committed."""
    name = host.release("one")
    code, record, err = host.switch(name)
    assert (code, record["outcome"]) == (0, "switched"), err
    return host, name


def test_the_first_switch_commits(serving: tuple[Host, str]) -> None:
    host, name = serving
    assert host.state == {"format": 1, "committed": name, "previous": None}
    assert host.running == "one"
    assert not host.trial.exists()
    [record] = host.history
    assert (record["by"], record["reason"]) == ("someone", "a reason")
    assert (record["before"], record["to"]) == (None, name)
    assert [step["step"] for step in record["steps"]] == [
        "prepare",
        "drain and stop",
        "boot",
        "warm request",
        "gates",
        "commit",
    ]
    assert [gate["verdict"] for gate in record["gates"]] == ["pass"] * 11


def test_the_next_switch_remembers_the_one_before(serving: tuple[Host, str]) -> None:
    host, one = serving
    two = host.release("two")
    assert host.switch(two)[0] == 0
    assert host.running == "two"
    assert host.state == {"format": 1, "committed": two, "previous": one}
    assert host.switch(one)[0] == 0
    assert host.running == "one"
    assert len(host.history) == 3


def test_what_is_committed_and_serves_is_left_alone(steady: tuple[Host, str]) -> None:
    host, name = steady
    pid = host.pid
    code, record, _ = host.switch(name)
    assert (code, record["outcome"]) == (0, "nothing to do")
    assert host.pid == pid
    assert len(host.history) == 1


def test_what_is_committed_but_stopped_is_started(serving: tuple[Host, str]) -> None:
    host, name = serving
    host.systemctl("stop", "fable-engine.service")
    code, record, _ = host.switch(name)
    assert (code, record["outcome"]) == (0, "switched")
    assert host.running == "one"
    assert host.state["previous"] is None


FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "dies while it boots": ({"env": {"DIE": "1"}}, "ended while it booted"),
    "never listens": ({"env": {"HANG": "1"}, "boot_deadline_seconds": 1}, "not healthy after 1 s"),
    "counts no tokens": ({"env": {"TOKENS": "0"}}, "gate 1 "),
    "other names": ({"served_names": ["other"]}, "serves qwen38-27b fable-27b, not other"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_candidate_that_fails_is_rolled_back(fault: str, serving: tuple[Host, str]) -> None:
    host, one = serving
    changes, word = FAULTS[fault]
    code, record, _ = host.switch(host.release("two", **changes))
    assert (code, record["outcome"]) == (5, "rolled back")
    assert word in record["detail"]
    assert host.running == "one"
    assert host.state == {"format": 1, "committed": one, "previous": None}
    assert not host.trial.exists()
    assert host.history[-1]["outcome"] == "rolled back"


def test_a_gate_that_fails_rolls_back_with_its_evidence(serving: tuple[Host, str]) -> None:
    host, _ = serving
    bad = host.root / "bad"
    bad.write_text("\n".join([*good_log(), "decode falls back to scalar_paged"]))
    code, record, _ = host.switch(host.release("two", env={"LINES": str(bad)}))
    assert (code, host.running) == (5, "one")
    assert "gate 7" in record["detail"]
    [gate] = [gate for gate in record["gates"] if gate["verdict"] == "fail"]
    assert "scalar_paged" in gate["evidence"]["text"]


def test_a_first_switch_that_fails_leaves_nothing_running(host: Host) -> None:
    code, record, _ = host.switch(host.release("one", env={"DIE": "1"}))
    assert (code, record["outcome"]) == (8, "failed")
    assert host.pid == 0
    assert host.state["committed"] is None
    assert not host.trial.exists()


def test_a_rollback_that_fails_says_so(serving: tuple[Host, str]) -> None:
    host, one = serving
    (host.root / "parts/one/engine.py").unlink()
    code, record, _ = host.switch(host.release("two", env={"DIE": "1"}))
    assert (code, record["outcome"]) == (6, "rollback failed")
    assert host.state["committed"] == one


@pytest.mark.parametrize("fault", ["unknown", "incomplete", "edited"])
def test_what_cannot_run_is_refused_and_touches_nothing(
    fault: str, steady: tuple[Host, str]
) -> None:
    host, _ = steady
    pid, before = host.pid, host.state
    assert pid
    name = host.release(fault, required_paths=["/no/such"] if fault == "incomplete" else [])
    file = host.root / "var/lib/fable-engine/releases" / name / "release.json"
    if fault == "unknown":
        file.unlink()
    if fault == "edited":
        file.write_text(file.read_text().replace("135168", "4096"))
    code, record, err = host.switch(name)
    assert (code, record) == (3, {})
    assert name in err
    assert (host.pid, host.state) == (pid, before)
    assert not host.trial.exists()


def test_a_second_switch_is_refused_while_one_runs(steady: tuple[Host, str]) -> None:
    host, _ = steady
    pid = host.pid
    with (host.root / "run/fable-engine/switch.lock").open("r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.truncate(0)
        lock.write("the other one: its reason\n")
        lock.flush()
        code, _, err = host.switch(host.release("two"))
    assert code == 4
    assert "the other one: its reason" in err
    assert host.pid == pid


def test_a_stranger_on_the_port_is_refused(host: Host) -> None:
    name = host.release("one")
    stranger = subprocess.Popen(
        [sys.executable, "-m", "http.server", "--bind", "127.0.0.1", str(host.port)],
        stderr=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        env={"PYTHONUNBUFFERED": "1"},
    )
    try:
        assert stranger.stdout is not None
        stranger.stdout.readline()
        code, _, err = host.switch(name)
    finally:
        stranger.kill()
        stranger.communicate()
    assert code == 3
    assert str(host.port) in err


def test_an_ended_switch_starts_the_committed_release(serving: tuple[Host, str]) -> None:
    host, one = serving
    process = host.begin(host.release("two", env={"HANG": "1"}))
    deadline = time.monotonic() + WAIT_S
    while host.running_or_none() != "two":
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=WAIT_S)
    assert (process.returncode, json.loads(out)["outcome"]) == (7, "interrupted")
    assert not host.trial.exists()
    assert host.state["committed"] == one
    while host.running_or_none() != "one":
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_killed_switch_leaves_no_candidate_behind_its_end(serving: tuple[Host, str]) -> None:
    """SIGKILL leaves the trial file; the state still names the release from before."""
    host, one = serving
    process = host.begin(host.release("two", env={"HANG": "1"}))
    deadline = time.monotonic() + WAIT_S
    while host.running_or_none() != "two":
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.kill()
    process.communicate()
    assert host.state["committed"] == one
    code, record, _ = host.switch(host.release("three"))
    assert (code, record["outcome"]) == (0, "switched")
    assert host.running == "three"


def test_the_terminal_may_go_away(serving: tuple[Host, str]) -> None:
    host, _ = serving
    process = host.begin(host.release("two"))
    assert process.stderr is not None
    process.stderr.close()
    assert process.wait(timeout=WAIT_S) == 0
    assert host.running == "two"
    process.communicate()


def test_cards_are_read_as_nvidia_smi_prints_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\nprintf '0, 4\\n1, 199\\n2, 200\\n3, 17200\\n'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert cards.occupied() == {2: 200, 3: 17200}
    monkeypatch.setenv("PATH", str(tmp_path / "none"))
    assert cards.occupied() == {}


def test_processes_of_a_control_group_are_those_of_the_kernel() -> None:
    line = Path("/proc/self/cgroup").read_text().splitlines()[-1]
    group = line.split(":", 2)[2]
    found = systemd.processes(group)
    assert os.getpid() in found or not (Path("/sys/fs/cgroup") / group.lstrip("/")).exists()
    assert systemd.processes("") == []
    assert systemd.processes("/no/such.slice") == []
