"""Start, stop and reset one host: systemd-nspawn over an overlay of the base image."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from lab import cgroups, guest
from lab.errors import LabError
from lab.places import BRIDGE, HostPlan

REBOOT_CODE = 133  # nspawn's exit code when the guest calls reboot under --keep-unit
STOP_DEADLINE_S = 60.0


class Host:
    """One host, run by a thread that starts it again whenever it reboots itself."""

    def __init__(self, plan: HostPlan, lab: str, lab_folder: Path, disks: Path, image: Path):
        self.plan = plan
        self.lab = lab
        self.lab_folder = lab_folder
        self.image = image
        self.disk = disks / plan.name
        self.root = self.disk / "root"
        self.console = lab_folder / f"{plan.name}.console"
        self._nspawn: subprocess.Popen[bytes] | None = None
        self._runner: threading.Thread | None = None
        self._boots = 0

    @property
    def running(self) -> bool:
        return self._runner is not None and self._runner.is_alive()

    def start(self) -> None:
        """Boot it; a disk is made when it has none."""
        if self.running:
            return
        if not self.root.exists():
            for part in ("upper", "work", "root"):
                (self.disk / part).mkdir(parents=True)
            options = f"lowerdir={self.image},upperdir={self.disk}/upper,workdir={self.disk}/work"
            subprocess.run(
                ["mount", "-t", "overlay", "overlay", "-o", options, self.root], check=True
            )
            guest.seed(self.root, self.plan, self.lab_folder)
        self._runner = threading.Thread(target=self._run, name=self.plan.name, daemon=True)
        self._runner.start()

    def reboot(self) -> None:
        """Ask the guest to reboot, as an operator would."""
        before = self._boots
        self._inside("systemctl", "reboot")
        self._until(lambda: self._boots > before, "did not reboot")

    def poweroff(self) -> None:
        """Ask the guest to shut down in order, and wait for it."""
        if self.running:
            self._inside("systemctl", "poweroff")
            self._until(lambda: not self.running, "did not power off")

    def cut(self) -> None:
        """Cut the power: every process of the guest is gone at once."""
        leader = self._leader()
        if leader is not None:
            os.kill(leader, signal.SIGKILL)
        self._until(lambda: not self.running, "did not die")

    def close(self) -> None:
        """Cut its power and let go of its disk."""
        self.cut()
        subprocess.run(["umount", self.root], check=True)

    def reset(self) -> None:
        """Back to the pristine disk, booted."""
        self.close()
        shutil.rmtree(self.disk)
        self.start()

    def _run(self) -> None:
        code = REBOOT_CODE
        while code == REBOOT_CODE:
            cgroup = cgroups.host_cgroup(self.lab, self.plan.name)
            cgroup.mkdir(exist_ok=True)
            command = [
                sys.executable, "-m", "lab.fresh_clock",
                "systemd-nspawn", "--quiet", "--boot", f"--directory={self.root}",
                f"--machine={self.plan.name}", "--keep-unit", "--register=no",
                f"--network-bridge={BRIDGE}", "--resolv-conf=off", "--timezone=off",
                "--link-journal=no", "--kill-signal=SIGRTMIN+4", "--capability=CAP_BPF",
                "--system-call-filter=bpf",
            ]  # fmt: skip
            with self.console.open("ab") as console:
                self._nspawn = subprocess.Popen(
                    ["bash", "-c", 'echo $$ >"$0/cgroup.procs"; exec "$@"', cgroup, *command],
                    stdin=subprocess.DEVNULL,
                    stdout=console,
                    stderr=console,
                    env={**os.environ, "SYSTEMD_NSPAWN_UNIFIED_HIERARCHY": "1"},
                )
            self._boots += 1
            code = self._nspawn.wait()

    def _leader(self) -> int | None:
        """The guest's first process: nspawn's only child."""
        if self._nspawn is None or self._nspawn.poll() is not None:
            return None
        pid = self._nspawn.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return int(children[0]) if children else None

    def _inside(self, *command: str) -> None:
        leader = self._leader()
        if leader is None:
            raise LabError(f"{self.plan.name}: is not running; start it with `script/lab start`")
        # --root: in a chroot the namespace's own root is the machine's, and with it its systemd
        subprocess.run(
            ["nsenter", "--target", str(leader), "--all", "--root", "--wd", "--", *command],
            capture_output=True,
            check=False,
            timeout=STOP_DEADLINE_S,
        )

    def _until(self, condition: Callable[[], bool], failure: str) -> None:
        deadline = time.monotonic() + STOP_DEADLINE_S
        while not condition():
            if time.monotonic() > deadline:
                raise LabError(
                    f"{self.plan.name}: {failure} within {STOP_DEADLINE_S:.0f} s; see "
                    f"{self.console}, or cut its power with `script/lab cut {self.plan.name}`"
                )
            time.sleep(0.02)
