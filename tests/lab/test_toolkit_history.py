"""The failure that this project exists to prevent, reproduced.

The "CUDA 12.8" that came along was nvcc without headers. gcc ignores an include folder that is not
there, so every header came from the distribution's CUDA 12.0 in /usr/include, and tilelang's
run-time compilation died. The proof must fail and say where the headers came from; the switch must
not touch the engine that runs.
"""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from lab import mirror, proof_parts
from tests.lab.lab_support import DeployedLab
from tests.lab.toolkit_lab import (
    TILELANG,
    check_named,
    failed,
    proof,
    tilelang_venv,
)
from tests.unit.enginectl_support import named
from tests.unit.toolkit_support import Site

LAY_HEADERS = 'mount -t overlay overlay -o "lowerdir=$0:/usr/include" /usr/include && exec "$@"'


@pytest.fixture(scope="module")
def distribution() -> tuple[str, ...]:
    """Words before a command that runs it where /usr/include holds the headers of CUDA 12.0."""
    headers = ":".join(map(str, proof_parts.history_headers()))
    return ("unshare", "--mount", "bash", "-c", LAY_HEADERS, headers)


@pytest.fixture(scope="module")
def venv(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tilelang_venv(tmp_path_factory.mktemp("venv"), proof_parts.part("tilelang-0.1.10"))


def nvcc_shell(installed: Site, info: mirror.MirrorInfo, tree: Path, only_nvcc: bool) -> Path:
    """A toolkit of one component, the compiler's; or of nvcc and its profile alone."""
    (component,) = (item for item in info.components if item.name == "cuda_nvcc")
    tree.mkdir()
    subprocess.run(
        ["tar", "-xJf", info.folder / component.relative_path, "-C", tree, "--strip-components=1"],
        check=True,
    )
    (tree / "lib64").symlink_to("lib")
    if only_nvcc:
        for path in tree.iterdir():
            if path.is_dir() and not path.is_symlink() and path.name != "bin":
                shutil.rmtree(path)
        for path in (tree / "bin").iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name not in ("nvcc", "nvcc.profile"):
                path.unlink()
    shutil.copy(installed.link / ".toolkit.json", tree)
    return tree


def test_a_whole_toolkit_is_proved_beside_the_distributions_headers(
    installed: Site, distribution: tuple[str, ...], venv: Path
) -> None:
    code, report = proof(installed, installed.link, f"--venv={venv}", "--deep", before=distribution)
    assert (code, failed(report)) == (0, []), report


def test_nvcc_without_headers_is_caught(
    installed: Site,
    info: mirror.MirrorInfo,
    distribution: tuple[str, ...],
    venv: Path,
    tmp_path: Path,
) -> None:
    shell = nvcc_shell(installed, info, tmp_path / "shell", only_nvcc=False)
    code, report = proof(installed, shell, f"--venv={venv}", before=distribution)
    assert code == 1
    assert set(failed(report)) == {
        "header origin", "versions", "probe hmax_nan", "probe tma_enum", "tilelang reduce.h 0.1.10",
    }  # fmt: skip
    origin = check_named(report, "header origin")
    assert "CUDA headers come from /usr/include, " in origin["text"]
    assert all(line.startswith("/usr/include/") for line in origin["details"])
    assert "CUDA_VERSION is 12000, expected 12080" in check_named(report, "versions")["text"]
    reduced = check_named(report, TILELANG)
    assert "its CUDA headers come from /usr/include" in reduced["text"]
    assert "errors detected" in reduced["details"][-1]
    assert not (shell / ".proof.json").exists()


def test_nvcc_alone_is_caught(
    installed: Site, info: mirror.MirrorInfo, distribution: tuple[str, ...], tmp_path: Path
) -> None:
    shell = nvcc_shell(installed, info, tmp_path / "shell", only_nvcc=True)
    code, report = proof(installed, shell, before=distribution)
    assert code == 1
    assert f"{shell}: lacks bin/cudafe++" in check_named(report, "compiler")["text"]
    assert "header origin" in failed(report)


@pytest.fixture
def spoiled(lab: DeployedLab) -> Iterator[str]:
    """On v100: CUDA 12.0 in /usr/include, and a release whose toolkit lacks its headers."""
    committed = lab.on("v100", f"sudo cat {releases()}/{lab.status()['committed']}/release.json")
    release = json.loads(committed)
    whole = release["paths"]["toolkit"]
    shell = f"{whole}-shell"
    name = str(named(json.loads(committed.replace(whole, shell)))["name"])
    content = json.dumps(named(json.loads(committed.replace(whole, shell))))
    send(lab, "sudo tar -x -C /var/tmp", archive(proof_parts.history_headers()))
    lab.on(
        "v100",
        f"sudo -u {release['user']} cp -a {whole} {shell} && cd {shell}/include && "
        "sudo find . -mindepth 1 -maxdepth 1 ! -name crt ! -name fatbinary_section.h "
        "-exec rm -r {} + && "
        f"sudo mkdir {releases()}/{name} && "
        "sudo mount -t overlay overlay -o lowerdir=/var/tmp/history-0:/var/tmp/history-1:"
        "/usr/include /usr/include",
    )
    try:
        send(lab, f"sudo tee {releases()}/{name}/release.json >/dev/null", content.encode())
        yield name
    finally:
        lab.on(
            "v100",
            "sudo umount /usr/include; "
            f"sudo rm -r {shell} {releases()}/{name} /var/tmp/history-0 /var/tmp/history-1",
        )


def test_the_switch_never_touches_the_running_engine(lab: DeployedLab, spoiled: str) -> None:
    def running() -> str:
        return lab.on(
            "v100",
            "systemctl show fable-engine.service -p MainPID -p InvocationID -p NRestarts; "
            "sudo cat /var/lib/fable-engine/state.json; "
            "sudo ls -I switch.lock /run/fable-engine 2>/dev/null; "
            "sudo wc -l </var/lib/fable-engine/history.jsonl",
        )

    before = running()
    done = lab.run(
        "script/lab",
        "ssh",
        "v100",
        f"sudo enginectl switch {spoiled} --reason history",
        check=False,
    )
    assert done.returncode == 9, done.stdout
    assert f"{spoiled}: its toolkit is not proved, nothing was touched" in done.stdout
    assert "FAIL header origin" in done.stdout
    assert "CUDA headers come from /usr/include" in done.stdout
    assert running() == before
    assert lab.status()["healthy"] is True


def test_the_deploy_showed_what_was_proved(lab: DeployedLab) -> None:
    for line in (
        "ok   environment: nothing in the engine's variables",
        "ok   header origin: ",
        "n/a  tilelang reduce.h: not there: ",
        "n/a  torch extension: not there: ",
    ):
        assert line in lab.first_deploy
    release = json.loads(
        lab.on("v100", f"sudo cat {releases()}/{lab.status()['committed']}/release.json")
    )
    tree = release["paths"]["toolkit"]
    stamp = json.loads(lab.on("v100", f"cat {tree}/.proof.json"))
    assert any(proof["question"]["engines"] for proof in stamp["proofs"])
    assert lab.on("v100", f"stat -c %U {tree}/.proof.json") == release["user"]


def releases() -> str:
    return "/var/lib/fable-engine/releases"


def archive(folders: list[Path]) -> bytes:
    """A tar of `folders` as history-0, history-1, …"""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as tar:
        for number, folder in enumerate(folders):
            tar.add(folder, f"history-{number}")
    return content.getvalue()


def send(lab: DeployedLab, command: str, content: bytes) -> None:
    """Run a shell command on v100 with `content` as its input."""
    subprocess.run(
        ["ssh", "-F", lab.folder / "ssh_config", "v100", command],
        input=content, check=True, timeout=120,
    )  # fmt: skip
