"""Who is in the way of a start: named if a stranger, ended if an engine of ours left it behind."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from enginectl import blockers
from enginectl.paths import Places
from enginectl.release import Listen, Release, load_release
from hostlib.errors import HostError

from tests.unit.enginectl_support import USER, content, free_port, lay_down

LISTEN = """
import signal, socket, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
one = socket.create_server(("127.0.0.1", int(sys.argv[1])))
print("listens", flush=True)
time.sleep(600)
"""


@contextmanager
def listener(python: str, port: int) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen([python, "-c", LISTEN, str(port)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "listens\n"
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def venv_python(tmp_path: Path, port: int) -> str:
    """A release whose venv has an interpreter of its own, as a link to this one."""
    venv = tmp_path / "venv"
    (venv / "bin").mkdir(parents=True)
    (venv / "bin/python").symlink_to(sys.executable)
    paths = {"venv": str(venv), "toolkit": "/no/toolkit", "checkpoint": "/no/checkpoint"}
    lay_down(tmp_path, content(tmp_path / "parts", port, paths=paths))
    return str(venv / "bin/python")


def only_release(places: Places) -> Release:
    [folder] = places.releases.iterdir()
    return load_release(places, folder.name)


def test_a_stranger_is_named_and_left_alone(tmp_path: Path, port: int, venv_python: str) -> None:
    places = Places(tmp_path)
    release = only_release(places)
    with listener(sys.executable, port) as stranger:
        assert [one.pid for one in blockers.strangers(release.listen, ())] == [stranger.pid]
        assert blockers.strangers(release.listen, [stranger.pid]) == []
        with pytest.raises(
            HostError, match=rf"process {stranger.pid} \({USER}, .*python"
        ) as raised:
            blockers.wait_clear(places, release, seconds=0)
        assert f"listens on 127.0.0.1:{port}" in raised.value.message
        assert stranger.poll() is None


def test_an_orphan_of_a_release_is_ended_though_it_ignores_sigterm(
    tmp_path: Path, port: int, venv_python: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blockers, "TERM_SECONDS", 0.2)
    places = Places(tmp_path)
    with listener(venv_python, port) as orphan:
        [words] = blockers.wait_clear(places, only_release(places), seconds=0)
        assert f"process {orphan.pid} " in words
        assert orphan.wait(timeout=10) == -9
    with socket.create_server(("127.0.0.1", port)):
        pass


SMI = """#!/bin/sh
case "$*" in
*query-gpu*) printf '0, 17200\\n1, 9000\\n2, 4\\n3, 500\\n';;
*--id=0*) printf '%s, 17196\\n' "$OURS";;
*--id=1*) printf '%s, 8000\\n%s, 1000\\n' "$OURS" 1;;
esac
"""


def test_cards_are_filled_by_strangers_or_by_nobody_that_can_be_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nvidia-smi").write_text(SMI)
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("OURS", str(os.getpid()))
    found = blockers.strangers(Listen("127.0.0.1", free_port()), [os.getpid()])
    assert [(one.pid, one.where) for one in found] == [
        (1, "holds 1000 MiB of card 1"),
        (0, "holds 500 MiB of card 3"),
    ]
    assert str(found[0]).startswith("process 1 (root, ")
    assert str(found[1]).startswith("a process that cannot be seen ")
