"""The units and the packet filter, judged by systemd and nft themselves."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from enginectl.timing import LONGEST_DRAIN_SECONDS, START_SECONDS, STOP_SECONDS, boot_delay

from stack.managed import render
from stack.places import ENGINECTL, FIREWALL, FIREWALL_TABLE

PORT = 8601


def rendered(name: str, **variables: Any) -> str:
    """The text that the deploy lays down, with the deploy's own renderer and places."""
    fixed = {
        "enginectl": ENGINECTL, "firewall": FIREWALL, "table": FIREWALL_TABLE, "version": "v1",
        "start_seconds": START_SECONDS, "stop_seconds": STOP_SECONDS,
    }  # fmt: skip
    return render(f"engine/{name}", **{**fixed, **variables})


def needs(program: str) -> str:
    found = shutil.which(program, path="/usr/sbin:/usr/bin:/sbin:/bin")
    if found is None:
        pytest.skip(f"{program} is not installed on this machine")
    return found


@pytest.fixture
def units(tmp_path: Path) -> Path:
    engine = rendered(
        "fable-engine.service.j2", service_user="root", service_home="/root", data_mount="/mnt/data"
    )
    # the program is installed by the deploy, not on this machine
    assert engine.count("/usr/local/bin/enginectl") == 3
    units = {"fable-engine.service": engine}
    for name in ("fable-settle.service", "fable-settle.timer"):
        units[name] = rendered(f"{name}.j2")
    for name, text in units.items():
        (tmp_path / name).write_text(text.replace("/usr/local/bin/enginectl", "/bin/true"))
    (tmp_path / "fable-firewall.service").write_text(rendered("fable-firewall.service.j2"))
    return tmp_path


