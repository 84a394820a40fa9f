"""A role's files as a whole: laid down atomically, validated before, unchanged the second time."""

from __future__ import annotations

import base64
import grp
import hashlib
import json
import os
import pwd
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stack import FILES
from stack.managed import Entry, Owner, directory, file, link

PROGRAM = FILES / "managed" / "managed_files.py"
ME = Owner(pwd.getpwuid(os.getuid()).pw_name, grp.getgrgid(os.getgid()).gr_name)


def run(verb: str, entries: list[Entry]) -> subprocess.CompletedProcess[str]:
    """As the operation runs it: expectations as an argument, orders on standard input."""
    if verb == "check":
        arguments = ["check", json.dumps([entry.expectation() for entry in entries])]
        orders = ""
    else:
        arguments, orders = ["apply"], json.dumps([entry.order() for entry in entries])
    return subprocess.run(
        [sys.executable, "-I", "-c", PROGRAM.read_text(), *arguments],
        input=orders,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def differs(entries: list[Entry]) -> dict[str, str]:
    done = run("check", entries)
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = json.loads(done.stdout)["differs"]
    return found


def role(place: Path) -> list[Entry]:
    return [
        directory(place / "etc", ME, exclusive=True),
        file(place / "etc" / "one", "first\n", ME, 0o640),
        file(place / "etc" / "tool", b"\x00\xff", ME, 0o755),
        link(place / "current", place / "etc", ME),
    ]


def tree(place: Path) -> str:
    """The folder as coreutils see it."""
    listing = subprocess.run(
        ["find", ".", "-printf", "%p %y %m %l\\n"],
        cwd=place,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    sums = subprocess.run(
        ["find", ".", "-type", "f", "-exec", "sha256sum", "{}", "+"],
        cwd=place,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    return "\n".join(sorted((listing + sums).splitlines()))


def test_applied_once_it_is_as_it_should_be_and_a_second_time_changes_nothing(
    tmp_path: Path,
) -> None:
    entries = role(tmp_path)
    assert set(differs(entries)) == {entry.path for entry in entries}
    assert run("apply", entries).returncode == 0
    assert differs(entries) == {}
    before = tree(tmp_path)
    stamps = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    assert json.loads(run("apply", entries).stdout) == {"changed": []}
    assert tree(tmp_path) == before
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == stamps


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda place: (place / "etc/one").write_text("other"), "has other content"),
        (lambda place: (place / "etc/one").chmod(0o600), "has mode 600"),
        (lambda place: (place / "etc/one").unlink(), "missing"),
        (lambda place: (place / "etc/stray").write_text("x"), "holds stray, which is not ours"),
        (lambda place: (place / "etc").chmod(0o700), "has mode 700"),
    ],
)
def test_each_kind_of_drift_is_named_and_mended(tmp_path: Path, spoil: Any, reason: str) -> None:
    entries = role(tmp_path)
    run("apply", entries)
    good = tree(tmp_path)
    spoil(tmp_path)
    assert list(differs(entries).values()) == [reason]
    assert run("apply", entries).returncode == 0
    assert tree(tmp_path) == good


def test_a_refused_candidate_changes_nothing(tmp_path: Path) -> None:
    run("apply", role(tmp_path))
    before = tree(tmp_path)
    changed = [
        directory(tmp_path / "etc", ME, exclusive=True),
        file(tmp_path / "etc" / "one", "second\n", ME, 0o640),
        file(tmp_path / "etc" / "tool", "bad", ME, 0o755, validate=("grep", "-q", "good", "{}")),
    ]
    done = run("apply", changed)
    assert done.returncode == 1
    assert f"{tmp_path}/etc/tool: refused by grep, the old file stays" in done.stderr
    assert "Traceback" not in done.stderr
    assert tree(tmp_path) == before


@pytest.mark.parametrize("kind", ["file", "directory", "link"])
def test_something_else_at_the_place_is_never_overwritten(tmp_path: Path, kind: str) -> None:
    place = tmp_path / "taken"
    if kind == "directory":
        place.write_text("a file")
    else:
        place.mkdir()
    makers = {
        "file": file(place, "x", ME),
        "directory": directory(place, ME),
        "link": link(place, "/nowhere", ME),
    }
    before = tree(tmp_path)
    done = run("apply", [makers[kind]])
    assert done.returncode == 1
    assert f"{place}: something else than a {kind} stands there" in done.stderr
    assert tree(tmp_path) == before


def test_bytecode_in_an_exclusive_folder_is_no_drift(tmp_path: Path) -> None:
    entries = role(tmp_path)
    run("apply", entries)
    (tmp_path / "etc" / "__pycache__").mkdir()
    assert differs(entries) == {}


@given(content=st.binary(max_size=200), mode=st.sampled_from([0o600, 0o644, 0o755]))
def test_an_order_carries_the_exact_bytes(content: bytes, mode: int) -> None:
    order = file("/etc/x", content, ME, mode).order()
    assert base64.b64decode(order["content"]) == content
    assert order["sha256"] == hashlib.sha256(content).hexdigest()
    assert int(order["mode"], 8) == mode


def test_wrong_usage_is_said() -> None:
    done = subprocess.run(
        [sys.executable, str(PROGRAM), "destroy"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "usage" in done.stderr
