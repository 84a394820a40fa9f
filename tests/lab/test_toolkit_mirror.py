"""The toolkit for real: CUDA 12.8 parts from the lab's mirror, compiled with for sm_70.

Needs gcc, and the mirror in the lab's cache or the packages to build it from.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from lab import mirror
from tests.lab.toolkit_lab import CHECKS, new_site, proof
from tests.unit.toolkit_support import Site, flip_byte

KILL_MOMENTS_S = (0.3, 0.8, 1.4, 2.0, 2.6, 3.4)


@pytest.fixture
def site(tmp_path: Path, programs: Path, info: mirror.MirrorInfo) -> Site:
    return new_site(tmp_path, programs, info)


def good_tree(site: Site) -> None:
    """Assert that exactly one tree stands, complete by its own census, and the link leads to it."""
    found = site.status()
    assert found == {
        "path": str(site.link.readlink()), "installed": True, "proved": True, "link_ok": True,
        "changed_reason": None,
    }  # fmt: skip
    assert sorted(path.name for path in site.root.iterdir()) == [
        ".lock", Path(found["path"]).name,
    ]  # fmt: skip
    tree = Path(found["path"])
    census = json.loads((tree / "census.json").read_text())
    sums = "".join(f"{entry['sha256']}  {name}\n" for name, entry in census["files"].items())
    subprocess.run(["sha256sum", "--check", "--quiet"], cwd=tree, input=sums, text=True, check=True)
    listed = subprocess.run(
        ["find", ".", "(", "-type", "f", "-o", "-type", "l", ")", "-printf", "%P\n"],
        cwd=tree, capture_output=True, text=True, check=True,
    ).stdout.splitlines()  # fmt: skip
    own = {"census.json", "version.json", ".toolkit.json", ".proof.json"}
    assert set(listed) == {*census["files"], *census["links"]} | own


def test_the_whole_toolkit_over_http(installed: Site) -> None:
    good_tree(installed)
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


def test_a_compiler_of_another_version_than_expected_is_not_installed(site: Site) -> None:
    site.spec["compiler_version"] = "12.8.93"
    done = site.run("install")
    assert done.returncode == 1
    assert "nvcc is 12.4.131, expected 12.8.93" in done.stderr
    assert site.trees() == []
    assert not site.link.exists()


def test_a_changed_expectation_proves_the_standing_tree_anew(site: Site) -> None:
    assert site.run("install").returncode == 0
    site.spec["required_headers"] = ["cuda_fp16.h", "vector_types.h"]
    assert site.status()["proved"] is False
    site.spec["base_url"] = "/nonexistent"
    assert site.run("install").returncode == 0
    good_tree(site)
    kept = (site.link / ".toolkit.json").read_bytes()
    site.spec["required_headers"] = ["cublas_v2.h"]
    done = site.run("install")
    assert done.returncode == 1
    assert "lacks cublas_v2.h" in done.stderr
    assert (site.link / ".toolkit.json").read_bytes() == kept


def test_an_exchanged_tool_is_noticed(site: Site) -> None:
    assert site.run("install").returncode == 0
    shutil.copy("/bin/false", site.link / "bin/ptxas")
    found = site.status()
    assert (found["proved"], found["changed_reason"]) == (
        False, "bin/ptxas was changed since the proof",
    )  # fmt: skip
    done = site.run("install")
    assert done.returncode == 1
    assert f"remove {found['path']} and run again" in done.stderr


@pytest.mark.parametrize("moment_s", KILL_MOMENTS_S)
def test_a_killed_installer_leaves_nothing_half_made(site: Site, moment_s: float) -> None:
    process = subprocess.Popen(
        site.arguments("install"), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(moment_s)
    process.send_signal(signal.SIGKILL)
    process.wait()
    if site.link.is_symlink():
        good_tree(site)
    done = site.run("install")
    assert done.returncode == 0, done.stderr
    good_tree(site)


def test_two_installers_at_once_end_in_one_tree(site: Site) -> None:
    command = site.arguments("install")
    running = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    answers = [process.communicate(timeout=300) for process in running]
    assert [process.returncode for process in running] == [0, 0], answers
    assert sum("waiting up to" in errors for _, errors in answers) == 1
    good_tree(site)
