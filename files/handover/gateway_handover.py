"""Which of the gateway's two instances serves: what fable-gateway.service runs.

    start   nothing runs: start an instance. One runs: leave it alone, unless a restart of
            fable-gateway.service is on; then start the other one, wait until it is ready, and let
            the old one drain. If the other one does not get ready, the old one stays.
    stop    in a restart: only note it. Otherwise stop both instances and close the port.

systemd stops a unit before it starts it, so a restart that nobody notices needs two instances and
a note between the two steps. Standard library only; run as root. Exit codes: 0 done, 1 the
instance did not get ready or does not stop, 2 wrong usage.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

UNIT = "fable-gateway.service"
SOCKET = "fable-gateway.socket"
INSTANCES = ("fable-gateway@a.service", "fable-gateway@b.service")
# The unit's RuntimeDirectory, kept over a restart and removed by a stop.
NOTE = Path("/run/fable-gateway/restart")
DEADLINE_S = 85
RUNNING = ("active", "reloading")


def next_instance(states: dict[str, str], restart: bool) -> str | None:
    """The instance to start, or None to leave all as it is.

    Args:
        states: instance → its ActiveState.
        restart: whether what runs is to be replaced.
    """
    running = [name for name, state in states.items() if state in RUNNING]
    if running and not restart:
        return None
    free = [name for name in states if name not in running]
    # One that still drains would have to end first.
    free.sort(key=lambda name: states[name] == "deactivating")
    return free[0] if free else running[-1]


def is_restart(jobs: str) -> bool:
    """Whether `systemctl list-jobs` shows a restart of the gateway: columns ID UNIT TYPE STATE."""
    return any(line.split()[1:3] == [UNIT, "restart"] for line in jobs.splitlines())


def start() -> int:
    """See the module's text."""
    restart = NOTE.exists()
    NOTE.unlink(missing_ok=True)
    states = {name: _systemctl("show", "-P", "ActiveState", name).stdout.strip()
              for name in INSTANCES}  # fmt: skip
    fresh = next_instance(states, restart)
    if fresh is None:
        print("gateway_handover: an instance serves already", flush=True)
        return 0
    old = [name for name in INSTANCES if name != fresh and states[name] in RUNNING]
    done = _systemctl("restart" if states[fresh] in RUNNING else "start", fresh)
    if done.returncode != 0:
        stays = f", {old[0]} goes on" if old else ", it is tried again every second"
        if old:
            _systemctl("stop", fresh)
        print(
            f"gateway_handover: {fresh}: did not get ready{stays}; see journalctl -u {fresh}",
            file=sys.stderr,
        )
        return 1
    print(f"gateway_handover: {fresh} serves", flush=True)
    for name in old:
        _systemctl("stop", "--no-block", name)
        print(f"gateway_handover: {name} drains", flush=True)
    return 0


def stop() -> int:
    """See the module's text."""
    if is_restart(_systemctl("list-jobs", "--full", "--plain", "--no-legend").stdout):
        NOTE.touch()
        return 0
    # systemd orders the port's end after this unit's, so nobody can wait for it here.
    _systemctl("stop", "--no-block", SOCKET)
    return 0 if _systemctl("stop", *INSTANCES).returncode == 0 else 1


def _systemctl(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = ["systemctl", *arguments]
    try:
        return subprocess.run(
            command, stdout=subprocess.PIPE, text=True, timeout=DEADLINE_S, check=False
        )
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 1, "", "")


if __name__ == "__main__":
    actions = {"start": start, "stop": stop}
    if len(sys.argv) != 2 or sys.argv[1] not in actions:
        print("gateway_handover: usage: gateway_handover.py start | stop", file=sys.stderr)
        sys.exit(2)
    sys.exit(actions[sys.argv[1]]())
