"""The engine's host, as it is: who listens, what runs with which arguments, who may reach it."""

from __future__ import annotations

import ipaddress
import json
import re
import shlex
from typing import Any

import pytest
from testinfra.host import Host

from stack.artifacts import Artifacts
from stack.places import RELEASES, EnginePlaces
from stack.roles.engine import release_of
from stack.settings import EngineHost
from tests.state.state_support import Target

UNIT = "fable-engine"
Network = Any  # ipaddress has no common type for both versions


@pytest.fixture(scope="module")
def unit(v100: Host) -> dict[str, str]:
    """The unit's properties."""
    return dict(
        line.split("=", 1) for line in v100.check_output(f"systemctl show {UNIT}").splitlines()
    )


@pytest.fixture(scope="module")
def arguments(v100: Host, unit: dict[str, str]) -> dict[str, list[str]]:
    """The running process's arguments: flag → its values."""
    words = v100.check_output(f"tr '\\0' '\\n' </proc/{unit['MainPID']}/cmdline").splitlines()
    found: dict[str, list[str]] = {}
    flag = ""
    for word in words:
        if word.startswith("--"):
            flag = word
            found[flag] = []
        elif flag:
            found[flag].append(word)
    return found


def test_unit_is_enabled_and_active(unit: dict[str, str]) -> None:
    assert unit["UnitFileState"] == "enabled"
    assert (unit["ActiveState"], unit["SubState"]) == ("active", "running")


def test_unit_never_gives_up_and_waits_for_the_data_disk(
    unit: dict[str, str], engine_settings: EngineHost
) -> None:
    assert unit["Restart"] == "always"
    assert unit["StartLimitIntervalUSec"] == "0"
    assert unit["KillMode"] == "mixed"
    assert engine_settings.storage.mount in unit["RequiresMountsFor"].split()


def test_port_belongs_to_the_engine_and_to_nobody_else(
    v100: Host, unit: dict[str, str], engine_settings: EngineHost
) -> None:
    port = engine_settings.serving.port
    listeners = v100.check_output(f"ss -Hltnp 'sport = :{port}'").splitlines()
    assert len(listeners) == 1, listeners
    assert listeners[0].split()[3].rpartition(":")[0].strip("[]") == engine_settings.address
    assert set(re.findall(r"pid=(\d+)", listeners[0])) == {unit["MainPID"]}


def test_engine_runs_as_the_service_user_from_its_own_venv(
    v100: Host, unit: dict[str, str], engine_settings: EngineHost
) -> None:
    pid = unit["MainPID"]
    assert v100.check_output(f"ps -o user= -p {pid}").strip() == engine_settings.service.user
    program = v100.check_output(f"head -z -n1 /proc/{pid}/cmdline | tr -d '\\0'")
    assert program.startswith(str(EnginePlaces(engine_settings.storage).venvs) + "/")


def test_running_arguments_are_the_settings(
    arguments: dict[str, list[str]], engine_settings: EngineHost
) -> None:
    engine = engine_settings.engine
    assert float(arguments["--gpu-memory-utilization"][0]) == engine.gpu_memory_utilization
    assert arguments["--max-num-seqs"] == [str(engine.max_num_seqs)]
    assert arguments["--max-model-len"] == [str(engine.max_model_len)]
    assert arguments["--max-num-batched-tokens"] == [str(engine.max_num_batched_tokens)]
    assert arguments["--tensor-parallel-size"] == [str(engine.tensor_parallel_size)]
    assert arguments["--served-model-name"] == engine_settings.serving.names
    speculation = json.loads(arguments.get("--speculative-config", ["{}"])[0])
    assert speculation.get("num_speculative_tokens", 0) == engine.num_speculative_tokens


def test_committed_release_is_the_one_the_settings_make(
    v100: Host, engine_settings: EngineHost, locked: Artifacts
) -> None:
    state = json.loads(v100.check_output("cat /var/lib/fable-engine/state.json"))
    assert state["committed"] == release_of(engine_settings, locked)["name"]


def test_all_names_are_served(v100: Host, engine_settings: EngineHost) -> None:
    url = f"http://{engine_settings.address}:{engine_settings.serving.port}"
    models = json.loads(v100.check_output(f"curl -sf -m 10 {url}/v1/models"))
    assert [model["id"] for model in models["data"]] == engine_settings.serving.names
    assert v100.run(f"curl -sf -m 10 -o /dev/null {url}/health").rc == 0


