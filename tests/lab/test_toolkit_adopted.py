"""A hand-made toolkit at the fixed path: refused, adopted, run on, and left again."""

from __future__ import annotations

import json
from collections.abc import Callable
from subprocess import CompletedProcess

import pytest

from tests.lab.lab_support import DeployedLab

pytestmark = pytest.mark.timeout(900)
Deploy = Callable[[dict[str, object]], CompletedProcess[str]]
LINK = "/mnt/data/nvfp4/cuda-12.8-full"
ROOT = "/mnt/data/nvfp4/toolkits"
INSTALLER = "sudo -u mavis /mnt/data/nvfp4/tools/bin/cuda-install"
LIBRARY = "lib/libnvToolsExt.so.1"  # read by no proof
BY_HAND = f"""
set -e
sudo -u mavis cp -a "$(readlink {LINK})" {LINK}.hand
cd {LINK}.hand
sudo rm census.json .toolkit.json .proof.json
sudo -u mavis touch notes
sudo rm {LINK}
sudo mv {LINK}.hand {LINK}
"""


def main_process(lab: DeployedLab) -> str:
    return lab.on("v100", "systemctl show fable-engine.service -p MainPID -p InvocationID")


def toolkit_in_use(lab: DeployedLab) -> str:
    """Where the committed release's compilations are led, from the process itself."""
    process = lab.on("v100", "systemctl show fable-engine.service -p MainPID --value")
    variables = lab.on("v100", f"sudo cat /proc/{process}/environ | tr '\\0' '\\n'")
    (home,) = [line for line in variables.splitlines() if line.startswith("CUDA_HOME=")]
    return home.removeprefix("CUDA_HOME=")


def test_a_hand_made_toolkit_is_refused_adopted_and_run_on(
    lab: DeployedLab, deploy_with: Deploy
) -> None:
    assert deploy_with({}).returncode == 0
    installed = lab.on("v100", f"readlink {LINK}")
    lab.on("v100", BY_HAND)
    before = main_process(lab)

    done = deploy_with({})
    assert done.returncode != 0
    assert f"{LINK}: a tree stands there and was not made by this installer" in done.stdout
    assert main_process(lab) == before

    specification = f"/mnt/data/nvfp4/tools/specs/{installed.rpartition('/')[2]}.json"
    lab.on("v100", f"{INSTALLER} adopt --spec {specification} --root {ROOT} --link {LINK}")
    adopted = lab.on("v100", f"readlink {LINK}")
    assert adopted != installed
    assert main_process(lab) == before

    chosen: dict[str, object] = {
        "toolkit.source": "adopted",
        "toolkit.location": None,
        "toolkit.adopted": adopted.rpartition("/")[2],
    }
    done = deploy_with(chosen)
    assert done.returncode == 0, done.stdout
    assert toolkit_in_use(lab) == adopted
    release = json.loads(
        lab.on(
            "v100",
            f"sudo cat /var/lib/fable-engine/releases/{lab.status()['committed']}/release.json",
        )
    )
    assert release["paths"]["toolkit"] == adopted

    before = main_process(lab)
    lab.on("v100", f"sudo rm {adopted}/{LIBRARY} {installed}/{LIBRARY}")
    done = deploy_with(chosen)
    assert done.returncode != 0
    assert f"{adopted}: 1 missing (adopted); cuda-install census names what" in done.stdout
    assert main_process(lab) == before

    done = deploy_with({})  # back to the installed one, which is damaged too
    assert done.returncode == 0, done.stdout
    assert f"{installed}: 1 missing (cuda_nvtx); installing it anew" in done.stdout
    assert (
        lab.on("v100", f"sha256sum <{installed}/{LIBRARY} | cut -d' ' -f1")
        == json.loads(lab.on("v100", f"cat {installed}/census.json"))["files"][LIBRARY]["sha256"]
    )
    assert toolkit_in_use(lab) == installed
    assert lab.on("v100", f"test -e {adopted}/notes && echo kept") == "kept"
    lab.on("v100", f"sudo rm -r {adopted}")
    assert lab.status()["healthy"] is True