def test_systemd_accepts_the_units(units: Path) -> None:
    done = subprocess.run(
        [needs("systemd-analyze"), "verify", *map(str, sorted(units.iterdir()))],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "fable-" not in done.stderr, done.stderr
    assert done.returncode == 0


def test_systemd_would_notice_a_wrong_key(units: Path) -> None:
    file = units / "fable-engine.service"
    file.write_text(file.read_text().replace("KillMode=", "KilMode="))
    done = subprocess.run(
        [needs("systemd-analyze"), "verify", str(file)], capture_output=True, text=True, check=False
    )
    assert "KilMode" in done.stderr


@pytest.mark.parametrize(
    ("unit", "highest"),
    [("fable-engine.service", 3.5), ("fable-firewall.service", 2.5), ("fable-settle.service", 2.5)],
)
def test_exposure_stays_low(units: Path, unit: str, highest: float) -> None:
    done = subprocess.run(
        [
            needs("systemd-analyze"),
            "security",
            "--offline=true",
            "--no-pager",
            f"--threshold={round(highest * 10)}",
            str(units / unit),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, re.findall(r"Overall.*", done.stdout)


def test_what_breaks_the_engine_is_not_set() -> None:
    text = rendered(
        "fable-engine.service.j2",
        service_user="mavis",
        service_home="/home/mavis",
        data_mount="/mnt/data",
    )
    keys = {line.split("=")[0]: line.split("=", 1)[1] for line in text.splitlines() if "=" in line}
    for key in ("MemoryDenyWriteExecute", "PrivateDevices", "ProtectClock", "IPAddressDeny"):
        assert key not in keys
    assert {"AF_NETLINK", "AF_UNIX"} <= set(keys["RestrictAddressFamilies"].split())
    assert (keys["KillMode"], keys["Restart"]) == ("mixed", "always")
    assert (keys["StartLimitIntervalSec"], keys["LogRateLimitIntervalSec"]) == ("0", "0")
    assert (keys["User"], keys["RequiresMountsFor"]) == ("mavis", "/mnt/data")


# A network of its own: an engine's port and another one, and peers with addresses to come from.
PROBE = r"""
import json, socket, subprocess, sys
rules, sources, loads = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])
def run(*words):
    subprocess.run(words, check=True)
run("ip", "link", "set", "lo", "up")
run("ip", "netns", "add", "peer")
run("ip", "link", "add", "here", "type", "veth", "peer", "name", "there", "netns", "peer")
run("ip", "link", "set", "here", "up")
run("ip", "-n", "peer", "link", "set", "there", "up")
run("ip", "address", "add", "10.9.0.1/16", "dev", "here")
run("ip", "address", "add", "fd00:9::1/64", "dev", "here", "nodad")
for source in sources:
    six = ":" in source
    run("ip", "-n", "peer", "address", "add", source + ("/64" if six else "/16"), "dev", "there",
        *(["nodad"] if six else []))
for _ in range(loads):
    run("nft", "-f", rules)
listeners = []
for family, address in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):
    for port in (8601, 8602):
        one = socket.socket(family)
        if family == socket.AF_INET6:
            one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        one.bind((address, port))
        one.listen()
        listeners.append(one)
TRY = ("import socket, sys; target, port, source = sys.argv[1:]; "
       "socket.create_connection((target, int(port)), 5, (source, 0))")
def admitted(port, source, target, *inside):
    done = subprocess.run([*inside, sys.executable, "-c", TRY, target, str(port), source],
                          capture_output=True, text=True)
    if done.returncode and "ConnectionRefusedError" not in done.stderr:
        sys.exit(done.stderr)
    return done.returncode == 0
found = {}
for source in sources:
    target = "fd00:9::1" if ":" in source else "10.9.0.1"
    inside = ("ip", "netns", "exec", "peer")
    found[source] = [admitted(port, source, target, *inside) for port in (8601, 8602)]
for source in ("127.0.0.1", "::1"):
    found[source] = [admitted(port, source, source) for port in (8601, 8602)]
print(json.dumps(found))
"""


def probed(rules: str, sources: list[str], folder: Path, loads: int = 1) -> dict[str, list[bool]]:
    """For each source address: whether it reaches the engine's port, and another port."""
    for program in ("nft", "ip"):
        needs(program)
    (folder / "firewall.nft").write_text(rules)
    (folder / "probe.py").write_text(PROBE)
    namespace = ["unshare", "--net", "--mount", "--"]
    if subprocess.run([*namespace, "true"], check=False, capture_output=True).returncode:
        pytest.skip("network namespaces need root here")
    # `ip netns` keeps its names below /run: on a file system of this test's own
    script = 'mount -t tmpfs none /run && exec "$@"'
    done = subprocess.run(
        [*namespace, "sh", "-c", script, "sh", "/usr/bin/python3", str(folder / "probe.py"),
         str(folder / "firewall.nft"), json.dumps(sources), str(loads)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: dict[str, list[bool]] = json.loads(done.stdout)
    return found


def firewall(consumers: list[str]) -> str:
    return rendered("firewall.nft.j2", port=PORT, consumers=consumers)


def test_only_consumers_reach_the_engine_and_other_ports_are_untouched(tmp_path: Path) -> None:
    rules = firewall(["10.9.1.0/24", "10.9.1.7", "10.9.2.2", "fd00:9::2"])
    sources = ["10.9.1.7", "10.9.2.2", "10.9.2.3", "fd00:9::2", "fd00:9::3"]
    assert probed(rules, sources, tmp_path, loads=2) == {
        "10.9.1.7": [True, True],
        "10.9.2.2": [True, True],
        "10.9.2.3": [False, True],
        "fd00:9::2": [True, True],
        "fd00:9::3": [False, True],
        "127.0.0.1": [True, True],
        "::1": [True, True],
    }


@pytest.mark.parametrize("consumers", [[], ["10.9.2.2"], ["fd00:9::2"]])
def test_an_empty_list_of_either_kind_admits_none_of_it(
    consumers: list[str], tmp_path: Path
) -> None:
    found = probed(firewall(consumers), ["10.9.2.2", "fd00:9::2"], tmp_path)
    assert found == {
        "10.9.2.2": ["10.9.2.2" in consumers, True],
        "fd00:9::2": ["fd00:9::2" in consumers, True],
        "127.0.0.1": [True, True],
        "::1": [True, True],
    }


def test_the_units_times_leave_room_for_what_runs_within_them() -> None:
    text = rendered(
        "fable-engine.service.j2", service_user="m", service_home="/h", data_mount="/mnt/data"
    )
    seconds = {key: int(found) for key, found in re.findall(r"Timeout(\w+)Sec=(\d+)", text)}
    assert seconds["Stop"] > LONGEST_DRAIN_SECONDS
    assert seconds["Start"] > boot_delay(1000)
    delays = [boot_delay(failed) for failed in range(8)]
    assert delays == [0, 10, 20, 40, 80, 160, 300, 300]
