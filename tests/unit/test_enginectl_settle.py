"""Whatever ends a switch, the committed release serves again and nothing else does."""

from __future__ import annotations

import fcntl
import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from enginectl import history
from enginectl.paths import Places
from enginectl.runfiles import Hold, Start
from enginectl.settle import decide
from enginectl.state import State
from enginectl.systemd import parse_properties

from tests.unit.enginectl_host import WAIT_S, Host, wait_until
from tests.unit.enginectl_support import install

ONE, TWO, THREE = (f"skinny-{number:016x}" for number in (1, 2, 3))


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install(tmp_path_factory.mktemp("lib"))


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory, program: Path) -> Iterator[tuple[Host, str]]:
    """A host on which a first release is committed; every test leaves it serving."""
    one = Host(tmp_path_factory.mktemp("host"), program)
    name = one.release("one")
    code, _, err = one.switch(name)
    assert code == 0, err
    yield one, name
    one.systemctl("stop", "fable-engine.service")


def killed_at(host: Host, process: subprocess.Popen[str], words: str) -> None:
    """SIGKILL the switch when it says that the step `words` begins."""
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith(words):
            break
    else:
        raise AssertionError(f"the switch never came to {words!r}")
    process.kill()
    process.communicate(timeout=WAIT_S)


@pytest.mark.parametrize("step", ["prepare", "drain and stop", "boot", "commit", "roll back"])
def test_after_a_switch_killed_at_any_step_the_committed_release_serves(
    step: str, serving: tuple[Host, str]
) -> None:
    host, one = serving
    mark = f"killed at {step}"
    changes: dict[str, Any] = {"env": {"DIE": "1"}} if step == "roll back" else {}
    candidate = host.release(mark, **changes)
    killed_at(host, host.begin(candidate), step)
    committed = host.state["committed"]
    assert committed == one or (committed, step) == (candidate, "commit")
    code, said = host.settle()
    assert code == 0, said
    serves = mark if committed == candidate else "one"
    wait_until(lambda: host.answers(serves), f"{said}; {host.running_or_none()} runs")
    assert not host.trial.exists()
    assert host.settle() == (0, "the unit runs what is committed\n")
    events, damaged = history.read(Places(host.root))
    told = [event.get("outcome") for event in events if event.get("to") == candidate]
    assert damaged == 0
    assert told == ["interrupted"] or (told, step) == ([], "prepare")
    assert host.switch(one)[0] == 0


def test_settle_leaves_a_running_switch_alone(serving: tuple[Host, str]) -> None:
    host, _ = serving
    pid = host.pid
    with (host.root / "run/fable-engine/switch.lock").open("r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        host.trial.write_text(json.dumps({"format": 1, "release": ONE, "invocation": "5" * 32}))
        assert host.settle() == (0, "a switch is running\n")
        assert host.trial.exists()
    host.trial.unlink()
    assert host.pid == pid


def test_a_switch_waits_for_a_settle(serving: tuple[Host, str]) -> None:
    host, one = serving
    with (host.root / "run/fable-engine/switch.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.write("settle (pid 1)\n")
        lock.flush()
        process = host.begin(one)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(3)
    process.communicate(timeout=WAIT_S)
    assert process.returncode == 0


def test_a_stray_stop_is_undone_but_a_drain_is_respected(serving: tuple[Host, str]) -> None:
    host, _ = serving
    hold = host.root / "run/fable-engine/hold.json"
    host.systemctl("stop", "fable-engine.service")
    hold.write_text(json.dumps({"format": 1, "by": "somebody", "reason": "new fans"}))
    assert host.settle() == (0, "held down by somebody: new fans\n")
    assert host.pid == 0
    hold.unlink()
    assert host.settle()[0] == 0
    wait_until(lambda: host.answers("one"), "it was not started")


@pytest.mark.parametrize("damage", ["truncated", "newer"])
def test_with_a_damaged_state_the_engine_starts_and_the_next_switch_works(
    damage: str, serving: tuple[Host, str]
) -> None:
    host, one = serving
    file = host.root / "var/lib/fable-engine/state.json"
    whole = file.read_text()
    newer = json.dumps({"format": 9, "committed": one, "previous": None, "new": 1})
    file.write_text(whole[:25] if damage == "truncated" else newer)
    host.systemctl("restart", "fable-engine.service")
    wait_until(lambda: host.answers("one"), "it does not start")
    code, said = host.settle()
    if damage == "newer":
        assert (code, said.count("\n")) == (3, 1)
        assert host.switch(one)[0] == 3
        assert "deploy that version again" in said
        assert file.read_text() == newer
        file.write_text(whole)
    else:
        assert code == 0
        assert json.loads(file.read_text()) == json.loads(whole)
    assert host.switch(one)[1]["outcome"] == "nothing to do"


def test_a_killed_settle_leaves_nothing_that_the_next_one_cannot_do(
    serving: tuple[Host, str],
) -> None:
    """Killed before each of its system calls in turn: the next one ends the same way."""
    host, one = serving
    host.systemctl("stop", "fable-engine.service")
    for milliseconds in (40, 70, 100, 130):
        host.trial.write_text(json.dumps({"format": 1, "release": TWO, "invocation": "5" * 32}))
        process = subprocess.Popen(
            host.settle_command, env=host.environment, stdout=subprocess.DEVNULL
        )
        try:
            process.wait(milliseconds / 1000)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
    assert host.settle()[0] == 0
    wait_until(lambda: host.answers("one"), "it was not started")
    assert not host.trial.exists()
    assert host.state["committed"] == one


def unit(active: str = "active", enabled: str = "enabled", loaded: str = "loaded") -> Any:
    return parse_properties(
        f"LoadState={loaded}\nActiveState={active}\nUnitFileState={enabled}\nMainPID=1\n"
    )


def start(release: str) -> Start:
    return Start(release, "a" * 32, "", "")


HOLD = Hold("me", "why")


@pytest.mark.parametrize(
    ("state", "seen", "running", "hold", "verb"),
    [
        (State(ONE), unit(), start(ONE), None, ""),
        (State(ONE), unit("activating"), start(ONE), None, ""),
        (State(ONE), unit("activating"), None, None, ""),
        (State(ONE, THREE), unit(), start(TWO), None, "restart"),
        (State(ONE, THREE), unit("activating"), start(TWO), HOLD, "restart"),
        (State(ONE, THREE), unit(), start(THREE), None, "restart"),
        (State(ONE, THREE, {}, 3), unit("activating"), start(THREE), None, ""),
        (State(ONE), unit("inactive"), None, None, "start"),
        (State(ONE), unit("failed"), None, None, "start"),
        (State(ONE), unit("failed"), None, HOLD, ""),
        (State(ONE), unit("inactive", "disabled"), None, None, ""),
        (State(ONE), unit("inactive", "masked", "masked"), None, None, ""),
        (State(ONE), unit("deactivating"), start(TWO), None, ""),
        (State(), unit(), start(TWO), None, "stop"),
        (State(), unit("inactive"), None, None, ""),
    ],
)
def test_what_settle_asks_for(
    state: State, seen: Any, running: Start | None, hold: Hold | None, verb: str
) -> None:
    assert decide(state, 3, seen, running, hold)[0] == verb
