"""The lab's own network: a bridge, a way out, and ports of this machine's loopback that lead in.

Everything here runs inside the lab's network namespace; the machine's own firewall, routes and
sysctls stay as they are.
"""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

from lab.errors import LabError
from lab.places import BRIDGE, BRIDGE_ADDRESS, FORWARDS, PREFIX_LENGTH, SLIRP_ADDRESS
from stack.exits import EXIT_PORT_IN_USE

SLIRP_DEADLINE_S = 10.0
FIRST_INNER_PORT = 20000


def set_up(lab_folder: Path, outer_network: int, ports: dict[str, int]) -> None:
    """Build the network; `ports` maps each forward's name to a port of the machine's loopback.

    Args:
        lab_folder: where logs and slirp's socket go.
        outer_network: open descriptor of the machine's own network namespace.
        ports: where each forward listens on 127.0.0.1.

    Raises:
        LabError: a port is in use, or slirp4netns does not start.
    """
    _ip("link", "set", "lo", "up")
    _sysctl("net/ipv4/ip_forward", "1")
    _ip("link", "add", BRIDGE, "type", "bridge")
    _ip("addr", "add", f"{BRIDGE_ADDRESS}/{PREFIX_LENGTH}", "dev", BRIDGE)
    _ip("link", "set", BRIDGE, "up")
    _sysctl(f"net/ipv4/neigh/{BRIDGE}/retrans_time_ms", "50")  # ask again after 50 ms, not 1 s
    api = lab_folder / "slirp.sock"
    _start_slirp(lab_folder, outer_network, api)
    rules = [
        "table ip lab {",
        "chain pre { type nat hook prerouting priority -100;",
        *(
            f"iifname tap0 tcp dport {FIRST_INNER_PORT + index} "
            f"dnat to {forward.address}:{forward.port}"
            for index, forward in enumerate(FORWARDS)
        ),
        "}",
        "chain post { type nat hook postrouting priority 100;",
        "oifname tap0 masquerade",
        # a person on this machine appears as the bridge's address
        f"oifname {BRIDGE} ct status dnat masquerade",
        "}",
        "}",
    ]
    subprocess.run(["nft", "-f", "-"], input="\n".join(rules), text=True, check=True)
    for index, forward in enumerate(FORWARDS):
        answer = _slirp_call(
            api,
            "add_hostfwd",
            proto="tcp",
            host_addr="127.0.0.1",
            host_port=ports[forward.name],
            guest_addr=SLIRP_ADDRESS,
            guest_port=FIRST_INNER_PORT + index,
        )
        if "error" in answer:
            raise port_in_use(ports[forward.name], forward.name)


def port_in_use(port: int, purpose: str) -> LabError:
    """The error for a loopback port that somebody else listens on."""
    return LabError(
        f"127.0.0.1:{port} ({purpose}): is in use on this machine; end the program that listens "
        "there, or set FABLE_LAB=another-name: a lab of another name takes free ports",
        exit_code=EXIT_PORT_IN_USE,
    )


def choose_ports(fixed: bool) -> dict[str, int]:
    """Loopback ports of the forwards: the well-known ones, or free ones.

    Raises:
        LabError: a well-known port is in use.
    """
    chosen: dict[str, int] = {}
    held: list[socket.socket] = []
    try:
        for forward in FORWARDS:
            listener = socket.socket()
            held.append(listener)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind(("127.0.0.1", forward.preferred if fixed else 0))
                listener.listen()
            except OSError:
                raise port_in_use(forward.preferred, forward.name) from None
            chosen[forward.name] = listener.getsockname()[1]
    finally:
        for listener in held:
            listener.close()
    return chosen


def _start_slirp(lab_folder: Path, outer_network: int, api: Path) -> None:
    reader, writer = os.pipe()
    log = (lab_folder / "slirp.log").open("ab")
    subprocess.Popen(
        [
            "nsenter", f"--net=/proc/self/fd/{outer_network}",
            "slirp4netns", "--configure", "--mtu=65520", "--disable-host-loopback",
            f"--ready-fd={writer}", f"--api-socket={api}", "--netns-type=path",
            "/proc/1/ns/net", "tap0",
        ],
        pass_fds=(outer_network, writer),
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
    )  # fmt: skip
    os.close(writer)
    ready, _, _ = select.select([reader], [], [], SLIRP_DEADLINE_S)
    if not ready or not os.read(reader, 1):
        raise LabError(f"slirp4netns: did not start; see {log.name} (is /dev/net/tun there?)")
    os.close(reader)


def _slirp_call(api: Path, verb: str, **arguments: Any) -> dict[str, Any]:
    deadline = time.monotonic() + SLIRP_DEADLINE_S
    while True:
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(SLIRP_DEADLINE_S)
            try:
                client.connect(str(api))
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.02)
                continue
            client.sendall(json.dumps({"execute": verb, "arguments": arguments}).encode())
            client.shutdown(socket.SHUT_WR)
            answer: dict[str, Any] = json.loads(client.makefile("rb").read())
            return answer


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


def _sysctl(name: str, value: str) -> None:
    (Path("/proc/sys") / name).write_text(value)
