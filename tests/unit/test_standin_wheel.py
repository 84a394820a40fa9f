"""The stand-in's wheel: repeatable, installable, and complete."""

from __future__ import annotations

import base64
import csv
import hashlib
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

from tests.unit.standin_support import ENGINE

NAME = "lab_engine_standin-0.1.0-py3-none-any.whl"


def build(out: Path) -> Path:
    command = [sys.executable, str(ENGINE.parent / "wheel.py"), str(out)]
    answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    return Path(answer.stdout.strip())


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("wheel"))


def test_build_is_repeatable(wheel: Path, tmp_path: Path) -> None:
    again = build(tmp_path / "new" / "folder")
    assert again.name == wheel.name == NAME
    digests = [hashlib.sha256(path.read_bytes()).hexdigest() for path in (wheel, again)]
    assert digests[0] == digests[1]


def test_record_names_every_file_with_its_digest(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        assert archive.testzip() is None
        names = archive.namelist()
        record = next(name for name in names if name.endswith("/RECORD"))
        rows = list(csv.reader(archive.read(record).decode().splitlines()))
        assert sorted(row[0] for row in rows) == sorted(names)
        for name, digest, size in rows:
            if name == record:
                assert (digest, size) == ("", "")
                continue
            data = archive.read(name)
            encoded = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")
            assert (digest, size) == (f"sha256={encoded}", str(len(data)))
        metadata = Parser().parsestr(archive.read(record.replace("RECORD", "METADATA")).decode())
    assert metadata["Name"] == "lab-engine-standin"
    assert metadata.get_all("Requires-Dist") == ["aiohttp"]
    packaged = {name for name in names if "dist-info" not in name}
    sources = {
        path.relative_to(ENGINE).as_posix()
        for folder in ("engine_standin", "vllm")
        for path in (ENGINE / folder).rglob("*")
        if path.suffix in {".py", ".json"}
    }
    assert packaged == sources


def test_installs_and_runs_away_from_the_tree(wheel: Path, tmp_path: Path) -> None:
    place = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    pip += ["--disable-pip-version-check", "--target", str(place), str(wheel)]
    subprocess.run(pip, check=True, timeout=60, cwd=tmp_path)
    module = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--swap-space", "4"]
    answer = subprocess.run(
        module, cwd=place, env={}, capture_output=True, text=True, timeout=30, check=False
    )
    assert answer.returncode == 2
    assert "--model" in answer.stderr
    version = "import importlib.metadata as m; print(m.version('lab-engine-standin'))"
    command = [sys.executable, "-c", version]
    shown = subprocess.run(
        command, cwd=place, capture_output=True, text=True, timeout=30, check=False
    )
    assert shown.stdout.strip() == "0.1.0"


def test_lock_holds_hashes_for_every_package() -> None:
    requirements = [
        line
        for line in (ENGINE / "requirements.lock").read_text().replace("\\\n", " ").splitlines()
        if line and not line.lstrip().startswith("#")
    ]
    assert any(line.startswith("aiohttp==") for line in requirements)
    assert all("==" in line and "--hash=sha256:" in line for line in requirements)
