"""The toolkit's lock: what settings make of it, and how it is refreshed."""

from __future__ import annotations

import hashlib
import json
import runpy
import stat
from pathlib import Path
from typing import Any

import pytest
import yaml
from hostlib.errors import HostError

from stack import artifacts, locks, settings
from stack.errors import StackError
from stack.roles.toolkit import chosen_compiler, resolved_path, specification
from tests.unit.toolkit_support import Site, is_one_line, lay_out_programs, manifest_of

LOCKED = artifacts.ToolkitArtifacts.model_validate(
    yaml.safe_load(artifacts.LOCK.read_text())["toolkit"]
)
RUNFILES = {
    "12.8.1": "228f6bcaf5b7618d032939f431914fc92d0e5ed39ebe37098a24502f26a19797",
    "12.8.0": "610867dcd6d94c4e36c4924f1d01b9db28ec08164e8af6c764f21b84200695f8",
}


def host(compiler: str = "", **toolkit: Any) -> settings.EngineHost:
    data: dict[str, Any] = {"address": "198.19.77.21"}
    for name in ("all", "v100"):
        data |= runpy.run_path(f"group_data/{name}.py")
    overrides = {f"toolkit.{key}": value for key, value in toolkit.items()}
    data |= {"overrides": overrides, "access": {"consumers": []}}
    if compiler:
        overrides["engine.environment"] = {"NVCC_CCBIN": compiler}
    return settings.engine_host(data, "inventory/lab.py")


SOURCES: list[dict[str, Any]] = [
    {},
    {"source": "mirror", "location": "/media/disk/cuda"},
    {"source": "mirror", "location": "http://198.19.77.1/cuda", "components": ["cuda_nvcc"]},
    {"source": "runfile"},
    {"source": "runfile", "location": "/media/disk/cuda.run", "runfile": "12.8.0"},
    {"source": "adopted", "adopted": "cuda-0123456789abcdef"},
]


@pytest.mark.parametrize("toolkit", SOURCES)
def test_the_installer_takes_what_the_settings_make_of_the_lock(
    tmp_path: Path, toolkit: dict[str, Any]
) -> None:
    chosen = host(**toolkit)
    site = Site(tmp_path, lay_out_programs(tmp_path / "tools"), tmp_path, {})
    site.spec = specification(chosen.toolkit, LOCKED)
    found = site.status()
    assert found["installed"] is False
    assert Path(found["path"]).name == Path(resolved_path(chosen, LOCKED)).name


def test_the_installers_proof_compiles_with_the_engines_host_compiler() -> None:
    assert chosen_compiler(host()) == []
    assert chosen_compiler(host("/usr/bin/g++-14")) == ["env", "NVCC_CCBIN=/usr/bin/g++-14"]


def test_the_lock_is_whole() -> None:
    spec = specification(host().toolkit, LOCKED)
    assert len(spec["components"]) == 16
    assert spec["base_url"] == "https://developer.download.nvidia.com/compute/cuda/redist"
    assert {item.release: item.sha256 for item in LOCKED.runfiles} == RUNFILES
    for release, version in (("12.8.1", "12.8.93"), ("12.8.0", "12.8.61")):
        spec = specification(host(source="runfile", runfile=release).toolkit, LOCKED)
        assert spec["runfile"]["location"].startswith("https://developer.download.nvidia.com/")
        assert f"/cuda_{release}_" in spec["runfile"]["location"]
        assert spec["compiler_version"] == version


def test_a_release_holds_the_adopted_tree_that_the_settings_name() -> None:
    chosen = host(source="adopted", adopted="cuda-0123456789abcdef", runfile="12.8.0")
    assert resolved_path(chosen, LOCKED) == "/mnt/data/nvfp4/toolkits/cuda-0123456789abcdef"
    assert specification(chosen.toolkit, LOCKED)["compiler_version"] == "12.8.61"


@pytest.mark.parametrize(
    ("toolkit", "words"),
    [
        ({"source": "runfile", "runfile": "13.0.0"}, "has no 13.0.0"),
        ({"components": ["cuda_nvcc", "cuda_gdb"]}, "has no cuda_gdb"),
    ],
)
def test_what_the_lock_lacks_is_named(toolkit: dict[str, Any], words: str) -> None:
    with pytest.raises(StackError, match=words):
        specification(host(**toolkit).toolkit, LOCKED)


