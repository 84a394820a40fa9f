"""The checkpoint on the lab's v100: assembled there, healed, collected, and fetched by real ssh."""

from __future__ import annotations

from collections.abc import Callable
from subprocess import CompletedProcess

from lab.places import LOGIN_USER, SERVICE_USER
from tests.lab.lab_support import DeployedLab

Deploy = Callable[[dict[str, object]], CompletedProcess[str]]
ROOT = "/mnt/data/nvfp4"
LINK = f"{ROOT}/qwen38-uncensored-nvfp4-vl"
CKPT = f"sudo -u {SERVICE_USER} {ROOT}/tools/bin/ckpt"
# Every digest of the manifest, by coreutils.
CHECK = f"""cd {LINK} && python3 -c "
import json
for name, entry in json.load(open('manifest.json'))['files'].items():
    print(entry['sha256'], '', name)
" | sha256sum --check --strict --quiet && echo whole"""


def folders(lab: DeployedLab) -> set[str]:
    return set(lab.on("v100", f"ls {ROOT}/checkpoints").split())


def test_assembled_on_the_host_it_is_the_same_checkpoint(
    lab: DeployedLab, deploy_with: Deploy
) -> None:
    committed = lab.status()["committed"]
    (whole,) = folders(lab)
    lab.on("v100", f"sudo rm -r {ROOT}/checkpoints/{whole}")
    done = deploy_with({"checkpoint.source": "assemble"})
    assert done.returncode == 0, done.stdout
    assert lab.on("v100", f"readlink {LINK}") == f"{ROOT}/checkpoints/{whole}"
    assert lab.on("v100", CHECK) == "whole"
    assert len(folders(lab)) == 3
    assert lab.status()["committed"] == committed

    lab.on("v100", f"{CKPT} collect --root {ROOT}/checkpoints --link {LINK} "
                   "--releases /var/lib/fable-engine/releases")  # fmt: skip
    assert folders(lab) == {whole}
    again = deploy_with({"checkpoint.source": "assemble"})
    assert again.returncode == 0, again.stdout
    assert folders(lab) == {whole}  # what stands needs no parents


def test_a_deploy_heals_what_a_deep_verify_found(lab: DeployedLab) -> None:
    shard = lab.on("v100", f"ls {LINK}/*.safetensors | head -n1")
    lab.on("v100", f"printf X | sudo dd of={shard} bs=1 seek=5000 conv=notrunc status=none")
    found = lab.on("v100", f"{CKPT} verify --deep {LINK} 2>&1 || echo refused")
    assert "sha256 differs" in found and "refused" in found
    lab.run("script/deploy")
    assert lab.on("v100", CHECK) == "whole"
    assert lab.on("v100", f"{CKPT} verify {LINK} && echo good").endswith("good")


def test_over_real_ssh_an_unknown_host_is_refused_and_a_known_one_is_read(
    lab: DeployedLab,
) -> None:
    digest = lab.on("v100", f"sha256sum {LINK}/manifest.json").split()[0]
    fetch = (f"{CKPT} fetch ssh://{LOGIN_USER}@127.0.0.1{LINK} --manifest-sha256 {digest} "
             "--root /tmp/by-ssh 2>&1 || echo refused")  # fmt: skip
    said = lab.on("v100", fetch)
    assert "Host key verification failed" in said and said.endswith("refused")
    home = lab.on("v100", f"getent passwd {SERVICE_USER} | cut -d: -f6")
    as_user = f"sudo -u {SERVICE_USER} "
    lab.on("v100", f"{as_user} mkdir -pm 700 {home}/.ssh && "
                   f"{as_user} ssh-keygen -q -t ed25519 -N '' -f {home}/.ssh/id_ed25519 && "
                   f"ssh-keyscan -t ed25519 127.0.0.1 2>/dev/null | "
                   f"{as_user} tee {home}/.ssh/known_hosts")  # fmt: skip
    try:
        said = lab.on("v100", fetch)
        assert "Permission denied" in said and said.endswith("refused")
        lab.on("v100", f"sudo cat {home}/.ssh/id_ed25519.pub >>~/.ssh/authorized_keys")
        assert "installed" in lab.on("v100", fetch)
        lab.on("v100", f"cmp /tmp/by-ssh/{digest[:16]}/manifest.json {LINK}/manifest.json")
        lab.on("v100", f"{CKPT} verify --deep /tmp/by-ssh/{digest[:16]}")
    finally:
        lab.on("v100", f"sudo rm -rf {home}/.ssh /tmp/by-ssh && "
                       f"sed -i '/{SERVICE_USER}@/d' ~/.ssh/authorized_keys")  # fmt: skip
