"""The toolkit for real: CUDA 12.8 parts from the lab's mirror, compiled with for sm_70.

Needs gcc, and the mirror in the lab's cache or the packages to build it from.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from lab import mirror
from tests.lab.toolkit_lab import CHECKS, new_site, proof
from tests.unit.toolkit_support import PATIENCE_S, Site, flip_byte, whole_tree


@pytest.fixture
def site(tmp_path: Path, programs: Path, info: mirror.MirrorInfo) -> Site:
    return new_site(tmp_path, programs, info)


@pytest.fixture
def standing(installed: Site, copied: Path, tmp_path: Path) -> Site:
    """A site of its own whose installed tree is a copy."""
    site = Site(installed.base, installed.programs, tmp_path, {**installed.spec})
    site.root.mkdir()
    copied.rename(site.root / installed.link.readlink().name)
    site.link.symlink_to(site.root / installed.link.readlink().name)
    return site


def the_only_tree(site: Site) -> None:
    """Assert that the whole tree of the specification stands, and nothing besides."""
    tree = whole_tree(site)
    assert sorted(path.name for path in site.root.iterdir()) == [".lock", tree.name]


def test_the_whole_toolkit_over_http(installed: Site) -> None:
    the_only_tree(installed)
    tree = installed.link.resolve()
    assert (tree / "lib64").readlink() == Path("lib")
    assert json.loads((tree / "version.json").read_text())["cuda"]["version"] == "12.8.1"
    proof(installed, installed.link)  # other cases' proofs may have displaced the installer's
    code, report = proof(installed, installed.link)
    assert (code, report["ok"], report["from_stamp"]) == (0, True, True)
    assert [check["name"] for check in report["checks"]] == CHECKS


def test_a_second_run_changes_nothing_and_needs_no_mirror(installed: Site) -> None:
    before = sorted((str(path), path.lstat().st_mtime_ns) for path in installed.folder.rglob("*"))
    command = installed.arguments("install")
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert (done.returncode, done.stdout.startswith("already installed: ")) == (0, True)
    after = sorted((str(path), path.lstat().st_mtime_ns) for path in installed.folder.rglob("*"))
    spec = str(installed.folder / "spec.json")
    assert [item for item in after if item[0] != spec] == [
        item for item in before if item[0] != spec
    ]


def test_the_compiler_builds_for_volta_with_these_headers(installed: Site, tmp_path: Path) -> None:
    source = tmp_path / "k.cu"
    source.write_text(
        "#include <cuda_fp16.h>\n"
        "__global__ void k(__half *x) { *x = __hmax_nan(x[0], x[1]); }\n"
        "int main() { k<<<1, 1>>>(nullptr); return CUDART_VERSION != 12080; }\n"
    )
    nvcc = installed.link / "bin/nvcc"
    subprocess.run([nvcc, "-arch=sm_70", "--cudart=shared", "-o", "k", source], cwd=tmp_path,
                   check=True)  # fmt: skip
    listed = subprocess.run([installed.link / "bin/cuobjdump", "--list-elf", "k"], cwd=tmp_path,
                            capture_output=True, text=True, check=True)  # fmt: skip
    assert "sm_70.cubin" in listed.stdout
    library = str(installed.link / "lib64")
    subprocess.run([tmp_path / "k"], env={"LD_LIBRARY_PATH": library}, check=True)


def test_one_flipped_byte_in_the_mirror_leaves_no_prefix(
    site: Site, tmp_path: Path, info: mirror.MirrorInfo
) -> None:
    base = tmp_path / "mirror"
    shutil.copytree(info.folder, base)
    site.base, site.spec["base_url"] = base, str(base)
    flip_byte(site.archive("cuda_nvcc"))
    done = site.run("install")
    assert done.returncode == 1
    assert "sha256 differs from the locked one" in done.stderr
    assert site.trees() == []
    assert not site.link.exists()


def test_a_changed_expectation_proves_the_standing_tree_anew(standing: Site) -> None:
    site = standing
    site.spec["required_headers"] = ["cuda_fp16.h", "vector_types.h"]
    assert site.status()["proved"] is False
    site.spec["base_url"] = "/nonexistent"
    assert site.run("install").returncode == 0
    the_only_tree(site)
    kept = (site.link / ".toolkit.json").read_bytes()
    site.spec.update(required_headers=["cublas_v2.h"], compiler_version="12.8.93")
    done = site.run("install")
    assert done.returncode == 1
    assert "lacks cublas_v2.h" in done.stderr
    assert "nvcc is 12.4.131, expected 12.8.93" in done.stderr
    assert (site.link / ".toolkit.json").read_bytes() == kept


def test_an_exchanged_tool_is_noticed_and_healed(standing: Site) -> None:
    site = standing
    shutil.copy("/bin/false", site.link / "bin/ptxas")
    found = site.status()
    assert (found["proved"], found["changed_reason"]) == (
        False, "bin/ptxas was changed since the proof",
    )  # fmt: skip
    done = site.run("install")
    assert done.returncode == 0, done.stderr
    assert f"{found['path']}: 1 changed (cuda_nvcc); installing it anew" in done.stderr
    the_only_tree(site)
    assert proof(site, site.link, "--deep")[0] == 0


@pytest.mark.parametrize("phase", ["unpacking", "proving"])
def test_a_killed_installer_leaves_nothing_half_made(site: Site, phase: str) -> None:
    """With real parts; many more moments are tried in test_toolkit_kills.py."""
    marks = {"unpacking": ".staging*/cuda_nvcc/*", "proving": ".staging*/tree/.toolkit.json"}
    process = subprocess.Popen(
        site.arguments("install"), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + PATIENCE_S
    while not list(site.root.glob(marks[phase])):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert site.trees() == []
    done = site.run("install")
    assert done.returncode == 0, done.stderr
    the_only_tree(site)
