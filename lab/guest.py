"""What makes a fresh root folder into `v100` or `dgx`: names, addresses, keys, lab-only units."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from lab.places import (
    BRIDGE_ADDRESS,
    HOSTS,
    LOGIN_USER,
    PREFIX_LENGTH,
    SERVICE_USER,
    SLIRP_NAMESERVER,
    HostPlan,
)

LATE_SECONDS = 2
NVIDIA_SMI = Path(__file__).parent / "nvidia_smi" / "nvidia_smi.py"

# The data disk and the tailnet address of the real host come up late; so do these.
LATE_DISK = f"""[Unit]
Description=Stand-in for a slow data disk
DefaultDependencies=no
[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart=/bin/sleep {LATE_SECONDS}
"""
LATE_ADDRESS = f"""[Unit]
Description=Stand-in for a tailnet whose address comes up late
After=systemd-networkd.service
[Service]
Type=oneshot
RemainAfterExit=yes
ExecStartPre=/bin/sleep {LATE_SECONDS}
ExecStart=/usr/sbin/ip link add tailnet0 type bridge
ExecStart=/usr/sbin/ip addr add ADDRESS/32 dev tailnet0
ExecStart=/usr/sbin/ip link set tailnet0 up
[Install]
WantedBy=multi-user.target
"""
DATA_DISK = (
    "/srv/data-disk /mnt/data none bind,nofail,x-systemd.requires=lab-slow-disk.service,"
    "x-systemd.after=lab-slow-disk.service 0 0\n"
)
GPU_STATE = "d /run/lab-gpu 1777 root root -\n"


def seed(root: Path, plan: HostPlan, lab_folder: Path) -> None:
    """Turn the fresh overlay at `root` into host `plan`, reachable with the lab's key."""
    etc = root / "etc"
    (etc / "hostname").write_text(f"{plan.name}\n")
    names = "".join(f"{other.address} {other.name}\n" for other in HOSTS.values())
    (etc / "hosts").write_text(f"127.0.0.1 localhost\n{names}")
    (etc / "resolv.conf").write_text(f"nameserver {SLIRP_NAMESERVER}\n")
    addresses = [a for a in (plan.address, plan.stranger_address) if a]
    address_lines = "".join(f"Address={address}/{PREFIX_LENGTH}\n" for address in addresses)
    (etc / "systemd/network/10-host0.network").write_text(
        f"[Match]\nName=host0\n[Network]\n{address_lines}"
        f"Gateway={BRIDGE_ADDRESS}\nLinkLocalAddressing=no\nIPv6AcceptRA=no\n"
    )
    host_key = _host_key(plan, lab_folder)
    for suffix, mode in (("", 0o600), (".pub", 0o644)):
        target = etc / "ssh" / f"ssh_host_ed25519_key{suffix}"
        shutil.copy(f"{host_key}{suffix}", target)
        target.chmod(mode)
    for user in (LOGIN_USER, SERVICE_USER):
        keys = root / "home" / user / ".ssh/authorized_keys"
        shutil.copy(lab_folder / "id.pub", keys)
        owner = keys.parent.stat()
        os.chown(keys, owner.st_uid, owner.st_gid)
        keys.chmod(0o600)
    if plan.late_address:
        _seed_engine_host(root, plan.late_address)


def _seed_engine_host(root: Path, late_address: str) -> None:
    units = root / "etc/systemd/system"
    (root / "srv/data-disk").mkdir()
    (root / "mnt/data").mkdir()
    with (root / "etc/fstab").open("a") as fstab:
        fstab.write(DATA_DISK)
    (units / "lab-slow-disk.service").write_text(LATE_DISK)
    (units / "lab-tailnet.service").write_text(LATE_ADDRESS.replace("ADDRESS", late_address))
    wants = units / "multi-user.target.wants"
    wants.mkdir(exist_ok=True)
    (wants / "lab-tailnet.service").symlink_to("/etc/systemd/system/lab-tailnet.service")
    (root / "etc/tmpfiles.d/lab-gpu.conf").write_text(GPU_STATE)
    tool = root / "usr/bin/nvidia-smi"
    shutil.copy(NVIDIA_SMI, tool)
    tool.chmod(0o755)


def _host_key(plan: HostPlan, lab_folder: Path) -> Path:
    """The host's ssh key: kept over a reset, so that known_hosts stays true."""
    key = lab_folder / f"{plan.name}.hostkey"
    if not key.exists():
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", plan.name, "-f", key], check=True
        )
    return key
