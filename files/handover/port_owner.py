"""Who listens on a TCP port of this host; sent to a host as it is (standard library only).

    find PORT                print {} or {"pid", "command", "unit", "user"}: the unit as systemd
                             names it ("" for a process outside any), the user whose own systemd
                             runs it ("" for the system's)
    release PORT UNIT...     stop it, and disable it unless its unit is one of UNIT...; a process
                             outside any unit gets SIGTERM

Run as root. Exit codes: 0 done, 1 the port is still taken, 2 wrong usage.
"""

from __future__ import annotations

import json
import os
import pwd
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

LISTENING = "0A"  # /proc/net/tcp, column st
DEADLINE_S = 100
USER_UNIT = re.compile(r"/user@(\d+)\.service/(?:[^/]+\.slice/)*([^/]+\.(?:service|scope))")
SYSTEM_UNIT = re.compile(r"/([^/]+\.(?:service|scope))(?:/|$)")


def listening_inodes(table: str, port: int) -> set[str]:
    """Inodes of the sockets that listen on `port`, from the text of /proc/net/tcp or tcp6."""
    rows = [line.split() for line in table.splitlines()[1:]]
    return {
        row[9] for row in rows
        if len(row) > 9 and row[3] == LISTENING and int(row[1].rpartition(":")[2], 16) == port
    }  # fmt: skip


def unit_of(cgroup: str) -> tuple[str, str]:
    """Unit and uid of the user whose systemd runs it, from the text of /proc/PID/cgroup."""
    path = next((line[3:] for line in cgroup.splitlines() if line.startswith("0::")), "")
    if found := USER_UNIT.search(path):
        return found[2], found[1]
    found = SYSTEM_UNIT.search(path)
    return (found[1], "") if found else ("", "")


def socket_unit(listing: str, port: int) -> str:
    """The unit of a socket that systemd itself holds, from `systemctl list-sockets`."""
    for line in listing.splitlines():
        words = line.split()
        if len(words) > 1 and words[0].rpartition(":")[2] == str(port):
            return words[1]
    return ""


def find(port: int) -> dict[str, object]:
    """See the module's text."""
    tables = [Path("/proc/net/tcp"), Path("/proc/net/tcp6")]
    inodes = {
        inode for table in tables if table.exists()
        for inode in listening_inodes(table.read_text(), port)
    }  # fmt: skip
    holders = sorted(pid for pid in _pids() if inodes & _sockets(pid))
    if not holders:
        return {"pid": 0, "command": "?", "unit": "", "user": ""} if inodes else {}
    if holders[0] == 1:
        command = ["systemctl", "list-sockets", "--full", "--plain", "--no-legend"]
        listing = subprocess.run(
            command, capture_output=True, text=True, timeout=DEADLINE_S, check=False
        ).stdout
        return {"pid": 1, "command": "systemd", "unit": socket_unit(listing, port), "user": ""}
    place = Path("/proc") / str(holders[0])
    unit, uid = unit_of((place / "cgroup").read_text())
    words = (place / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    user = pwd.getpwuid(int(uid)).pw_name if uid else ""
    return {"pid": holders[0], "command": words.strip()[:200], "unit": unit, "user": user}


def release(port: int, ours: list[str]) -> None:
    """See the module's text."""
    owner = find(port)
    unit, user = str(owner.get("unit", "")), str(owner.get("user", ""))
    if unit.endswith((".service", ".socket")):
        verb = ["stop"] if unit in ours else ["disable", "--now"]
        systemctl = ["systemctl"]
        if user:
            runtime = f"XDG_RUNTIME_DIR=/run/user/{pwd.getpwnam(user).pw_uid}"
            systemctl = ["runuser", "-u", user, "--", "env", runtime, "systemctl", "--user"]
        subprocess.run([*systemctl, *verb, unit], timeout=DEADLINE_S, check=False)
    elif int(str(owner.get("pid", 0))) > 1:
        os.kill(int(str(owner["pid"])), signal.SIGTERM)


def main(arguments: list[str]) -> int:
    """See the module's text."""
    if len(arguments) < 2 or arguments[0] not in ("find", "release") or not arguments[1].isdigit():
        print("port_owner: usage: find PORT | release PORT UNIT...", file=sys.stderr)
        return 2
    port = int(arguments[1])
    if arguments[0] == "find":
        print(json.dumps(find(port)))
        return 0
    release(port, arguments[2:])
    deadline = time.monotonic() + DEADLINE_S
    while owner := find(port):
        if time.monotonic() > deadline:
            print(f"port_owner: port {port} is still held by {owner}", file=sys.stderr)
            return 1
        time.sleep(0.1)
    return 0


def _pids() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]


def _sockets(pid: int) -> set[str]:
    found = set()
    try:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            target = os.readlink(link)  # noqa: PTH115  # not a path
            if target.startswith("socket:["):
                found.add(target[8:-1])
    except OSError:
        pass  # the process ended meanwhile
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
