"""The project's own rules, as tests: what imports what, what must not stand in the tree."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent.parent
HOST_PACKAGES = {
    "files/hostlib/hostlib": {"hostlib"},
    "files/toolkit/cuda_toolkit": {"hostlib", "cuda_toolkit"},
    "files/checkpoint/checkpoint": {"hostlib", "checkpoint"},
    "files/engine/enginectl": {"hostlib", "enginectl"},
    "files/venv/venv_build": {"hostlib", "venv_build"},
    "files/managed": set(),
    "files/handover": set(),
    "files/gateway/fable_gateway": {
        "fable_gateway", "hostlib", "aiohttp", "uvloop", "multidict", "yarl", "prometheus_client",
    },
}  # fmt: skip
LARGEST_BYTES = 1 << 20
# Written in pieces, so that this file does not match itself.
REGISTRY_HOSTS = re.compile(
    r"(deb\.debian|pypi|pythonhosted|npmjs|archive\.ubuntu)" + r"\.(org|com)"
)
MACHINE_PATHS = re.compile(r"(?<![\w.])/(wo" + r"rk/(main|shared)|ro" + r"ot/\w)")


def tracked() -> list[Path]:
    listing = subprocess.run(
        # root in a container is not the clone's owner
        ["git", "-c", "safe.directory=*", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=REPOSITORY, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    return [REPOSITORY / line for line in listing.splitlines() if (REPOSITORY / line).is_file()]


def python_files(folder: str) -> list[Path]:
    return sorted((REPOSITORY / folder).rglob("*.py"))


def imported(path: Path) -> Iterator[str]:
    """Top-level names of all that a file imports."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            yield node.module.split(".")[0]


@pytest.mark.parametrize("folder", HOST_PACKAGES)
def test_programs_for_hosts_import_nothing_but_their_own(folder: str) -> None:
    allowed = HOST_PACKAGES[folder] | set(sys.stdlib_module_names)
    files = python_files(folder)
    assert files
    for path in files:
        assert set(imported(path)) <= allowed, path


def test_every_host_package_is_under_that_rule() -> None:
    found = {
        str(path.parent.relative_to(REPOSITORY))
        for path in (REPOSITORY / "files").glob("*/*/__init__.py")
    }
    assert found <= set(HOST_PACKAGES)


def test_production_code_knows_nothing_of_the_lab_and_the_tests() -> None:
    for path in [*python_files("stack"), *python_files("files"), REPOSITORY / "deploy.py"]:
        assert not {"lab", "tests"} & set(imported(path)), path
        assert "LAB_" not in path.read_text(), path


def test_pyinfra_stays_at_the_edge() -> None:
    pure = ["settings.py", "artifacts.py", "release.py", "managed.py", "places.py"]
    for name in pure:
        assert "pyinfra" not in set(imported(REPOSITORY / "stack" / name)), name


@pytest.mark.parametrize("folder", ["stack/roles", "stack/operations"])
def test_no_operation_stands_in_a_plain_loop(folder: str) -> None:
    operations = {"managed_files", "installed", "committed_release", "service", "packages", "user"}
    for path in python_files(folder):
        for loop in ast.walk(ast.parse(path.read_text())):
            if isinstance(loop, ast.For | ast.While):
                called = {
                    getattr(node.func, "attr", getattr(node.func, "id", ""))
                    for node in ast.walk(loop)
                    if isinstance(node, ast.Call)
                }
                assert not called & operations, f"{path}:{loop.lineno}"


def test_every_operation_in_a_role_has_a_name() -> None:
    modules = {"apt", "server", "systemd"}
    own = {"managed_files", "installed", "committed_release"}
    count = 0
    for path in python_files("stack/roles"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            function = node.func
            is_module = (
                isinstance(function, ast.Attribute)
                and isinstance(function.value, ast.Name)
                and function.value.id in modules
            )
            if is_module or (isinstance(function, ast.Name) and function.id in own):
                count += 1
                assert "name" in {keyword.arg for keyword in node.keywords}, f"{path}:{node.lineno}"
    assert count > 10


def test_no_registry_host_and_no_path_of_a_machine_stands_in_the_tree() -> None:
    for path in tracked():
        text = path.read_text(errors="replace")
        assert not REGISTRY_HOSTS.search(text), path
        assert not MACHINE_PATHS.search(text), path


def test_no_large_or_binary_file_stands_in_the_tree() -> None:
    for path in tracked():
        content = path.read_bytes()
        assert len(content) <= LARGEST_BYTES, path
        assert b"\0" not in content, path


def test_no_shell_script_is_longer_than_a_screen() -> None:
    for path in tracked():
        first = path.read_text(errors="replace").partition("\n")[0]
        if re.match(r"#!.*\b(ba|da|z)?sh\b", first):
            assert len(path.read_text().splitlines()) <= 50, path


@pytest.mark.parametrize("script", ["deploy", "test", "lab", "verify", "lock"])
def test_every_script_has_help(script: str) -> None:
    done = subprocess.run(
        [sys.executable, f"script/{script}", "--help"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert f"script/{script}" in done.stdout


def test_python_locks_hold_a_hash_for_every_pin() -> None:
    locks = [path for path in tracked() if path.name.endswith(".lock") and path.name != "uv.lock"]
    assert len(locks) >= 4
    for path in locks:
        for pin in re.split(r"\n(?=\S)", path.read_text()):
            if re.match(r"[a-zA-Z0-9]", pin):
                assert "==" in pin.split("\n", maxsplit=1)[0], f"{path}: {pin[:60]}"
                assert "--hash=sha256:" in pin, f"{path}: {pin[:60]}"
