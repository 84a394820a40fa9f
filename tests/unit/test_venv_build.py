"""Venvs from a lock: proved, moved, instant the second time, nothing after a failure."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from stack import FILES

SYSTEM_PYTHON = "/usr/bin/python3"


def make_wheel(folder: Path, body: str = "VALUE = 1\n") -> Path:
    """A wheel with a module and a script, written by hand."""
    path = folder / "invented-1.0-py3-none-any.whl"
    info = "invented-1.0.dist-info"
    files = {
        "invented.py": body,
        f"{info}/METADATA": "Metadata-Version: 2.1\nName: invented\nVersion: 1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\n"
        "Tag: py3-none-any\n",
        f"{info}/entry_points.txt": "[console_scripts]\ninvented = invented:__name__.title\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{name},,\n" for name in [*files, f"{info}/RECORD"])
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return path


class Builder:
    """The program, laid out as on a host."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "venvs"
        self.link = folder / "venv"
        self.lock = folder / "wanted.lock"
        self.tools = folder / "tools"
        for source, name in (("hostlib", "hostlib"), ("venv", "venv_build"), ("venv", "bin")):
            (self.tools / name).parent.mkdir(exist_ok=True)
            (self.tools / name).symlink_to(FILES / source / name)
        program = self.tools / "run.py"
        program.write_text(
            f"import sys\nsys.path.insert(0, {str(self.tools)!r})\n"
            "from venv_build.cli import main\nsys.exit(main())\n"
        )
        self.program = program

    def lock_wheel(self, wheel: Path, digest: str | None = None) -> None:
        digest = digest or hashlib.sha256(wheel.read_bytes()).hexdigest()
        self.lock.write_text(f"invented @ {wheel.as_uri()} --hash=sha256:{digest}\n")

    def run(self, verb: str, module: str = "invented") -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [
                SYSTEM_PYTHON, "-I", str(self.program), verb, "--requirements", str(self.lock),
                "--python", SYSTEM_PYTHON, "--root", str(self.root), "--link", str(self.link),
                "--import", module,
            ],
            capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip

    def status(self) -> dict[str, object]:
        found: dict[str, object] = json.loads(self.run("status").stdout)
        return found


@pytest.fixture
def builder(tmp_path: Path) -> Builder:
    made = Builder(tmp_path)
    made.lock_wheel(make_wheel(tmp_path))
    return made


def test_a_venv_is_built_linked_and_works_from_its_final_place(builder: Builder) -> None:
    assert builder.status()["installed"] is False
    done = builder.run("build")
    assert done.returncode == 0, done.stderr
    assert builder.status() == {
        "path": str(builder.link.readlink()),
        "installed": True,
        "link_ok": True,
    }
    said = subprocess.run(
        [builder.link / "bin/python", "-c", "import invented; print(invented.VALUE)"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert said.stdout == "1\n"
    script = (builder.link.readlink() / "bin/invented").read_text()
    assert script.splitlines()[0] == f"#!{builder.link.readlink()}/bin/python"
    assert ".staging" not in script


def test_a_second_build_changes_nothing(builder: Builder) -> None:
    builder.run("build")
    venv = builder.link.readlink()
    stamps = {path: os.lstat(path).st_mtime_ns for path in venv.rglob("*")}
    assert builder.run("build").returncode == 0
    assert {path: os.lstat(path).st_mtime_ns for path in venv.rglob("*")} == stamps
    assert builder.link.readlink() == venv


def test_another_lock_makes_another_venv_and_keeps_the_old(
    builder: Builder, tmp_path: Path
) -> None:
    builder.run("build")
    old = builder.link.readlink()
    builder.lock_wheel(make_wheel(tmp_path, "VALUE = 2\n"))
    assert builder.status()["installed"] is False
    assert builder.run("build").returncode == 0
    assert builder.link.readlink() != old
    assert (old / "bin/python").exists()


@pytest.mark.parametrize("fault", ["digest", "import", "missing"])
def test_a_failure_leaves_nothing_and_the_old_venv_stands(
    builder: Builder, tmp_path: Path, fault: str
) -> None:
    builder.run("build")
    good = builder.link.readlink()
    wheel = make_wheel(tmp_path, "VALUE = 3\n")
    builder.lock_wheel(wheel, "0" * 64 if fault == "digest" else None)
    if fault == "missing":
        wheel.unlink()
    done = builder.run("build", "nothing_there" if fault == "import" else "invented")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr.splitlines()[0]
    assert done.stderr.startswith("venv-build: venv: ")
    assert builder.link.readlink() == good
    assert [path.name for path in builder.root.iterdir() if path.is_dir()] == [good.name]


def test_an_unfinished_venv_of_a_killed_run_is_not_taken_for_whole(builder: Builder) -> None:
    path = Path(str(builder.status()["path"]))
    path.mkdir(parents=True)
    (builder.root / ".staging-dead").mkdir()
    assert builder.status()["installed"] is False
    assert builder.run("build").returncode == 0
    assert not (builder.root / ".staging-dead").exists()
    assert builder.status()["installed"] is True


def test_no_such_interpreter_is_one_line(builder: Builder) -> None:
    done = subprocess.run(
        [sys.executable, str(builder.program), "build", "--requirements", str(builder.lock),
         "--python", "python3.99", "--root", str(builder.root)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.startswith("venv-build: python3.99: is not installed")
