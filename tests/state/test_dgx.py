"""The gateway's host, as it is."""

from __future__ import annotations

import json
import re

import pytest
from testinfra.host import Host
from venv_build.build import venv_name

from stack.places import GatewayPlaces
from stack.roles.gateway import INSTANCES, REQUIREMENTS, SOCKET, deployment, keys_text
from stack.settings import GatewayHost
from tests.state.state_support import Target

UNIT = "fable-gateway"


def properties(dgx: Host, unit: str) -> dict[str, str]:
    """What systemd knows of a unit."""
    lines = dgx.check_output(f"systemctl show {unit}").splitlines()
    return dict(line.split("=", 1) for line in lines if "=" in line)


@pytest.fixture(scope="module")
def unit(dgx: Host) -> dict[str, str]:
    """The properties of the one instance that runs."""
    running = [
        found
        for found in (properties(dgx, name) for name in INSTANCES)
        if found["ActiveState"] == "active"
    ]
    assert len(running) == 1
    return running[0]


@pytest.fixture(scope="module")
def url(gateway_settings: GatewayHost) -> str:
    """Where the gateway listens, from its own host."""
    return f"http://127.0.0.1:{gateway_settings.gateway.port}"


def test_units_are_enabled_and_active(dgx: Host, unit: dict[str, str]) -> None:
    for name, state in ((UNIT, "exited"), (SOCKET, "running")):
        found = properties(dgx, name)
        assert (found["UnitFileState"], found["ActiveState"]) == ("enabled", "active")
        assert found["SubState"] in {state, "listening"}
    assert unit["Restart"] == "always"
    assert unit["StartLimitIntervalUSec"] == "0"


def test_port_belongs_to_systemd_and_the_gateway(
    dgx: Host, unit: dict[str, str], gateway_settings: GatewayHost
) -> None:
    listeners = dgx.check_output(f"ss -Hltnp 'sport = :{gateway_settings.gateway.port}'")
    assert set(re.findall(r"pid=(\d+)", listeners)) == {unit["MainPID"], "1"}


def test_gateway_is_launched_from_the_home_of_the_service_user(
    dgx: Host, unit: dict[str, str], gateway_settings: GatewayHost
) -> None:
    pid = unit["MainPID"]
    words = dgx.check_output(f"tr '\\0' '\\n' </proc/{pid}/cmdline").splitlines()
    places = GatewayPlaces(gateway_settings.service)
    assert words[0] == f"{places.venv}/bin/python"
    assert f"{places.bin}/fable_gateway.py" in words
    owner = dgx.check_output(f"ps -o user= -p {pid}").strip()
    assert owner == gateway_settings.service.user


def test_health_tells_gateway_and_engine_apart(dgx: Host, url: str) -> None:
    health = json.loads(dgx.check_output(f"curl -sf -m 10 {url}/health"))
    assert (health["gateway"], health["engine"]) == ("ok", "ok")


def test_running_gateway_is_the_one_the_settings_make(
    dgx: Host, url: str, targets: dict[str, Target], gateway_settings: GatewayHost
) -> None:
    wanted = deployment(gateway_settings, targets["v100"].data["address"])
    assert json.loads(dgx.check_output(f"curl -sf -m 10 {url}/health"))["deployment"] == wanted
    config = json.loads(dgx.check_output("cat /etc/fable-gateway/config.json"))
    assert config["max_in_flight"] == gateway_settings.gateway.max_in_flight
    assert config["models"] == gateway_settings.serving.names
    places = GatewayPlaces(gateway_settings.service)
    name = venv_name(REQUIREMENTS.read_text(), gateway_settings.gateway.python)
    assert dgx.check_output(f"readlink {places.venv}") == f"{places.venvs}/{name}"


@pytest.mark.parametrize("header", ["", "-H 'Authorization: Bearer wrong'"])
def test_without_a_known_key_nothing_is_served(dgx: Host, url: str, header: str) -> None:
    answer = dgx.check_output(f"curl -s -m 10 -w '\\n%{{http_code}}' {header} {url}/v1/models")
    body, _, code = answer.rpartition("\n")
    assert code == "401"
    assert json.loads(body)["error"]["message"]


def test_keys_are_those_of_the_settings_and_for_the_gateway_alone(
    dgx: Host, url: str, gateway_settings: GatewayHost
) -> None:
    places = GatewayPlaces(gateway_settings.service)
    found = dgx.check_output(f"stat -c '%U %a' {places.config} {places.keys}")
    assert found.splitlines() == [f"{gateway_settings.service.user} 600"] * 2
    wanted = json.loads(keys_text(gateway_settings))
    assert json.loads(dgx.check_output(f"cat {places.keys}")) == wanted
    assert f"fable_gateway_keys {float(len(wanted))}" in dgx.check_output(f"curl -s {url}/metrics")
