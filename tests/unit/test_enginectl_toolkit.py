"""The switch and the toolkit's proof: a toolkit that is not proved never costs the running engine.

The proof itself is replaced by a program that answers as it is told; tests/lab has the real one.
"""

from __future__ import annotations

import json
import os
import pwd
import shutil
import signal
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from enginectl import toolkit
from enginectl.paths import Places
from enginectl.release import load_release
from hostlib.errors import HostError

from tests.unit.enginectl_host import WAIT_S, Host
from tests.unit.enginectl_support import content, install, lay_down

FAILED = {
    "code": 1,
    "lines": [
        "ok   compiler: there",
        "FAIL header origin: from elsewhere",
        "       /usr/include/a.h",
    ],
    "report": {"ok": False, "failures": ["header origin: from elsewhere"]},
}


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    host = Host(tmp_path_factory.mktemp("host"), install(tmp_path_factory.mktemp("lib")))
    assert host.switch(host.release("one"))[0] == 0
    yield host
    host.systemctl("stop", "fable-engine.service")


def candidate(host: Host, mark: str, answer: dict[str, Any]) -> tuple[str, Path]:
    """A release whose proof answers so, and the folder of its toolkit."""
    name = host.release(mark)
    folder = host.root / "parts" / mark
    (folder / "answer.json").write_text(json.dumps(answer))
    return name, folder


def untouched(host: Host) -> tuple[int, dict[str, Any], int, bool]:
    return host.pid, host.state, len(host.history), host.trial.exists()


def test_a_failed_proof_is_refused_with_its_evidence(serving: Host) -> None:
    before = untouched(serving)
    name, _ = candidate(serving, "failed", FAILED)
    code, record, said = serving.switch(name)
    assert (code, record) == (9, {})
    assert f"{name}: its toolkit is not proved, nothing was touched: header origin" in said
    for line in FAILED["lines"]:  # type: ignore[attr-defined]
        assert line in said.splitlines()
    assert untouched(serving) == before
    assert serving.running == "one"


@pytest.mark.parametrize(
    ("answer", "word"),
    [
        ({"code": 2, "lines": ["cuda-proof: no gcc"], "report": {}}, "cuda-proof: no gcc"),
        ({"code": 1, "lines": ["odd"], "report": {"failures": "odd"}}, "exit code 1"),
        ({"code": 0x7F, "lines": ["\x1b[2Jclear"], "report": []}, "?[2Jclear"),
    ],
)
def test_a_proof_that_cannot_run_is_refused_too(
    serving: Host, answer: dict[str, Any], word: str
) -> None:
    before = untouched(serving)
    name, _ = candidate(serving, f"unable{answer['code']}", answer)
    code, record, said = serving.switch(name)
    assert (code, record) == (9, {})
    assert "the proof could not run" in said
    assert word in said
    assert "\x1b" not in said
    assert untouched(serving) == before


def test_an_interrupted_proof_leaves_the_engine_alone(serving: Host) -> None:
    before = untouched(serving)
    name, folder = candidate(serving, "slow", {**FAILED, "seconds": 600})
    process = serving.begin(name)
    deadline = time.monotonic() + WAIT_S
    while not (folder / "asked.json").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=WAIT_S)
    assert process.returncode == 130
    assert not Path(f"/proc/{json.loads((folder / 'asked.json').read_text())['pid']}").exists()
    assert untouched(serving) == before
    assert serving.running == "one"


def test_the_proof_sees_the_engines_very_environment(serving: Host) -> None:
    folder = serving.root / "parts/one"
    asked = json.loads((folder / "asked.json").read_text())
    with urllib.request.urlopen(f"http://127.0.0.1:{serving.port}/environment") as response:
        seen = json.load(response)
    assert seen.pop("INVOCATION_ID")
    assert asked["environment"] == {key: value for key, value in seen.items() if key != "LC_CTYPE"}
    assert asked["argv"] == [
        "--json", f"--venv={folder}", "--engine=skinny", "--environment=-", str(folder),
    ]  # fmt: skip


def released(tmp_path: Path, **changes: Any) -> Any:
    value = content(tmp_path / "parts", **changes)
    lay_down(tmp_path, value)
    return load_release(Places(tmp_path), value["name"])


def test_a_proof_that_does_not_end_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(toolkit, "PROGRAM", install(tmp_path / "lib").with_name("cuda-proof"))
    monkeypatch.setattr(toolkit, "PROOF_SECONDS", 1)
    release = released(tmp_path)
    (tmp_path / "parts/answer.json").write_text(json.dumps({**FAILED, "seconds": 600}))
    with pytest.raises(HostError, match="not done after 1 s") as caught:
        toolkit.prove(release, {}, print)
    assert caught.value.exit_code == 9


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has rights to drop")
def test_root_drops_its_rights_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nobody = pwd.getpwnam("nobody")
    folder = Path("/var/tmp") / f"proof-as-nobody.{os.getpid()}"
    try:
        program = install(folder / "lib").with_name("cuda-proof")
        monkeypatch.setattr(toolkit, "PROGRAM", program)
        release = released(folder, user="nobody")
        (folder / "parts").chmod(0o777)
        toolkit.prove(release, {"A": "b"}, print)
        asked = json.loads((folder / "parts/asked.json").read_text())
    finally:
        shutil.rmtree(folder)
    assert (asked["uid"], asked["gid"]) == (nobody.pw_uid, nobody.pw_gid)
    assert asked["environment"] == {"A": "b"}


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        ({}, None),
        (FAILED, "its toolkit is not proved: header origin: from elsewhere"),
        ({**FAILED, "code": 2}, "the proof could not run (exit code 2)"),
    ],
)
def test_a_release_that_must_run_is_reported_and_not_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: dict[str, Any], told: str | None
) -> None:
    monkeypatch.setattr(toolkit, "PROGRAM", install(tmp_path / "lib").with_name("cuda-proof"))
    release = released(tmp_path)
    if answer:
        (tmp_path / "parts/answer.json").write_text(json.dumps(answer))
    said: list[str] = []
    found = toolkit.report(release, {}, said.append)
    assert found is None if told is None else told in str(found)
    assert "\n" not in str(found)
    assert said[0] == answer.get("lines", ["ok   a check"])[0]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user")
def test_a_user_that_the_host_lacks_is_named(tmp_path: Path) -> None:
    release = released(tmp_path, user="nobody-of-that-name")
    with pytest.raises(HostError, match="the host has no user nobody-of-that-name") as caught:
        toolkit.prove(release, {}, print)
    assert caught.value.exit_code == 9


def test_a_proof_that_is_not_there_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(toolkit, "PROGRAM", tmp_path / "cuda-proof")
    with pytest.raises(HostError, match="its toolkit is not proved") as caught:
        toolkit.prove(released(tmp_path), {}, print)
    assert str(tmp_path / "cuda-proof") in caught.value.message
