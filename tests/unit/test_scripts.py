"""What the scripts do before there is a .venv: help, usage, the first key, root if needed."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import stat
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent.parent


def run(
    *command: str, env: dict[str, str] | None = None, cwd: Path = REPOSITORY
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=cwd, env={**os.environ, **(env or {})}, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


def lay_out_clone(folder: Path) -> None:
    """A clone without .venv and without bytecode."""
    for part in ("script", "lab", "stack", "inventory", "files/gateway"):
        leave_out = shutil.ignore_patterns("__pycache__")
        shutil.copytree(REPOSITORY / part, folder / part, ignore=leave_out)


@pytest.mark.parametrize("name", ["deploy", "test", "lab", "verify", "lock", "key"])
def test_help_needs_nothing(name: str, tmp_path: Path) -> None:
    """A clone without .venv, and a PATH without apt: help prints and installs nothing."""
    lay_out_clone(tmp_path)
    done = run(str(tmp_path / "script" / name), "--help", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"script/{name}" in done.stdout
    assert not (tmp_path / ".venv").exists()


def test_wrong_usage_of_the_lab_is_said_before_anything_is_installed(tmp_path: Path) -> None:
    lay_out_clone(tmp_path)
    done = run(str(tmp_path / "script" / "lab"), "frobnicate", cwd=tmp_path)
    assert done.returncode == 2
    assert not (tmp_path / ".venv").exists()


def test_a_key_is_shown_once_with_the_line_that_admits_it() -> None:
    done = run("script/key", "somebody")
    assert done.returncode == 0
    key = re.search(r"fable-[A-Za-z0-9_-]{20,}", done.stdout)
    assert key is not None
    assert f'"somebody": "{hashlib.sha256(key.group().encode()).hexdigest()}",' in done.stdout
    for wrong in ("", "two words", "-x"):
        refused = run("script/key", wrong)
        assert refused.returncode == 1
        assert "Traceback" not in refused.stderr
        assert "fable-" not in refused.stdout


def test_sudo_that_refuses_is_named_with_its_own_exit_code(tmp_path: Path) -> None:
    """As an ordinary user with a sudo (a stand-in) that lets nobody in."""
    sudo = tmp_path / "sudo"
    sudo.write_text("#!/bin/sh\necho 'sudo: ordinary is not in the sudoers file' >&2\nexit 1\n")
    sudo.chmod(sudo.stat().st_mode | stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH)
    program = (
        "import os, sys; sys.path.insert(0, 'script'); import environment\n"
        "os.geteuid = lambda: 1000\n"
        "environment.sys.excepthook = __import__('functools').partial("
        "environment._last_words, 'lab')\n"
        "environment.as_root(['true'], 'the lab needs root')\n"
    )
    done = run("python3", "-B", "-c", program, env={"PATH": f"{tmp_path}:{os.environ['PATH']}"})
    assert done.returncode == 3
    assert done.stderr.strip() == (
        "script/lab: the lab needs root, and sudo refuses (ordinary is not in the sudoers file); "
        "run this as root, or as a user whom sudo lets in"
    )


def test_root_through_sudo_in_somebodys_clone_is_sent_back(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a folder to somebody else")
    lay_out_clone(tmp_path)
    os.chown(tmp_path, 65534, 65534)
    done = run(str(tmp_path / "script" / "deploy"), env={"SUDO_UID": "65534"}, cwd=tmp_path)
    assert done.returncode == 2
    assert "without sudo" in done.stderr
    done = run(str(tmp_path / "script" / "test"), env={"SUDO_UID": "65534"}, cwd=tmp_path)
    assert done.returncode == 2
    assert not list(tmp_path.rglob("*.pyc"))