@pytest.mark.parametrize(
    ("toolkit", "words"),
    [
        ({"source": "floppy"}, "toolkit.source"),
        ({"source": "mirror"}, "a mirror needs one"),
        ({"location": "/x"}, "only for source mirror or runfile"),
        ({"source": "mirror", "location": "relative/folder"}, "toolkit.location"),
        ({"source": "adopted"}, "the tree's name with source adopted"),
        ({"adopted": "cuda-0123456789abcdef"}, "None with any other"),
        ({"source": "adopted", "adopted": "cuda-12.8"}, "toolkit.adopted"),
        (
            {"source": "adopted", "adopted": "cuda-0123456789abcdef", "location": "/x"},
            "only for source mirror or runfile",
        ),
        ({"components": []}, "toolkit.components"),
        ({"components": ["cuda_nvcc", "cuda_nvcc"]}, "stands there twice"),
    ],
)
def test_wrong_settings_are_refused(toolkit: dict[str, Any], words: str) -> None:
    with pytest.raises(StackError, match=words) as refused:
        host(**toolkit)
    assert "\n" not in str(refused.value)


COMPONENTS = [
    {
        "name": name, "version": "12.8.90", "relative_path": f"{name}/{name}.tar.xz",
        "size": size, "sha256": digest * 64,
    }
    for name, size, digest in (("cuda_nvcc", 79, "0"), ("cuda_cccl", 9, "e"), ("libcufft", 4, "b"))
]  # fmt: skip


def make_lock(folder: Path, pinned: str | None = None) -> Path:
    """A copy of the committed lock that takes its toolkit from a manifest in `folder`."""
    manifest = json.dumps(manifest_of(COMPONENTS)).encode()
    (folder / "redistrib.json").write_bytes(manifest)
    text = artifacts.LOCK.read_text()
    for old, new in (
        (LOCKED.base_url, f"{folder}"),
        (LOCKED.manifest, "redistrib.json"),
        (LOCKED.manifest_sha256, pinned or hashlib.sha256(manifest).hexdigest()),
    ):
        assert old in text
        text = text.replace(old, new)
    lock = folder / "artifacts.lock.yaml"
    lock.write_text(text)
    return lock


def test_refreshing_writes_the_wanted_components_and_nothing_else(tmp_path: Path) -> None:
    lock = make_lock(tmp_path)
    before = lock.read_text()
    locks.refresh_toolkit(lock, ["libcufft", "cuda_nvcc"])
    after = yaml.safe_load(lock.read_text())
    assert after["toolkit"].pop("components") == [COMPONENTS[2], COMPONENTS[0]]
    old = yaml.safe_load(before)
    del old["toolkit"]["components"]
    assert after == old
    artifacts.ToolkitArtifacts.model_validate(
        {**after["toolkit"], "components": [COMPONENTS[2], COMPONENTS[0]]}
    )
    comments = [line for line in before.splitlines() if "#" in line]
    assert [line for line in lock.read_text().splitlines() if "#" in line] == comments
    assert stat.S_IMODE(lock.stat().st_mode) == 0o644
    assert sorted(path.name for path in tmp_path.iterdir()) == [lock.name, "redistrib.json"]
    mark = lock.stat().st_mtime_ns, lock.stat().st_ino
    locks.refresh_toolkit(lock, ["libcufft", "cuda_nvcc"])
    assert (lock.stat().st_mtime_ns, lock.stat().st_ino) == mark


@pytest.mark.parametrize(
    ("pinned", "names", "words"),
    [
        ("0" * 64, ["cuda_nvcc"], "its sha256 is not the pinned one; nothing was written"),
        (None, ["cuda_nvcc", "cuda_gdb"], "the manifest has no cuda_gdb"),
    ],
)
def test_a_manifest_that_does_not_fit_writes_nothing(
    tmp_path: Path, pinned: str | None, names: list[str], words: str
) -> None:
    lock = make_lock(tmp_path, pinned)
    before = lock.read_bytes()
    with pytest.raises(HostError, match=words):
        locks.refresh_toolkit(lock, names)
    assert lock.read_bytes() == before


def test_the_program_says_why_in_one_line_and_by_its_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(locks, "PYTHON_LOCKS", ())
    monkeypatch.setattr(locks, "LOCK", make_lock(tmp_path, "0" * 64))
    assert locks.main([]) == 1
    assert is_one_line(capsys.readouterr().err, "script/lock")
    (tmp_path / "redistrib.json").unlink()
    assert locks.main([]) == 4
    assert "cannot be fetched" in capsys.readouterr().err


def test_the_committed_components_are_those_of_the_settings() -> None:
    assert [item.name for item in LOCKED.components] == locks.wanted_components()