def test_gateway_host_reaches_the_port(dgx: Host, engine_settings: EngineHost) -> None:
    url = f"http://{engine_settings.address}:{engine_settings.serving.port}/health"
    assert dgx.check_output(f"curl -s -m 10 -o /dev/null -w '%{{http_code}}' {url}") == "200"


def test_a_stranger_is_refused(
    dgx: Host, targets: dict[str, Target], engine_settings: EngineHost
) -> None:
    stranger = targets["dgx"].data.get("stranger_address")
    if stranger is None:
        pytest.skip("the inventory names no stranger_address to try from")
    url = f"http://{engine_settings.address}:{engine_settings.serving.port}/health"
    tried = dgx.run(f"curl -s -m 10 --interface {stranger} {url}")
    assert tried.rc == 7, "curl's code for a refused connection"


def test_packet_filter_is_loaded_and_comes_back_at_boot(
    v100: Host, engine_settings: EngineHost
) -> None:
    assert v100.check_output("systemctl is-enabled fable-firewall") == "enabled"
    assert v100.check_output("systemctl is-active fable-firewall") == "active"
    rules = v100.check_output("nft list table inet fable_engine")
    port = engine_settings.serving.port
    assert re.search(rf"tcp dport {port} .*reject with tcp reset", rules), rules


def test_packet_filter_admits_the_settings_consumers_and_nobody_else(
    v100: Host, targets: dict[str, Target], engine_settings: EngineHost
) -> None:
    listed = json.loads(v100.check_output("nft -j list table inet fable_engine"))["nftables"]
    admitted = set()
    for item in listed:
        for element in item.get("set", {}).get("elem", []):
            prefix = element["prefix"] if isinstance(element, dict) else {"addr": element}
            address = ipaddress.ip_address(prefix["addr"])
            length = prefix.get("len", address.max_prefixlen)
            admitted.add(ipaddress.ip_network(f"{address}/{length}"))
    wanted = [targets["dgx"].data["address"], *(engine_settings.access.consumers or [])]
    networks = {ipaddress.ip_network(entry) for entry in wanted}
    # the kernel merges what overlaps, so both ways: nothing uncovered, nothing beyond
    assert all(any(_covers(have, want) for have in admitted) for want in networks)
    assert all(any(_covers(want, have) for want in networks) for have in admitted)


def _covers(outer: Network, inner: Network) -> bool:
    return bool(
        outer.version == inner.version
        and outer.network_address <= inner.network_address
        and outer.broadcast_address >= inner.broadcast_address
    )


def test_no_drop_in_changes_the_units(v100: Host) -> None:
    units = "fable-engine.service fable-firewall.service fable-settle.service fable-settle.timer"
    assert v100.check_output(f"systemctl show -P DropInPaths {units}").strip() == ""


def test_the_committed_release_is_seen_to_every_half_minute(v100: Host) -> None:
    assert v100.check_output("systemctl is-enabled fable-settle.timer") == "enabled"
    assert v100.check_output("systemctl is-active fable-settle.timer") == "active"
    assert v100.run("systemctl is-failed fable-settle.service").rc != 0


def test_data_disk_is_mounted(v100: Host, engine_settings: EngineHost) -> None:
    assert v100.run(f"findmnt {engine_settings.storage.mount}").rc == 0


def test_trees_belong_to_the_service_user(
    v100: Host, engine_settings: EngineHost, locked: Artifacts
) -> None:
    places = EnginePlaces(engine_settings.storage)
    trees = [places.root, places.toolkits, places.checkpoints, places.venvs, places.tools]
    paths = release_of(engine_settings, locked)["paths"]
    assert isinstance(paths, dict)
    trees += paths.values()
    user = engine_settings.service.user
    found = v100.check_output("stat -c '%U %a' " + " ".join(str(tree) for tree in trees))
    assert found.splitlines() == [f"{user} 755"] * len(trees)


def test_root_runs_nothing_that_the_service_user_can_write(v100: Host) -> None:
    loose = v100.check_output(
        "find -L /usr/local/bin/enginectl /usr/local/lib/fable /var/lib/fable-engine "
        "/etc/fable-engine /etc/systemd/system/fable-engine.service "
        "/etc/systemd/system/fable-firewall.service /etc/systemd/system/fable-settle.service "
        "! -user root -o -perm /022"
    )
    assert loose == ""


