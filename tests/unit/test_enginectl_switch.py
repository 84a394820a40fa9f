"""The switch with real engines, real launches and real signals."""

from __future__ import annotations

import fcntl
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from enginectl import cards, systemd

from tests.unit.enginectl_host import WAIT_S, Host, state_of, wait_until
from tests.unit.enginectl_support import good_log, install


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
    assert state_of(name) == host.state
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
    assert host.state == state_of(two, one)
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
    assert (code, record["outcome"]) == (0, "restarted")
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
    two = host.release("two", **changes)
    code, record, _ = host.switch(two)
    assert (code, record["outcome"]) == (5, "rolled back")
    assert word in record["detail"]
    assert host.running == "one"
    rejected = host.state.pop("rejected")
    assert host.state == state_of(one, rejected=rejected)
    assert list(rejected) == [two]
    assert word in rejected[two]
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
    wait_until(lambda: host.running_or_none() == "two", "the candidate does not run")
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


def test_a_rejected_release_is_refused_for_nothing_until_somebody_insists(
    serving: tuple[Host, str],
) -> None:
    host, _ = serving
    flag = host.root / "works"
    two = host.release("two", env={"DIES_WITHOUT": str(flag)})
    assert host.switch(two)[0] == 5
    events, state = host.events, host.state
    code, record, err = host.switch(two)
    assert (code, record, len(err.splitlines())) == (10, {}, 1)
    assert "--retry" in err
    assert "ended while it booted" in err
    assert (host.events, host.state) == (events, state)
    flag.touch()
    assert host.switch(two, "--retry")[0] == 0
    assert (host.state["rejected"], host.running) == ({}, "two")


def test_a_rollback_rejects_what_it_leaves(serving: tuple[Host, str]) -> None:
    host, one = serving
    two = host.release("two")
    assert host.switch(two)[0] == 0
    code, record, _ = host.switch(one, "--back")
    assert (code, record["outcome"], host.running) == (0, "switched", "one")
    assert (host.state["previous"], list(host.state["rejected"])) == (two, [two])


def test_a_committed_release_that_does_not_come_up_is_not_called_a_rollback(
    serving: tuple[Host, str],
) -> None:
    host, one = serving
    host.systemctl("stop", "fable-engine.service")
    (host.root / "parts/one/engine.py").write_text("raise SystemExit(0)")
    code, record, _ = host.switch(one)
    assert (code, record["outcome"]) == (8, "failed")
    assert "again and again" in record["detail"]
    assert (host.state["committed"], host.state["rejected"]) == (one, {})
    assert host.state["failed_boots"] >= 1


def test_a_full_disk_at_the_commit_rolls_back(serving: tuple[Host, str]) -> None:
    """No file of the switch can grow any more once it boots the candidate."""
    host, one = serving
    process = host.begin(host.release("two"))
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("boot"):
            resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
            break
    out, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == 5, err
    assert "File too large" in json.loads(out)["detail"]
    assert "history.jsonl: File too large" in err
    assert (host.running, host.state) == ("one", state_of(one))
    assert host.events[-1]["event"] == "boot", "what could not be written is told by what could"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"memory": {"verdict": "short"}}, "raise gpu_memory_utilization"),
        ({"env": {"VLLM_CACHE_ROOT": "FULL"}}, "are needed; free some"),
        ({"argv": "PARSER"}, "error: argument --port: invalid int"),
    ],
)
def test_what_cannot_work_is_refused_before_the_stop(
    changes: dict[str, Any], words: str, steady: tuple[Host, str], tmp_path: Path
) -> None:
    host, _ = steady
    pid = host.pid
    changes = dict(changes)
    if "memory" in changes:
        numbers = {"demand_tokens": 2, "pool_tokens": 1, "reason": "needs 2, holds 1"}
        changes["memory"] = {**changes["memory"], **numbers}
    if "env" in changes:
        changes["env"] = {"VLLM_CACHE_ROOT": "/proc/caches"}  # a file system without any space
    if "argv" in changes:
        changes = engine_with_a_parser(tmp_path)
    code, record, err = host.switch(host.release(words[:9], **changes))
    assert (code, record) == (3, {}), err
    assert words in err
    assert host.pid == pid
    assert not host.trial.exists()


def engine_with_a_parser(folder: Path) -> dict[str, Any]:
    """A venv whose vLLM has the real one's parser functions, and arguments that they refuse."""
    package = folder / "lib/vllm/entrypoints/openai"
    package.mkdir(parents=True)
    (folder / "lib/vllm/utils").mkdir()
    (folder / "lib/vllm/utils/argparse_utils.py").write_text(
        "import argparse\nFlexibleArgumentParser = argparse.ArgumentParser\n"
    )
    (package / "cli_args.py").write_text(
        "def make_arg_parser(parser):\n"
        "    parser.add_argument('--port', type=int)\n"
        "    return parser\n"
        "def validate_parsed_serve_args(arguments):\n"
        "    pass\n"
    )
    python = folder / "bin/python"
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\nPYTHONPATH={folder}/lib exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    paths = {key: str(folder) for key in ("venv", "toolkit", "checkpoint")}
    argv = ["/usr/bin/env", str(python), "-m", "vllm.entrypoints.openai.api_server", "--port", "x"]
    return {"paths": paths, "argv": argv}


def test_a_drain_counts_what_runs_and_what_is_cut_off(serving: tuple[Host, str]) -> None:
    host, _ = serving
    metrics = host.root / "metrics"
    line = 'vllm:num_requests_{}{{engine="0",model_name="m"}} {}\n'
    metrics.write_text("# TYPE x gauge\n" + line.format("running", "2.0"))
    slow = host.release("slow", env={"METRICS": str(metrics), "LINGER": "1.5"}, drain_seconds=1)
    assert host.switch(slow)[0] == 0
    metrics.write_text(line.format("running", "2.0") + line.format("waiting", "1.0"))
    code, record, _ = host.switch(host.release("next"))
    assert (code, record["drain"]) == (0, {"running": 3, "cut_off": 3})
