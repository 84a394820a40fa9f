"""The proof for real: CUDA 12.8 parts compile its probes for sm_70; what spoils them is named."""

from __future__ import annotations

import json
import os
import pwd
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from lab import proof_parts
from tests.lab.toolkit_lab import (
    EXTENSION,
    TILELANG,
    check_named,
    engine_environment,
    failed,
    proof,
    tilelang_venv,
)
from tests.unit.toolkit_support import Site, is_one_line


@pytest.fixture(scope="module")
def venv(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the engine's venv holds of the tilelang that it needs."""
    return tilelang_venv(tmp_path_factory.mktemp("venv"), proof_parts.part("tilelang-0.1.10"))


def written(path: Path, value: object) -> Path:
    path.write_text(json.dumps(value))
    return path


def test_deep_ignores_the_stamp(installed: Site) -> None:
    code, report = proof(installed, installed.link, "--deep")
    assert (code, report["ok"], report["from_stamp"]) == (0, True, False)


def test_tilelangs_own_header_compiles_for_volta(installed: Site, venv: Path) -> None:
    code, report = proof(installed, installed.link, f"--venv={venv}", "--deep")
    assert code == 0, report
    found = check_named(report, TILELANG)
    assert (found["name"], found["applies"]) == ("tilelang reduce.h 0.1.10", True)
    assert found["text"] == "compiles for sm_70, assembled by CUDA 12.8"
    code, report = proof(installed, installed.link, f"--venv={venv}")
    assert (code, report["from_stamp"]) == (0, True)


def test_a_tilelang_that_does_not_build_on_volta_is_named(installed: Site, tmp_path: Path) -> None:
    older = tilelang_venv(tmp_path / "venv", proof_parts.part("tilelang-0.1.9"))
    code, report = proof(installed, installed.link, f"--venv={older}")
    assert (code, failed(report)) == (1, ["tilelang reduce.h 0.1.9"])
    details = check_named(report, TILELANG)["details"]
    assert any("error" in line and "common.h" in line for line in details)
    assert "not built" in check_named(report, EXTENSION)["text"]


def test_what_is_not_there_is_neither_passed_over_nor_failed(
    installed: Site, tmp_path: Path
) -> None:
    code, report = proof(installed, installed.link)
    assert code == 0
    for name in (TILELANG, EXTENSION):
        found = check_named(report, name)
        assert (found["ok"], found["applies"]) == (True, False)
        assert found["text"] == "not there: no venv was named (--venv)"
    empty = tmp_path / "venv"
    empty.mkdir()
    code, report = proof(installed, installed.link, f"--venv={empty}")
    assert code == 0
    assert check_named(report, TILELANG)["text"] == f"not there: {empty} has no tilelang"
    assert check_named(report, EXTENSION)["text"] == f"not there: {empty} has no torch"
    # What comes into the venv later is not covered by that stamp.
    tilelang = empty / "lib/python3.12/site-packages/tilelang"
    tilelang.mkdir(parents=True)
    code, report = proof(installed, installed.link, f"--venv={empty}")
    assert (code, report["from_stamp"], failed(report)) == (1, False, [TILELANG])


def test_a_release_is_proved_in_its_own_environment(
    installed: Site, tmp_path: Path, venv: Path
) -> None:
    tree = installed.link.resolve()
    variables = engine_environment(tree)
    release = {
        "engine": "skinny",
        "env": variables,
        "paths": {"toolkit": str(tree), "venv": str(venv), "checkpoint": "/nonexistent"},
    }
    file = written(tmp_path / "release.json", release)

    def prove(*arguments: str, text: str = "") -> tuple[int, dict[str, Any]]:
        done = subprocess.run(
            [installed.programs / "cuda-proof", "--json", *arguments],
            env={"CPATH": "/elsewhere", "CUDA_HOME": "/elsewhere"},  # the caller's do not count
            input=text, check=False, capture_output=True, text=True, timeout=300,
        )  # fmt: skip
        assert "Traceback" not in done.stderr
        return done.returncode, json.loads(done.stdout)

    code, report = prove("--release", str(file))
    assert (code, report["from_stamp"]) == (0, False), report
    arguments = (f"--venv={venv}", "--engine=skinny", "--environment=-", str(tree))
    code, report = prove(*arguments, text=json.dumps(variables))
    assert (code, report["from_stamp"]) == (0, True)
    release["env"] = {
        **variables,
        "CUDA_HOME": "/usr/local/cuda",
        "PATH": "/usr/bin:/bin",
        "CPLUS_INCLUDE_PATH": str(tmp_path),
    }
    code, report = prove("--release", str(written(file, release)))
    assert (code, failed(report)) == (1, ["environment"])
    assert f"CPLUS_INCLUDE_PATH={tmp_path}" in report["failures"][0]
    assert f"CUDA_HOME=/usr/local/cuda is not {tree}" in report["failures"][0]
    assert f"put {tree}/bin first" in report["failures"][0]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "is not valid JSON"),
        ("[]", "holds no JSON object"),
        ('{"env": {}, "env": {}}', "stands twice"),
        ('{"env": {"A": 1}}', "env: must be an object of texts"),
        ('{"env": {}, "paths": {"venv": "/v"}}', "paths: 'toolkit' is missing"),
    ],
)
def test_a_wrong_release_cannot_run(
    installed: Site, tmp_path: Path, content: str, words: str
) -> None:
    file = tmp_path / "release.json"
    file.write_text(content)
    for arguments in (["--release", str(file)], [str(installed.link), "--release", str(file)]):
        done = subprocess.run(
            [installed.programs / "cuda-proof", *arguments],
            check=False, capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert done.returncode == 2
        assert is_one_line(done.stderr, "cuda-proof")
        assert (words if len(arguments) == 2 else "leave out PREFIX") in done.stderr


@pytest.mark.parametrize("name", ["NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS"])
def test_a_stray_include_path_is_caught_although_the_stamp_is_good(
    installed: Site, tmp_path: Path, name: str
) -> None:
    shutil.copy(installed.link / "include/cuda_fp16.h", tmp_path)
    if name == "NVCC_APPEND_FLAGS":
        # What comes last only fills gaps: so leave a gap for it to fill.
        tree = tmp_path / "tree"
        subprocess.run(["cp", "-a", installed.link.resolve(), tree], check=True)
        (tree / "include/cuda_fp16.h").unlink()
    else:
        tree = installed.link.resolve()
    stamp = (tree / ".proof.json").read_bytes()
    code, report = proof(installed, tree, variables={name: f"-I{tmp_path}"})
    assert code == 1
    assert failed(report) == ["environment", "header origin", "probe hmax_nan"]
    details = check_named(report, "header origin")["details"]
    assert details == [str(tmp_path / "cuda_fp16.h"), f"{name}=-I{tmp_path}"]
    assert f"come from {tmp_path}" in check_named(report, "probe hmax_nan")["text"]
    assert (tree / ".proof.json").read_bytes() == stamp


@pytest.mark.parametrize("variable", ["PTXAS_FLAGS=--nothing", "LIBRARIES=-L/elsewhere"])
def test_what_nvcc_adds_to_its_profile_is_caught_although_the_stamp_is_good(
    installed: Site, tmp_path: Path, variable: str
) -> None:
    name, _, value = variable.partition("=")
    source = tmp_path / "x.cu"
    source.touch()
    done = subprocess.run(
        [installed.link / "bin/nvcc", "--dryrun", "-arch=sm_70", "-o", "x", source],
        cwd=tmp_path, env={**os.environ, name: value}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert value in done.stderr, "nvcc itself heeds it"
    code, report = proof(installed, installed.link, variables={name: value})
    assert code == 1
    assert f"{variable} changes what is compiled with" in report["failures"][0]


def test_a_header_that_a_link_borrows_from_elsewhere_is_named(
    installed: Site, copied: Path, tmp_path: Path
) -> None:
    """Nothing in the name of what is borrowed tells that it is CUDA's."""
    header, elsewhere = copied / "include/crt/math_functions.hpp", tmp_path / "notes.txt"
    header.rename(elsewhere)
    header.symlink_to(elsewhere)
    code, report = proof(installed, copied)
    assert code == 1
    assert f"1 CUDA headers come from {tmp_path}, not from" in report["failures"][0]
    assert check_named(report, "header origin")["details"] == [str(elsewhere)]


def test_a_removed_header_is_named(installed: Site, copied: Path) -> None:
    (copied / "include/cuda_fp8.h").unlink()
    code, report = proof(installed, copied)
    assert (code, report["from_stamp"]) == (1, False)
    assert report["failures"] == [f"header origin: {copied}: lacks cuda_fp8.h"]


def test_headers_of_another_release_are_refused(installed: Site, copied: Path) -> None:
    header = copied / "include/cuda.h"
    header.write_text(header.read_text().replace("CUDA_VERSION 12080", "CUDA_VERSION 12000"))
    code, report = proof(installed, copied)
    assert code == 1
    assert report["failures"] == ["versions: CUDA_VERSION is 12000, expected 12080"]


def test_headers_that_lack_what_came_with_12_8_fail_a_probe(installed: Site, copied: Path) -> None:
    header = copied / "include/cuda.h"
    lines = header.read_text().splitlines()
    kept = [line for line in lines if "SWIZZLE_128B_ATOM_32B" not in line]
    assert len(kept) < len(lines)
    header.write_text("\n".join(kept))
    code, report = proof(installed, copied)
    assert (code, failed(report)) == (1, ["probe tma_enum"])


def test_a_symlink_to_the_compiler_is_named(installed: Site, copied: Path) -> None:
    nvcc = copied / "bin/nvcc"
    nvcc.rename(copied / "bin/nvcc.real")
    nvcc.symlink_to("nvcc.real")
    code, report = proof(installed, copied)
    assert (code, failed(report)) == (1, ["compiler"])
    assert f"compiler: {nvcc}: is a symlink to a file" in report["failures"][0]


def test_a_symlink_to_the_compiler_on_path_is_named(installed: Site, tmp_path: Path) -> None:
    tree = installed.link.resolve()
    (tmp_path / "nvcc").symlink_to(tree / "bin/nvcc")
    variables = engine_environment(tree)
    variables["PATH"] = f"{tmp_path}:{variables['PATH']}"
    file = written(tmp_path / "environment.json", variables)
    code, report = proof(installed, tree, f"--environment={file}")
    assert (code, failed(report)) == (1, ["environment"])
    assert f"PATH leads to {tmp_path}/nvcc, a symlink to the file" in report["failures"][0]


def test_a_host_compiler_too_new_for_nvcc_is_refused_in_one_line(
    installed: Site, copied: Path, tmp_path: Path
) -> None:
    """A gcc that says it is version 99: the refusal is that of nvcc's own header."""
    newer = tmp_path / "newer/gcc"
    newer.parent.mkdir()
    newer.write_text(
        '#!/bin/sh\ncase "$1" in -dumpfullversion) echo 99.1.0; exit;; esac\n'
        f'exec {shutil.which("gcc")} -U__GNUC__ -D__GNUC__=99 "$@"\n'
    )
    newer.chmod(0o755)
    path = f"{newer.parent}:{os.environ['PATH']}"
    code, report = proof(installed, copied, variables={"PATH": path})
    assert (code, failed(report)) == (1, ["host compiler"])
    (line,) = report["failures"]
    assert line.startswith(f"host compiler: {newer} is GCC 99.1.0, and {copied}/bin/nvcc takes")
    assert line.endswith("and make it the first gcc on the engine's PATH")  # this nvcc is 12.4's
    newest = line.partition("none newer than ")[2].partition(";")[0]
    limits = (copied / "include/crt/host_config.h").read_text()
    assert f"gcc versions later than {newest} are not supported" in limits


def test_without_a_host_compiler_the_proof_cannot_run(installed: Site, copied: Path) -> None:
    (copied / ".proof.json").unlink()
    code, answer = proof(installed, copied, variables={"PATH": "/nonexistent"})
    assert code == 2
    assert is_one_line(answer["line"], "cuda-proof")
    assert "gcc: is not on PATH" in answer["line"]


def test_no_folder_and_no_toolkit_cannot_run(installed: Site, tmp_path: Path) -> None:
    for prefix in (tmp_path / "absent", tmp_path):
        code, answer = proof(installed, prefix)
        assert code == 2
        assert is_one_line(answer["line"], "cuda-proof")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root is to be kept from it")
def test_root_does_not_run_what_another_user_can_write(installed: Site, copied: Path) -> None:
    nobody = pwd.getpwnam("nobody").pw_uid
    os.chown(copied, nobody, -1)
    code, answer = proof(installed, copied)
    assert code == 2
    assert f"{copied}: belongs to nobody" in answer["line"]
    os.chown(copied, 0, -1)
    copied.parent.joinpath("venv").mkdir()
    os.chown(copied.parent / "venv", nobody, -1)
    code, answer = proof(installed, copied, f"--venv={copied.parent / 'venv'}")
    assert (code, "belongs to nobody" in answer["line"]) == (2, True)


def test_a_proof_that_is_ended_leaves_neither_compilers_nor_files(
    installed: Site, tmp_path: Path
) -> None:
    process = subprocess.Popen(
        [installed.programs / "cuda-proof", installed.link, "--deep"],
        env={**os.environ, "TMPDIR": str(tmp_path)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    deadline = time.monotonic() + 30
    compilers: set[str] = set()
    while not compilers:
        assert time.monotonic() < deadline
        for children in Path(f"/proc/{process.pid}/task").glob("*/children"):
            compilers.update(children.read_text().split())
    process.terminate()
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert errors.decode().splitlines()[-1] == "cuda-proof: interrupted; run it again to go on"
    assert not [pid for pid in compilers if Path(f"/proc/{pid}").exists()]
    assert list(tmp_path.iterdir()) == []
