"""The gateway as its operator meets it: commands, exit codes, signals, the unit."""

from __future__ import annotations

import json
import re
import runpy
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fable_gateway import keyfile
from fable_gateway.config import parse
from fable_gateway.errors import GatewayError
from fable_gateway.service import DRAIN_S
from gateway_handover import DEADLINE_S
from hypothesis import given
from hypothesis import strategies as st

from stack.roles.gateway import configuration, deployment, keys_text, unit_texts
from stack.settings import GatewayHost
from tests.unit.gateway_support import (
    KEY,
    MODELS,
    OTHER_KEY,
    PATIENCE_S,
    config_for,
    digest,
    engine,
    gateway_before,
    install,
)

VALID = config_for("http://198.51.100.7:8601")


@pytest.fixture
def launcher(tmp_path: Path) -> Path:
    return install(tmp_path)


def run(launcher: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    # Any python3 may start it, also one without the gateway's libraries.
    command = ["/usr/bin/env", "python3", launcher, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


WRONG: list[tuple[Any, str]] = [
    ("{", "line 1"),
    ("[]", "the config: must be an object"),
    ('{"a": 1, "a": 2}', "'a': stands twice"),
    (VALID | {"kyes": {}}, "unknown key 'kyes'"),
    ({k: v for k, v in VALID.items() if k != "models"}, "models is missing"),
    (VALID | {"upstreams": ["http://a:1", "http://b:1"]}, "upstreams: 2 addresses"),
    (VALID | {"upstreams": ["https://a/v1"]}, "upstreams[0]: 'https://a/v1'"),
    (VALID | {"listen": {"host": "127.0.0.1", "port": 0}}, "listen.port"),
    (VALID | {"max_in_flight": True}, "max_in_flight"),
    (VALID | {"hold_seconds": -1}, "hold_seconds"),
    (VALID | {"hold_seconds": float("nan")}, "hold_seconds"),
    (VALID | {"keys_file": "keys.json"}, "keys_file: 'keys.json'"),
    (VALID | {"max_buffered_bytes": 1}, "max_buffered_bytes"),
    (VALID | {"models": ["a", "a"]}, "models: a name stands twice"),
]


@pytest.mark.parametrize(("content", "said"), WRONG, ids=[said for _, said in WRONG])
def test_a_wrong_config_is_refused_by_its_key(content: Any, said: str) -> None:
    text = content if isinstance(content, str) else json.dumps(content)
    with pytest.raises(GatewayError) as error:
        parse(text.encode(), "config.json")
    assert str(error.value).startswith("config.json: ")
    assert said in str(error.value)
    assert "\n" not in str(error.value)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=6,
)


@given(st.sampled_from(sorted(VALID)), JSON_VALUES)
def test_any_value_anywhere_is_taken_or_refused_in_one_line(name: str, value: object) -> None:
    try:
        parse(json.dumps(VALID | {name: value}).encode(), "config.json")
    except GatewayError as error:
        assert len(str(error).splitlines()) == 1


@given(st.binary(max_size=60))
def test_any_bytes_are_refused_in_one_line(content: bytes) -> None:
    with pytest.raises(GatewayError) as error:
        parse(content, "config.json")
    assert len(str(error.value).splitlines()) == 1


def test_check_and_serve_exit_codes(launcher: Path, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(VALID))
    keys = tmp_path / "keys.json"
    keys.write_text(json.dumps({"alice": digest(KEY)}))
    good = run(launcher, "check", "--config", file, "--keys", keys)
    assert (good.returncode, good.stderr) == (0, "")
    assert len(good.stdout.splitlines()) == 2
    for command in ("check", "serve"):
        absent = run(launcher, command, "--config", tmp_path / "absent.json")
        assert absent.returncode == 2
        assert len(absent.stderr.splitlines()) == 1
    file.write_text(json.dumps(VALID | {"kyes": {}}))
    for command in ("check", "serve"):
        wrong = run(launcher, command, "--config", file)
        assert (wrong.returncode, wrong.stdout) == (1, "")
        assert re.fullmatch(rf"fable_gateway: {file}: .*'kyes'.*\n", wrong.stderr)


def test_a_taken_port_is_one_line(launcher: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        file = tmp_path / "config.json"
        keys = tmp_path / "keys.json"
        keys.write_text("{}")
        listen = {"host": "127.0.0.1", "port": port}
        file.write_text(json.dumps(VALID | {"listen": listen, "keys_file": str(keys)}))
        taken = run(launcher, "serve", "--config", file)
    assert taken.returncode == 2
    assert f"127.0.0.1:{port}: cannot be listened on" in taken.stderr
    assert len(taken.stderr.splitlines()) == 1


def test_a_missing_venv_is_one_line(launcher: Path, tmp_path: Path) -> None:
    (tmp_path / "fable-gateway/venv").unlink()
    missing = run(launcher, "check", "--config", "x")
    assert missing.returncode == 2
    assert len(missing.stderr.splitlines()) == 1


def test_only_an_argument_moves_the_place(launcher: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    (tmp_path / "fable-gateway").rename(elsewhere)
    file = tmp_path / "keys.json"
    assert run(launcher, "keys", "add", "--file", file, "bob").returncode == 2
    moved = run(launcher, "--place", elsewhere, "keys", "add", "--file", file, "bob")
    assert moved.returncode == 0


def test_readiness_is_told_and_sigterm_lets_a_stream_finish(tmp_path: Path) -> None:
    told = tmp_path / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(told))
        manager.settimeout(PATIENCE_S)
        with (
            engine() as upstream,
            gateway_before(upstream.url, tmp_path, {"NOTIFY_SOCKET": str(told)}) as gateway,
        ):
            assert manager.recv(100) == b"READY=1"
            idle = gateway.connect()
            idle.request("GET", "/health")
            idle.getresponse().read()
            connection = gateway.connect()
            connection.request(
                "POST", "/v1/completions", json.dumps({"act": "hold"}), {"x-api-key": KEY}
            )
            upstream.next_seen()
            gateway.process.terminate()
            assert manager.recv(100) == b"STOPPING=1"
            gateway.wait_for(lambda line: line["event"] == "stopping")
            with pytest.raises((ConnectionRefusedError, ConnectionResetError)):
                # The socket closes right after the line; a refusal must come.
                for _ in range(200):
                    socket.create_connection(("127.0.0.1", gateway.port), PATIENCE_S).close()
                    gateway.process.poll()
            upstream.release.set()
            answer = connection.getresponse()
            assert answer.status == 200
            assert json.loads(answer.read())["choices"]
            assert gateway.process.wait(PATIENCE_S) == 0


def host_settings(keys: dict[str, Any]) -> GatewayHost:
    """The settings in group_data, with `keys`."""
    return GatewayHost.model_validate(
        {
            "address": "198.51.100.9",
            "service": {"user": "mavis", "home": "/home/mavis"},
            "serving": {"port": 8601, "names": MODELS},
            "gateway": runpy.run_path("group_data/dgx.py")["gateway"] | {"keys": keys},
        }
    )


def test_the_gateway_takes_what_the_deploy_renders() -> None:
    keys = {
        "alice": digest(KEY)["sha256"],
        "bob": digest(OTHER_KEY)
        | {"expires": "2027-01-31", "models": ["fable-27b"], "requests_per_minute": 60},
    }
    settings = host_settings(keys)
    read = keyfile.parse(keys_text(settings).encode(), "keys.json")
    assert [json.loads(f"{{{key.settings_line()[:-1]}}}") for key in read.keys] == [
        {name: value} for name, value in keys.items()
    ]
    rendered = configuration(settings, "198.51.100.7") | {"deployment": "x"}
    assert parse(json.dumps(rendered).encode(), "config.json").max_in_flight == 8


def test_only_what_a_restart_is_needed_for_names_the_deployment() -> None:
    keys = {"alice": digest(KEY)["sha256"]}
    settings = host_settings(keys)
    before = deployment(settings, "198.51.100.7")
    more = host_settings(keys | {"bob": digest(OTHER_KEY)["sha256"]})
    assert deployment(more, "198.51.100.7") == before
    taken = settings.model_copy(
        update={"gateway": settings.gateway.model_copy(update={"take_over": True})}
    )
    assert deployment(taken, "198.51.100.7") == before
    other = settings.model_copy(
        update={"gateway": settings.gateway.model_copy(update={"max_in_flight": 4})}
    )
    assert deployment(other, "198.51.100.7") != before
    assert deployment(settings, "198.51.100.8") != before


@pytest.fixture(scope="module")
def units(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the units as the deploy lays them down."""
    settings = host_settings({"alice": digest(KEY)["sha256"]})
    folder = tmp_path_factory.mktemp("units")
    for name, text in unit_texts(settings).items():
        # Programs that exist, so that nothing but the unit can be wrong.
        (folder / name).write_text(
            text.replace("/home/mavis/fable-gateway/venv/bin/python", sys.executable)
        )
    return folder


@pytest.mark.parametrize("unit", ["fable-gateway.service", "fable-gateway@.service"])
def test_the_services_are_hardened(units: Path, unit: str) -> None:
    verdict = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", "--threshold=15", "--no-pager",
         units / unit],
        capture_output=True,
        text=True,
        check=False,
    )  # fmt: skip
    assert verdict.returncode == 0, verdict.stdout + verdict.stderr


def test_the_units_are_understood_together(units: Path) -> None:
    known = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *sorted(units.iterdir())],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (known.returncode, known.stderr) == (0, "")


def test_deadlines_nest_and_no_crash_loop_ends_anything(units: Path) -> None:
    def value(unit: str, key: str) -> int:
        found = re.search(rf"^{key}=(\d+)$", (units / unit).read_text(), re.MULTILINE)
        assert found, f"{unit}: {key}"
        return int(found[1])

    inner = value("fable-gateway@.service", "TimeoutStopSec")
    assert DRAIN_S < inner < DEADLINE_S < value("fable-gateway.service", "TimeoutStopSec")
    ready = value("fable-gateway@.service", "TimeoutStartSec")
    assert ready < value("fable-gateway.service", "TimeoutStartSec")
    assert value("fable-gateway.service", "StartLimitIntervalSec") == 0
    assert value("fable-gateway@.service", "StartLimitIntervalSec") == 0
    assert value("fable-gateway.socket", "TriggerLimitIntervalSec") == 0
