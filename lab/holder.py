"""The process that holds a lab: first process of the lab's own namespaces; its end ends the lab.

Started by `lab.control`, which passes one JSON object as argument. Reports one JSON line on the
descriptor `report`: {"ready": true} or {"error": …, "exit_code": …}.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from lab import cgroups, network, places, site
from lab.errors import LabError
from lab.hosts import Host
from stack.exits import EXIT_FAILED

HOST_VERBS = ("start", "reboot", "poweroff", "cut", "reset")


def main() -> int:
    """Bring the lab up, then obey the control socket until `down` or the watched process's end."""
    plan = json.loads(sys.argv[1])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    report = os.fdopen(plan["report"], "w")
    try:
        hosts = _bring_up(plan)
        listener = socket.socket(socket.AF_UNIX)
        control = places.folder(plan["name"]) / "control"
        listener.bind(str(control))
        control.chmod(0o600)
        listener.listen()
    except (LabError, OSError, subprocess.CalledProcessError) as error:
        code = error.exit_code if isinstance(error, LabError) else EXIT_FAILED
        report.write(json.dumps({"error": str(error), "exit_code": code}) + "\n")
        report.close()
        return 1
    report.write(json.dumps({"ready": True}) + "\n")
    report.close()
    asked = _obey(listener, hosts, plan["watch"])
    for host in hosts.values():
        host.close()
    cgroups.remove(plan["name"])
    if not asked:  # nobody is left to clean up behind us
        lab_folder = places.folder(plan["name"])
        subprocess.run(["umount", lab_folder / "disks"], check=False)
        shutil.rmtree(lab_folder)
    return 0


def _bring_up(plan: dict[str, Any]) -> dict[str, Host]:
    lab_folder = places.folder(plan["name"])
    disks = lab_folder / "disks"
    disks.mkdir()
    # overlay needs its upper folder on tmpfs or ext4, not on another overlay
    subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=755,size=75%", "lab", disks], check=True)
    nspawn = Path("/run/systemd/nspawn")
    nspawn.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=755", "lab", nspawn], check=True)
    cgroups.view()
    cgroups.remove(plan["name"])
    _private_machine_id(disks)
    network.set_up(lab_folder, plan["outer_network"], plan["ports"])
    site.serve(Path(plan["site"]), places.BRIDGE_ADDRESS, places.SITE_PORT)
    hosts = {
        name: Host(host_plan, plan["name"], lab_folder, disks, Path(plan["image"]))
        for name, host_plan in places.HOSTS.items()
    }
    for host in hosts.values():
        host.start()
    return hosts


def _private_machine_id(scratch: Path) -> None:
    """nspawn derives addresses from /etc/machine-id: give it one where the machine has none."""
    machine_id = Path("/etc/machine-id")
    if machine_id.exists() and machine_id.read_text().strip():
        return
    own = scratch / "machine-id"
    own.write_text(Path("/proc/sys/kernel/random/uuid").read_text().replace("-", ""))
    machine_id.touch()
    subprocess.run(["mount", "--bind", own, machine_id], check=True)


def _obey(listener: socket.socket, hosts: dict[str, Host], watch: int | None) -> bool:
    """Serve requests; True after `down`, False when the watched process has ended."""
    while True:
        sources: list[Any] = [listener] if watch is None else [listener, watch]
        ready, _, _ = select.select(sources, [], [])
        if watch in ready:  # a pidfd: readable once the watched process has ended
            return False
        client, _ = listener.accept()
        with client:
            client.settimeout(5)
            try:
                request = json.loads(client.makefile("rb").readline())
                answer = _act(hosts, request)
            except (LabError, OSError, subprocess.SubprocessError, ValueError) as error:
                answer = {"error": str(error)}
            try:
                client.sendall(json.dumps(answer).encode() + b"\n")
            except OSError:
                continue
            if answer.get("down"):
                return True


def _act(hosts: dict[str, Host], request: dict[str, str]) -> dict[str, Any]:
    verb = request["verb"]
    if verb == "down":
        return {"down": True}
    if verb == "status":
        return {"running": {name: host.running for name, host in hosts.items()}}
    if verb in HOST_VERBS and request.get("host") in hosts:
        getattr(hosts[request["host"]], verb)()
        return {"done": verb}
    raise LabError(f"{request}: the lab knows no such request")


if __name__ == "__main__":
    sys.exit(main())
