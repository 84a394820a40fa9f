"""Stage 3 of the proof, with an invented torch and loader in a tiny venv: a stand-in.

The loader behaves as torch's does where that matters: it builds into TORCH_EXTENSIONS_DIR, once,
and waits without end for a lock file, which the builder keeps open.
"""

from __future__ import annotations

import json
import os
import sys
import sysconfig
from pathlib import Path

import pytest
from cuda_toolkit import extension
from cuda_toolkit.extension import Extension, check_extension, load_extension, remove_stale_locks
from cuda_toolkit.runner import Runner
from hostlib.errors import HostError

LOADER = """
import importlib.util, os, pathlib, time
print("a library that talks on standard output")
def load():
    folder = pathlib.Path(os.environ["TORCH_EXTENSIONS_DIR"]) / "standin"
    folder.mkdir(parents=True, exist_ok=True)
    while (folder / "lock").exists():
        time.sleep(0.02)
    built = folder / "standin.py"
    if not built.exists():
        built.write_text(pathlib.Path(os.environ["STANDIN_SOURCE"]).read_text())
    spec = importlib.util.spec_from_file_location("standin", built)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
"""
STANDIN = Extension("standin.loader", "load", ("one", "two"), "STANDIN_SOURCE")


@pytest.fixture
def venv(tmp_path: Path) -> Path:
    """A venv of this Python, with the stand-in of torch and of the engine's loader."""
    folder = tmp_path / "venv"
    site = folder / "lib" / f"python{sysconfig.get_python_version()}" / "site-packages"
    for package in ("torch", "standin"):
        (site / package).mkdir(parents=True)
        (site / package / "__init__.py").touch()
    (site / "torch/version.py").write_text("__version__ = 'stand-in'\n")
    (site / "standin/loader.py").write_text(LOADER)
    (folder / "bin").mkdir()
    (folder / "bin/python").symlink_to(sys.executable)
    (folder / "pyvenv.cfg").write_text(f"home = {Path(sys.base_prefix) / 'bin'}\n")
    return folder


@pytest.fixture
def runner(tmp_path: Path) -> Runner:
    source = tmp_path / "source.py"
    source.write_text("def one(): ...\ndef two(): ...\n")
    (tmp_path / "work").mkdir()
    environment = {
        "PATH": os.environ["PATH"],
        "TORCH_EXTENSIONS_DIR": str(tmp_path / "extensions"),
        "STANDIN_SOURCE": str(source),
    }
    return Runner(environment, tmp_path / "work")


def test_built_once_and_its_entry_points_are_there(
    venv: Path, runner: Runner, tmp_path: Path
) -> None:
    built = tmp_path / "extensions/standin/standin.py"
    first = check_extension(runner, venv, STANDIN)
    assert (first.check.ok, first.check.applies) == (True, True), first
    assert first.check.text == f"{built} exports one, two"
    assert {built, tmp_path / "source.py"} <= first.files
    time_ns = built.stat().st_mtime_ns
    assert check_extension(runner, venv, STANDIN).check == first.check
    assert built.stat().st_mtime_ns == time_ns


def test_a_missing_entry_point_is_named(venv: Path, runner: Runner, tmp_path: Path) -> None:
    (tmp_path / "source.py").write_text("def one(): ...\ntwo = 2\n")
    found = check_extension(runner, venv, STANDIN).check
    assert not found.ok
    assert found.text.endswith("standin.py: lacks two")


def test_a_loader_that_fails_shows_its_last_words(
    venv: Path, runner: Runner, tmp_path: Path
) -> None:
    (tmp_path / "source.py").unlink()
    found = check_extension(runner, venv, STANDIN).check
    assert (found.ok, found.text) == (False, "standin.loader.load failed")
    assert "FileNotFoundError" in found.details[-1]


def test_a_build_that_does_not_end_is_ended(
    venv: Path, runner: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extension, "BUILD_DEADLINE_S", 1.0)
    lock = tmp_path / "extensions/standin/lock"
    lock.parent.mkdir(parents=True)
    with lock.open("w"):  # a build that lives holds it
        found = check_extension(runner, venv, STANDIN).check
    assert (found.ok, found.text) == (False, "standin.loader.load did not end within 1 s")
    assert lock.exists()


def test_the_lock_of_a_killed_build_is_removed(venv: Path, runner: Runner, tmp_path: Path) -> None:
    lock = tmp_path / "extensions/standin/lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    found = check_extension(runner, venv, STANDIN).check
    assert found.ok, found
    assert found.details == (f"removed {lock}, left by a build that was killed",)


def test_only_locks_are_removed(tmp_path: Path) -> None:
    other = tmp_path / "standin/build.ninja"
    other.parent.mkdir()
    other.touch()
    (tmp_path / "folder/lock").mkdir(parents=True)
    assert remove_stale_locks({"TORCH_EXTENSIONS_DIR": str(tmp_path)}) == ()
    assert other.exists()
    assert remove_stale_locks({}) == ()


def test_what_is_not_there_is_said(venv: Path, runner: Runner) -> None:
    (torch,) = venv.glob("lib/*/site-packages/torch")
    for where, what, words in (
        (None, STANDIN, "no venv was named"),
        (venv, None, "builds none"),
        (venv.parent / "empty", STANDIN, "has no torch"),
    ):
        found = check_extension(runner, where, what).check
        assert (found.ok, found.applies, words in found.text) == (True, False, True), found
    assert torch.is_dir()


def test_the_engines_own_extension_is_data(tmp_path: Path) -> None:
    found = load_extension(extension.EXTENSIONS, "skinny")
    assert found is not None
    assert found.entry_points == ("gemm_qpn2", "gemm_qpn8", "gemm_qpn8_mt2")
    assert load_extension(extension.EXTENSIONS, "iq4xs") is None
    table = tmp_path / "extensions.json"
    for text in ("{", json.dumps({"skinny": {"module": "x"}}), json.dumps({"skinny": []})):
        table.write_text(text)
        with pytest.raises(HostError) as caught:
            load_extension(table, "skinny")
        assert str(table) in caught.value.message
        assert caught.value.exit_code == 2
