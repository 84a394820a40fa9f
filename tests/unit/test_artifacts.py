"""Locks: no byte from outside without a digest."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from checkpoint.manifest import FileEntry, render

from stack import artifacts
from stack.errors import StackError

MANIFEST = render(
    {name: FileEntry(1, "4" * 64) for name in ("config.json", "model.safetensors")},
    {},
    {"origin": "a test"},
)
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
    "checkpoint": {
        name: {"source": f"http://198.19.77.1:8080/{name}", "manifest": f"{name}.json"}
        for name in ("whole", "trunk", "base")
    },
    "engine": {
        "wheel": {"distribution": "d", "url": "http://198.19.77.1/d.whl", "sha256": "3" * 64},
        "requirements": "files/gateway/requirements.lock",
    },
}


COMMIT = "554ebba9b5f1b79dc11246341960360e6ef05ef4"


def write(folder: Path, content: dict[str, Any], manifests: Sequence[str] = ("whole",)) -> Path:
    """A lock in `folder`, with these manifests beside it."""
    content = copy.deepcopy(content)
    for tree in content["checkpoint"].values():
        if isinstance(tree, dict) and isinstance(tree.get("manifest"), str):
            tree["manifest"] = str(folder / tree["manifest"])
    for name in manifests:
        (folder / f"{name}.json").write_bytes(MANIFEST)
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
    for entry in ("engine.requirements", "engine.overlay.commit", "docs/operations.md"):
        assert entry in str(refused.value)


def test_a_manifest_that_is_not_there_is_named_with_the_command_that_fills_it(
    tmp_path: Path,
) -> None:
    path = write(tmp_path, GOOD, manifests=())
    with pytest.raises(StackError) as refused:
        artifacts.load(path)
    assert "checkpoint.whole.manifest (by ckpt adopt on v100)" in str(refused.value)
    assert "trunk" not in str(refused.value)
    with pytest.raises(StackError) as refused:
        artifacts.load(path, "assemble")
    for text in (
        "whole.manifest (by ckpt assemble on v100)",
        "trunk.manifest (by ckpt adopt on v100)",
        "base.manifest (by script/lock)",
    ):
        assert f"checkpoint.{text}" in str(refused.value)
    write(tmp_path, GOOD, manifests=("whole", "trunk", "base"))
    assert artifacts.load(path, "assemble").checkpoint.base.listed().raw == MANIFEST


def test_a_damaged_manifest_and_one_of_another_revision_are_refused(tmp_path: Path) -> None:
    content = copy.deepcopy(GOOD)
    content["checkpoint"]["whole"]["source"] = f"https://huggingface.co/o/n/resolve/{COMMIT}"
    locked = artifacts.load(write(tmp_path, content))
    assert locked.checkpoint.whole.listed().raw == MANIFEST  # adopted: of no revision
    other = MANIFEST.replace(b'"provenance": {', b'"provenance": {"revision": "%s",' % (b"0" * 40))
    (tmp_path / "whole.json").write_bytes(other)
    with pytest.raises(StackError, match=f"whole.json: is of revision 0{{40}}, .*{COMMIT}"):
        locked.checkpoint.whole.listed()
    (tmp_path / "whole.json").write_bytes(MANIFEST[:-9])
    with pytest.raises(StackError, match=r"whole.json: is not valid JSON"):
        locked.checkpoint.whole.listed()


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("toolkit", "manifest_sha256", None),
        ("toolkit", "manifest_sha256", "0" * 63),
        ("toolkit", "surprise", 1),
        ("toolkit", "cuda_version", 13000),
        ("checkpoint", "whole", {"source": None}),
        ("checkpoint", "trunk", {"source": "v100:/mnt", "manifest": "m"}),
        (
            "checkpoint",
            "base",
            {"source": "https://huggingface.co/o/n/resolve/main", "manifest": "m"},
        ),
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
