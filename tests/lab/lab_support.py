"""The tests' own lab, and how they speak with it."""

from __future__ import annotations

import json
import os
import subprocess
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent.parent
LAB_NAME = f"test-{os.getpid()}"  # two runs at once do not meet
COMMAND_DEADLINE_S = 900


@dataclass
class DeployedLab:
    """The lab of the tests, and what its first deploy printed."""

    environment: dict[str, str]
    first_deploy: str

    def run(
        self, *command: str, check: bool = True, deadline_s: int = COMMAND_DEADLINE_S
    ) -> subprocess.CompletedProcess[str]:
        """Run `command` in the repository; standard error goes into standard output."""
        done = subprocess.run(
            command,
            cwd=REPOSITORY,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=deadline_s,
            check=False,
        )
        assert not check or done.returncode == 0, f"{command}: {done.returncode}\n{done.stdout}"
        return done

    def on(self, host: str, command: str) -> str:
        """Output of a shell command on a host."""
        return self.run("script/lab", "ssh", host, command).stdout.strip()

    def deploy_with(
        self, group: str, overrides: dict[str, object], folder: Path
    ) -> subprocess.CompletedProcess[str]:
        """pyinfra's run on `group` with other settings; the inventory for it goes into `folder`."""
        text = (REPOSITORY / "inventory/lab.py").read_text()
        text += f"\n{group}[0][1]['overrides'].update({overrides!r})\n"
        inventory = folder / "lab.py"
        inventory.write_text(text)
        return self.run(
            ".venv/bin/pyinfra", "-y", str(inventory), "deploy.py", "--limit", group, check=False
        )

    def status(self) -> dict[str, object]:
        """What enginectl says on v100."""
        shown = self.on("v100", "sudo enginectl status --json || true")
        found: dict[str, object] = json.loads(shown.splitlines()[-1])
        return found

    @property
    def folder(self) -> Path:
        return Path("/run/fable-lab") / LAB_NAME

    def port(self, name: str) -> int:
        """Loopback port of a forward."""
        ports: dict[str, int] = json.loads((self.folder / "lab.json").read_text())["ports"]
        return ports[name]

    @property
    def gateway_key(self) -> str:
        return (self.folder / "gateway.key").read_text().strip()

    def wait_for_engine(self, deadline_s: float = 120) -> None:
        """Wait until the engine answers on the machine's own loopback, and its start was judged."""
        url = f"http://127.0.0.1:{self.port('engine')}/health"
        deadline = time.monotonic() + deadline_s
        while True:
            try:
                with urllib.request.urlopen(url, timeout=5) as response:
                    if response.status == 200 and self._start_judged():
                        return
            except OSError:
                pass
            assert time.monotonic() < deadline, f"no engine within {deadline_s} s"
            time.sleep(0.2)

    def _start_judged(self) -> bool:
        command = "systemctl is-active fable-engine"
        asked = self.run("script/lab", "ssh", "v100", command, check=False)
        return asked.stdout.strip() == "active"


def environment(name: str) -> dict[str, str]:
    """The environment that makes every script speak of lab `name`."""
    return {**os.environ, "FABLE_LAB": name, "PYTHONUNBUFFERED": "1"}