def test_fixed_paths_lead_to_what_the_release_holds(
    v100: Host, engine_settings: EngineHost, locked: Artifacts
) -> None:
    paths = release_of(engine_settings, locked)["paths"]
    assert isinstance(paths, dict)
    links = f"{engine_settings.toolkit.link} {engine_settings.checkpoint.link}"
    found = v100.check_output(f"readlink -f {links}").splitlines()
    assert found == [paths["toolkit"], paths["checkpoint"]]


def test_toolkit_is_proved(v100: Host, engine_settings: EngineHost) -> None:
    tool = f"{EnginePlaces(engine_settings.storage).tools}/bin/cuda-proof"
    user = engine_settings.service.user
    proof = v100.run(f"sudo -u {user} {tool} {engine_settings.toolkit.link}")
    assert proof.rc == 0, proof.stdout + proof.stderr


def test_toolkit_is_complete(v100: Host, engine_settings: EngineHost) -> None:
    """Every file of the census is there in its size, and none besides: find against the census."""
    link = engine_settings.toolkit.link
    census = json.loads(v100.check_output(f"cat {link}/census.json"))
    expected = {f"{name} {entry['size']}" for name, entry in census["files"].items()}
    found = v100.check_output(f"find {link}/ -type f -printf '%P %s\\n'").splitlines()
    own = ("census.json ", ".toolkit.json ", ".proof.json ")
    stand = {line for line in found if not line.startswith(own)}
    assert (expected - stand, stand - expected) == (set(), set())
    components = {entry["component"] for entry in census["files"].values()}
    if engine_settings.toolkit.source in ("redist", "mirror"):
        assert components == {"cuda", *engine_settings.toolkit.components}
    tool = f"{EnginePlaces(engine_settings.storage).tools}/bin/cuda-install"
    assert v100.run(f"{tool} census {link}").rc == 0


def test_releases_tell_every_user_what_they_need(v100: Host, engine_settings: EngineHost) -> None:
    """The collector of old toolkits runs as the service user, and reads all releases."""
    user = engine_settings.service.user
    read = v100.check_output(f"sudo -u {user} sh -c 'cat {RELEASES}/*/release.json'")
    assert v100.check_output(f"readlink -f {engine_settings.toolkit.link}") in read


def test_headers_come_from_the_toolkit(v100: Host, engine_settings: EngineHost) -> None:
    """The failure this project exists to prevent, looked at with the preprocessor alone."""
    prefix = engine_settings.toolkit.link
    as_user = f"sudo -u {engine_settings.service.user}"
    markers = v100.check_output(
        # nvcc writes where it stands, and the login's home may be closed to the service user
        f"cd /tmp && echo '#include <cuda_fp16.h>' | {as_user} {prefix}/bin/nvcc "
        "-arch=sm_70 -x cu -E - | "
        'grep -o \'^# [0-9]* "[^"]*cuda_fp16[^"]*"\' | sort -u'
    )
    origins = re.findall(r'"([^"]+)"', markers)
    real = v100.check_output(f"readlink -f {prefix}")
    assert origins
    resolved = v100.check_output(shlex.join(["readlink", "-f", *origins])).splitlines()
    assert all(path.startswith(real + "/") for path in resolved), resolved


def test_checkpoint_is_whole(v100: Host, engine_settings: EngineHost) -> None:
    """Every size, and the digest of the smallest file, against the manifest: with coreutils."""
    link = engine_settings.checkpoint.link
    manifest = json.loads(v100.check_output(f"cat {link}/manifest.json"))
    names = [f"{link}/{name}" for name in manifest["files"]]
    sizes = v100.check_output(shlex.join(["stat", "-c", "%n %s", "--", *names]))
    expected = {f"{link}/{name} {entry['size']}" for name, entry in manifest["files"].items()}
    assert set(sizes.splitlines()) == expected
    smallest = min(manifest["files"], key=lambda name: manifest["files"][name]["size"])
    digest = v100.check_output(shlex.join(["sha256sum", "--", f"{link}/{smallest}"])).split()[0]
    assert digest == manifest["files"][smallest]["sha256"]


def test_checkpoint_is_the_locked_one_and_verified(
    v100: Host, engine_settings: EngineHost, locked: Artifacts
) -> None:
    link = engine_settings.checkpoint.link
    digest = v100.check_output(f"sha256sum {link}/manifest.json").split()[0]
    assert digest == locked.checkpoint.whole.listed().sha256
    tool = f"{EnginePlaces(engine_settings.storage).tools}/bin/ckpt"
    for command in ("verify", "census"):
        done = v100.run(f"sudo -u {engine_settings.service.user} {tool} {command} {link}")
        assert done.rc == 0, done.stderr
