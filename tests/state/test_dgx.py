"""The gateway's host, as it is."""

from __future__ import annotations

import json
import re

import pytest
from testinfra.host import Host
from venv_build.build import venv_name

from stack.places import GatewayPlaces
from stack.roles.gateway import REQUIREMENTS, deployment
from stack.settings import GatewayHost
from tests.state.state_support import Target

UNIT = "fable-gateway"


@pytest.fixture(scope="module")
def unit(dgx: Host) -> dict[str, str]:
    """The unit's properties."""
    return dict(
        line.split("=", 1) for line in dgx.check_output(f"systemctl show {UNIT}").splitlines()
    )


@pytest.fixture(scope="module")
def url(gateway_settings: GatewayHost) -> str:
    """Where the gateway listens, from its own host."""
    return f"http://127.0.0.1:{gateway_settings.gateway.port}"


def test_unit_is_enabled_and_active(unit: dict[str, str]) -> None:
    assert unit["UnitFileState"] == "enabled"
    assert (unit["ActiveState"], unit["SubState"]) == ("active", "running")
    assert unit["Restart"] == "always"


def test_port_belongs_to_the_gateway(
    dgx: Host, unit: dict[str, str], gateway_settings: GatewayHost
) -> None:
    listeners = dgx.check_output(f"ss -Hltnp 'sport = :{gateway_settings.gateway.port}'")
    assert set(re.findall(r"pid=(\d+)", listeners)) == {unit["MainPID"]}


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


def test_keys_are_not_readable_by_others(dgx: Host) -> None:
    found = dgx.check_output("stat -c '%U %a' /etc/fable-gateway/config.json")
    assert found == "root 640"
