"""Launch, status and gates, run as on a host: the installed program, a real server, real pipes."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from enginectl import bootlog, network, status
from enginectl.release import Listen

from tests.unit.enginectl_support import (
    INVOCATION,
    commit,
    content,
    free_port,
    good_log,
    install,
    lay_down,
)

WAIT_S = 20.0


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install(tmp_path_factory.mktemp("lib"))


def prepared(root: Path, **changes: Any) -> tuple[int, str]:
    """A committed release below `root`; returns the engine's port and the release's name."""
    port = changes.pop("port", None) or free_port()
    name = lay_down(root, content(root / "parts", port, **changes))
    commit(root, name)
    return port, name


@contextmanager
def launched(
    program: Path, root: Path, verb: str = "launch", **environment: str
) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [str(program), verb, "--root", str(root)],
        env={"PATH": "/usr/bin:/bin", "INVOCATION_ID": INVOCATION, "STRAY": "1", **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def refused(program: Path, root: Path, verb: str = "launch", **environment: str) -> str:
    """The one line with which a launch ends that must not start anything."""
    with launched(program, root, verb, **environment) as process:
        out, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == 1
    assert out == ""
    assert err.startswith("enginectl: ")
    assert "Traceback" not in err
    return err


def get(port: int, path: str) -> Any:
    deadline = time.monotonic() + WAIT_S
    while True:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
                return json.load(answer)
        except OSError:
            assert time.monotonic() < deadline, "the engine does not answer"
            time.sleep(0.05)


def boot_log(root: Path, invocation: str = INVOCATION) -> Path:
    return root / "var/log/fable-engine/boots" / f"{invocation}.log"


def test_the_main_process_becomes_the_engine(program: Path, tmp_path: Path) -> None:
    port, name = prepared(tmp_path)
    with launched(program, tmp_path) as process:
        get(port, "/health")
        arguments = Path(f"/proc/{process.pid}/cmdline").read_bytes().split(b"\0")
        assert str(tmp_path / "parts/engine.py").encode() in arguments
        assert Path(f"/proc/{process.pid}/cwd").readlink() == tmp_path / "parts"
        children = subprocess.run(
            ["pgrep", "-P", str(process.pid)], capture_output=True, text=True, check=False
        )
        assert children.stdout == ""
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=WAIT_S)  # ends only when the copying process does
    assert process.returncode == 0
    assert err == ""
    assert name in out.splitlines()[0]
    assert sorted(out.splitlines()[1:]) == ["booted", "on stderr"]
    assert boot_log(tmp_path).read_text() == out


def test_the_environment_is_exactly_the_releases(program: Path, tmp_path: Path) -> None:
    port, _ = prepared(tmp_path)
    with launched(program, tmp_path, JOURNAL_STREAM="8:1") as process:
        found = get(port, "/environment")
        process.terminate()
    passwd = subprocess.run(
        ["getent", "passwd", str(os.getuid())], capture_output=True, text=True, check=True
    )
    assert found == {
        "HOME": passwd.stdout.split(":")[5],
        "LANG": "C.UTF-8",
        "PATH": "/usr/bin:/bin",
        "COLOUR": "grün",
        "INVOCATION_ID": INVOCATION,
    }


def test_a_missing_path_is_refused_before_anything_runs(program: Path, tmp_path: Path) -> None:
    prepared(tmp_path, required_paths=["/no/such/file"])
    assert "/no/such/file is missing" in refused(program, tmp_path)
    assert not boot_log(tmp_path).exists()


def test_an_address_that_never_comes_is_given_up_by_its_deadline(
    program: Path, tmp_path: Path
) -> None:
    # 192.0.2.0/24 is reserved for documentation: no machine has it
    prepared(tmp_path, listen={"host": "192.0.2.1", "port": 8601})
    assert "192.0.2.1: is no address of this machine after 1 s" in refused(
        program, tmp_path, "before-start"
    )
    events = (tmp_path / "var/lib/fable-engine/history.jsonl").read_text()
    assert json.loads(events)["outcome"] == "blocked"
    state = json.loads((tmp_path / "var/lib/fable-engine/state.json").read_text())
    assert state["failed_boots"] == 0, "the release cannot help it"


def test_an_address_that_comes_late_is_waited_for(program: Path, tmp_path: Path) -> None:
    """In a network namespace of its own, where the address is added while the launcher waits."""
    prepared(tmp_path, listen={"host": "192.0.2.1", "port": free_port()}, address_wait_seconds=60)
    namespace = ["unshare", "--net", "--"]
    if subprocess.run([*namespace, "true"], check=False, capture_output=True).returncode:
        pytest.skip("network namespaces need root here")
    start = " && ".join(
        f"{program} {verb} --root {tmp_path}" for verb in ("before-start", "launch")
    )
    script = f"ip link set lo up; ({start}) & sleep 1; ip address add 192.0.2.1/32 dev lo; wait"
    process = subprocess.Popen(
        [*namespace, "sh", "-c", script],
        env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "INVOCATION_ID": INVOCATION},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        assert "release skinny-" in process.stdout.readline()
        assert process.stdout.readline().strip() in ("booted", "on stderr")
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


@pytest.mark.parametrize("theirs", ["127.0.0.1", "0.0.0.0"])
def test_a_port_that_another_listens_on_is_refused(
    program: Path, tmp_path: Path, theirs: str
) -> None:
    with socket.socket() as stranger:
        stranger.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        stranger.bind((theirs, 0))
        stranger.listen()
        port, _ = prepared(tmp_path, port=stranger.getsockname()[1])
        message = refused(program, tmp_path)
    assert f"127.0.0.1:{port}: another process listens there" in message


def test_ports_agree_with_the_kernel_on_ipv6_too() -> None:
    with socket.socket(socket.AF_INET6) as listener:
        listener.bind(("::1", 0))
        port = listener.getsockname()[1]
        assert not network.taken(Listen("::1", port))
        listener.listen()
        assert network.taken(Listen("::1", port))
        assert network.taken(Listen("::", port))
        assert not network.taken(Listen("127.0.0.1", port))
    with socket.socket(socket.AF_INET6) as listener:
        listener.bind(("::ffff:127.0.0.1", 0))
        listener.listen()
        assert network.taken(Listen("127.0.0.1", listener.getsockname()[1]))


def test_another_user_is_refused(program: Path, tmp_path: Path) -> None:
    prepared(tmp_path, user="nobody-here")
    assert "runs as nobody-here" in refused(program, tmp_path)


@pytest.mark.parametrize("invocation", ["", "../../etc/passwd"])
def test_launch_is_for_systemd_alone(program: Path, tmp_path: Path, invocation: str) -> None:
    prepared(tmp_path)
    assert "INVOCATION_ID" in refused(program, tmp_path, INVOCATION_ID=invocation)


def test_nothing_committed_names_the_way_out(program: Path, tmp_path: Path) -> None:
    assert "enginectl switch" in refused(program, tmp_path)


def test_a_trial_without_its_switch_is_ignored(program: Path, tmp_path: Path) -> None:
    port, name = prepared(tmp_path)
    candidate = lay_down(tmp_path, content(tmp_path / "other", port, boot_deadline_seconds=31))
    trial = tmp_path / "run/fable-engine/trial"
    trial.parent.mkdir(parents=True)
    trial.write_text(json.dumps({"format": 1, "release": candidate, "invocation": "a" * 32}))
    with launched(program, tmp_path) as process:
        assert process.stdout is not None
        assert name in process.stdout.readline()
        process.kill()
        assert "ignored" in process.communicate()[1]


def test_an_unwritable_log_does_not_stop_the_engine(program: Path, tmp_path: Path) -> None:
    port, _ = prepared(tmp_path)
    (tmp_path / "var/log").mkdir(parents=True)
    (tmp_path / "var/log/fable-engine").write_text("a file in the folder's place")
    with launched(program, tmp_path) as process:
        get(port, "/health")
        process.terminate()
        out, err = process.communicate(timeout=WAIT_S)
    assert "booted" in out
    assert "journal alone" in err


def test_only_the_latest_logs_are_kept(program: Path, tmp_path: Path) -> None:
    port, _ = prepared(tmp_path)
    folder = boot_log(tmp_path).parent
    folder.mkdir(parents=True)
    for number in range(25):
        old = folder / f"{number:032x}.log"
        old.write_text("old")
        os.utime(old, (1000 + number, 1000 + number))
    with launched(program, tmp_path) as process:
        get(port, "/health")
        process.terminate()
    kept = sorted(path.name for path in folder.iterdir())
    assert kept == sorted(
        [boot_log(tmp_path).name, *(f"{number:032x}.log" for number in range(6, 25))]
    )


def test_status_shows_what_is_committed_and_what_cannot_be_known(
    program: Path, tmp_path: Path
) -> None:
    port, name = prepared(tmp_path)
    with launched(program, tmp_path) as process:
        get(port, "/health")
        done = subprocess.run(
            [str(program), "status", "--json", "--root", str(tmp_path)],
            capture_output=True,
            text=True,
            check=False,
        )
        process.terminate()
    answer = json.loads(done.stdout)
    assert done.returncode == 1, "a server that is not the unit's does not count as serving"
    assert (answer["committed"], answer["healthy"], answer["serving"]) == (name, True, False)
    assert answer["served_names"] == ["qwen38-27b", "fable-27b"]
    assert answer["listen"] == f"127.0.0.1:{port}"


def test_status_without_an_engine_fails_in_plain_words(program: Path, tmp_path: Path) -> None:
    prepared(tmp_path)
    done = subprocess.run(
        [str(program), "status", "--root", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "no answer" in done.stdout
    assert "Traceback" not in done.stderr


def test_settings_are_read_from_the_running_process(program: Path, tmp_path: Path) -> None:
    port, _ = prepared(tmp_path)
    with launched(program, tmp_path) as process:
        get(port, "/health")
        found = status.settings_of(status.command_line(process.pid))
        process.terminate()
    assert found == {
        "mtp_depth": 7,
        "max_num_seqs": 2,
        "gpu_memory_utilization": 0.5,
        "max_model_len": 135168,
        "max_num_batched_tokens": 4096,
    }


def test_gates_judge_a_log_file(program: Path, tmp_path: Path) -> None:
    prepared(tmp_path)
    log = tmp_path / "some.log"
    log.write_text("\n".join(good_log()) + "\n")
    command = [str(program), "gates", "--json", "--root", str(tmp_path), "--log", str(log)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    verdicts = {gate["number"]: gate["verdict"] for gate in json.loads(done.stdout)}
    assert verdicts == {1: "cannot tell"} | dict.fromkeys(range(2, 12), "pass")
    assert done.returncode == 1
    done = subprocess.run([*command[:-1], "/no/such"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)


def test_a_symlink_in_the_place_of_a_log_is_not_followed(program: Path, tmp_path: Path) -> None:
    prepared(tmp_path)
    (tmp_path / "secret").write_text("num_speculative_tokens=7 secret")
    (tmp_path / "link.log").symlink_to(tmp_path / "secret")
    done = subprocess.run(
        [str(program), "gates", "--root", str(tmp_path), "--log", str(tmp_path / "link.log")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "secret" not in done.stdout + done.stderr.replace(str(tmp_path), "")


def test_a_full_disk_leaves_a_gap_and_the_journal_whole() -> None:
    """/dev/full refuses every write."""
    source, sink = os.pipe()
    journal_out, journal_in = os.pipe()
    os.write(sink, b"first\n")
    os.close(sink)
    full = os.open("/dev/full", os.O_WRONLY)
    bootlog.copy(source, full, journal_in)
    os.close(journal_in)
    assert os.read(journal_out, 100) == b"first\n"
    for handle in (source, full, journal_out):
        os.close(handle)


def test_a_log_has_a_limit_and_says_so(tmp_path: Path) -> None:
    source, sink = os.pipe()
    log = os.open(tmp_path / "log", os.O_RDWR | os.O_CREAT)
    closed = os.open(os.devnull, os.O_RDONLY)  # a broken journal: not writable
    child = os.fork()
    if child == 0:
        os.close(sink)
        bootlog.copy(source, log, closed, limit_bytes=100_000)
        os._exit(0)
    os.close(source)
    for _ in range(100):
        os.write(sink, b"x" * 9_999 + b"\n")
    os.close(sink)
    assert os.waitpid(child, 0)[1] == 0
    text = (tmp_path / "log").read_text()
    assert text.count(bootlog.GAP) == 1
    assert text.rstrip().endswith(bootlog.GAP)
    assert 100_000 <= len(text) < 100_000 + bootlog.CHUNK_BYTES + 200
    os.close(log)
    os.close(closed)
