"""Releases with faults, laid down on v100 as a deploy would, and what became of them."""

from __future__ import annotations

import json
import shlex
import subprocess
import time
from dataclasses import dataclass
from typing import Any

from tests.lab.lab_support import DeployedLab

SETTLED_S = 90.0
# Runs on the host: the committed release with changes, under the name of its content.
LAY_DOWN = """
import json, pathlib, sys
sys.path.insert(0, "/usr/local/lib/fable")
from enginectl.release import release_name
changes = json.loads(sys.argv[1])
root = pathlib.Path("/var/lib/fable-engine")
base = json.loads((root / "releases" / changes.pop("base") / "release.json").read_text())
base["env"].update(changes.pop("env", {}))
base.update(changes)
base["name"] = release_name(base["engine"], base)
folder = root / "releases" / base["name"]
folder.mkdir(exist_ok=True)
(folder / "release.json").write_text(json.dumps(base))
print(base["name"])
"""
# Runs a switch and kills its unit as soon as it says that a step begins.
KILL_AT = """
import subprocess, sys
process = subprocess.Popen(sys.argv[2:], stderr=subprocess.PIPE, text=True)
for line in process.stderr:
    if line.startswith(sys.argv[1]):
        subprocess.run(["systemctl", "kill", "-s", "KILL", "fable-switch.service"], check=True)
print(process.wait())
"""


@dataclass
class EngineHost:
    """v100 with two good releases that boot fast."""

    lab: DeployedLab
    deployed: str
    one: str
    two: str

    def ssh(self, command: str) -> tuple[int, str]:
        """Exit code and all output of a shell command on the host, by ssh's open connection."""
        done = subprocess.run(
            ["ssh", "-F", str(self.lab.folder / "ssh_config"), "v100", command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=300,
            check=False,
        )
        return done.returncode, done.stdout

    def on(self, command: str) -> str:
        """Output of a shell command on the host that must succeed."""
        code, said = self.ssh(command)
        assert code == 0, f"{command}: {code}\n{said}"
        return said.strip()

    def status(self) -> dict[str, Any]:
        """What enginectl says."""
        found: dict[str, Any] = json.loads(self.ctl("status", "--json")[1].splitlines()[-1])
        return found

    def python(self, program: str, *arguments: str) -> str:
        """Output of a Python program run by root on the host."""
        return self.on(shlex.join(["sudo", "python3", "-I", "-c", program, *arguments]))

    def release(self, **changes: Any) -> str:
        """The name of a release like `one` with `changes`."""
        return self.python(LAY_DOWN, json.dumps({"base": self.one, **changes}))

    def faulty(self, fault: str, **changes: Any) -> str:
        """A release whose engine has this fault."""
        return self.release(env={"LAB_ENGINE_FAULTS": fault}, **changes)

    def ctl(self, *arguments: str) -> tuple[int, str]:
        """Exit code and all output of enginectl as root."""
        code, said = self.ssh(shlex.join(["sudo", "enginectl", *arguments]))
        assert "Traceback" not in said, said
        return code, said

    def switch(self, name: str, *options: str) -> tuple[int, str]:
        """Exit code and output of a switch."""
        return self.ctl("switch", name, "--reason=test", *options)

    def history(self) -> list[dict[str, Any]]:
        """The latest events."""
        shown = self.on("sudo enginectl history --json --number 30")
        events: list[dict[str, Any]] = json.loads(shown)["events"]
        return events

    def served(self) -> dict[str, Any]:
        """The status, once it serves and no switch and no start is under way.

        Raises:
            AssertionError: it does not within SETTLED_S.
        """
        deadline = time.monotonic() + SETTLED_S
        while True:
            status = self.status()
            if (
                status["serving"]
                and status["unit"]["active_state"] == "active"
                and not status["trial"]
            ):
                return status
            assert time.monotonic() < deadline, status
            time.sleep(0.3)

    def check(self, *committed: str) -> str:
        """See that exactly one engine answers and is the committed one; which it is.

        Judged by the listening sockets, the processes and the state file, not by enginectl.
        """
        self.served()
        state = json.loads(self.on("cat /var/lib/fable-engine/state.json"))
        assert state["committed"] in committed
        mark = json.loads(
            self.on(f"cat /var/lib/fable-engine/releases/{state['committed']}/release.json")
        )["env"]["MARK"]
        listening = self.on("sudo ss -Hltnp 'sport = :8601'").splitlines()
        assert len(listening) == 1, listening
        pid = listening[0].split("pid=")[1].split(",")[0]
        environment = self.on(f"sudo cat /proc/{pid}/environ | tr '\\0' '\\n'")
        assert f"MARK={mark}" in environment.splitlines()
        assert not self.on("ls /run/fable-engine/trial 2>/dev/null || true")
        name: str = state["committed"]
        return name


def engine_host(lab: DeployedLab) -> EngineHost:
    """Lay down two releases like the deployed one and switch to the first."""
    deployed = str(lab.status()["committed"])
    host = EngineHost(lab, deployed, deployed, "")
    fast = {"LAB_ENGINE_TIME_SCALE": "0.05"}
    host.two = host.release(env={**fast, "MARK": "two"}, boot_deadline_seconds=20)
    host.one = host.release(env={**fast, "MARK": "one"}, boot_deadline_seconds=20)
    code, said = host.switch(host.one)
    assert code == 0, said
    return host
