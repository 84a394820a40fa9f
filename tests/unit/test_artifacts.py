"""Locks: no byte from outside without a digest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from stack import artifacts
from stack.errors import StackError

GOOD: dict[str, Any] = {
    "toolkit": {
        "base_url": "http://198.19.77.1:8080/toolkit",
        "manifest": "m.json",
        "manifest_sha256": "0" * 64,
        "cuda_version": 12080,
        "compiler_version": "12.8.93",
        "required_headers": ["cuda.h"],
        "components": [
            {
                "name": "a",
                "version": "1",
                "relative_path": "a.tar.xz",
                "size": 1,
                "sha256": "1" * 64,
            }
        ],
    },
    "checkpoint": {"source": "http://198.19.77.1:8080/checkpoint", "manifest_sha256": "2" * 64},
    "engine": {
        "wheel": {"distribution": "d", "url": "http://198.19.77.1/d.whl", "sha256": "3" * 64},
        "requirements": "files/gateway/requirements.lock",
    },
}


def write(folder: Path, content: object) -> Path:
    path = folder / "artifacts.lock.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def test_a_whole_lock_is_read(tmp_path: Path) -> None:
    locked = artifacts.load(write(tmp_path, GOOD))
    text = artifacts.engine_requirements(locked.engine)
    assert text.endswith(f"d @ http://198.19.77.1/d.whl \\\n    --hash=sha256:{'3' * 64}\n")


def test_the_committed_lock_names_what_has_no_digest_yet() -> None:
    with pytest.raises(StackError) as refused:
        artifacts.load(artifacts.LOCK)
    for entry in ("checkpoint.manifest_sha256", "engine.requirements", "engine.overlay.commit"):
        assert entry in str(refused.value)
    assert "docs/operations.md" in str(refused.value)


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("toolkit", "manifest_sha256", None),
        ("toolkit", "manifest_sha256", "0" * 63),
        ("toolkit", "surprise", 1),
        ("toolkit", "cuda_version", 13000),
        ("checkpoint", "manifest_sha256", "latest"),
        ("engine", "wheel", {"distribution": "d", "url": "u"}),
    ],
)
def test_a_wrong_entry_is_named(tmp_path: Path, section: str, key: str, value: object) -> None:
    content = {**GOOD, section: {**GOOD[section], key: value}}
    path = write(tmp_path, content)
    with pytest.raises(StackError) as refused:
        artifacts.load(path)
    assert f"{path}: {section}.{key}" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_no_file_and_no_yaml_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(StackError, match="cannot be read"):
        artifacts.load(tmp_path / "nothing.yaml")
    broken = tmp_path / "broken.yaml"
    broken.write_text("a: [")
    with pytest.raises(StackError, match="is no YAML"):
        artifacts.load(broken)
