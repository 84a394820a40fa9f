"""The gateway's two instances: nobody notices a restart, and nothing else has the port."""

from __future__ import annotations

import collections
import contextlib
import hashlib
import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator
from subprocess import CompletedProcess
from typing import Any

import pytest

from tests.lab.lab_support import DeployedLab

pytestmark = pytest.mark.timeout(600)
PORT = 18777
STATUS = "-o /dev/null -w '%{http_code}'"
DeployGateway = Callable[[dict[str, object]], CompletedProcess[str]]


@pytest.fixture
def deploy_gateway(lab: DeployedLab, tmp_path_factory: pytest.TempPathFactory) -> DeployGateway:
    """Deploy dgx with other settings: returns pyinfra's run for a dict of overrides."""

    return lambda overrides: lab.deploy_with("dgx", overrides, tmp_path_factory.mktemp("inventory"))


class Load:
    """Short requests on new and on kept connections, and streams, until the block ends."""

    def __init__(self, lab: DeployedLab) -> None:
        self.ends: collections.Counter[str] = collections.Counter()
        self._lab = lab
        self._stop = threading.Event()

    def _connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self._lab.port("gateway"), timeout=60)

    def _repeat(self, ask: Callable[[http.client.HTTPConnection], str], keep: bool) -> None:
        connection = self._connect()
        while not self._stop.is_set():
            try:
                self.ends[ask(connection)] += 1
            except (OSError, http.client.HTTPException) as error:
                self.ends[repr(error)] += 1
                connection.close()
            if not keep:
                connection.close()

    def _models(self, connection: http.client.HTTPConnection) -> str:
        connection.request("GET", "/v1/models", headers={"x-api-key": self._lab.gateway_key})
        response = connection.getresponse()
        response.read()
        return f"models {response.status}"

    def _stream(self, connection: http.client.HTTPConnection) -> str:
        message = {"role": "user", "content": "Tell a long tale."}
        body = {"model": "fable-27b", "stream": True, "max_tokens": 200, "messages": [message]}
        headers = {"x-api-key": self._lab.gateway_key, "Content-Type": "application/json"}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        response = connection.getresponse()
        whole = response.read().rstrip().endswith(b"data: [DONE]")
        return f"stream {response.status} {'whole' if whole else 'cut'}"

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        jobs: list[tuple[Any, bool]] = [(self._models, True)] * 3 + [(self._models, False)] * 3
        jobs += [(self._stream, False)] * 2
        threads = [threading.Thread(target=self._repeat, args=job) for job in jobs]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._stop.set()
            for thread in threads:
                thread.join(120)


def instances(lab: DeployedLab) -> list[str]:
    """ActiveState of both instances."""
    return lab.on("dgx", "systemctl is-active fable-gateway@a fable-gateway@b || true").splitlines()


def wait_for_one_instance(lab: DeployedLab) -> None:
    deadline = time.monotonic() + 120
    while "deactivating" in (found := instances(lab)):
        assert time.monotonic() < deadline, found
        time.sleep(0.2)
    assert sorted(found) == ["active", "inactive"]


def until(lab: DeployedLab, host_command: str, wanted: str) -> None:
    """Wait until a command on dgx prints `wanted`."""
    deadline = time.monotonic() + 60
    while (found := lab.on("dgx", host_command)) != wanted:
        assert time.monotonic() < deadline, found
        time.sleep(0.1)


def served_by(lab: DeployedLab) -> str:
    """The process that serves."""
    return lab.on("dgx", "systemctl show -P MainPID fable-gateway@a fable-gateway@b | grep -vx 0")


def test_restarts_under_load_refuse_nobody_and_cut_nothing(lab: DeployedLab) -> None:
    wait_for_one_instance(lab)
    load = Load(lab)
    processes = {served_by(lab)}
    with load.running():
        for _ in range(2):
            time.sleep(1)
            lab.on("dgx", "sudo systemctl restart fable-gateway")
            wait_for_one_instance(lab)
            processes.add(served_by(lab))
    assert set(load.ends) == {"models 200", "stream 200 whole"}, load.ends
    assert len(processes) == 3


def test_an_instance_that_does_not_get_ready_leaves_the_old_one(lab: DeployedLab) -> None:
    before = served_by(lab)
    config = "/etc/fable-gateway/config.json"
    lab.on("dgx", f"sudo cp -p {config} /var/tmp/whole && echo '{{' | sudo tee {config}")
    try:
        done = lab.run(
            "script/lab", "ssh", "dgx", "sudo systemctl restart fable-gateway", check=False
        )
        assert done.returncode != 0
        assert served_by(lab) == before
        assert "goes on" in lab.on("dgx", "sudo journalctl -u fable-gateway -n 20 -o cat")
    finally:
        lab.on("dgx", f"sudo cp -p /var/tmp/whole {config}")
    until(lab, "systemctl is-active fable-gateway || true", "active")
    lab.on("dgx", "sudo systemctl restart fable-gateway")
    assert served_by(lab) != before


def test_stop_closes_the_port_and_start_opens_it(lab: DeployedLab) -> None:
    lab.on("dgx", "sudo systemctl stop fable-gateway")
    # The port goes right after the unit.
    until(lab, "systemctl is-active fable-gateway.socket || true", "inactive")
    assert lab.on("dgx", f"curl -s localhost:{PORT}/health || echo refused") == "refused"
    assert instances(lab) == ["inactive", "inactive"]
    lab.on("dgx", "sudo systemctl start fable-gateway")
    wait_for_one_instance(lab)


def test_a_killed_instance_comes_back_and_nobody_is_refused_meanwhile(lab: DeployedLab) -> None:
    before = served_by(lab)
    asked = f"curl -s -m 30 localhost:{PORT}/health {STATUS}"
    assert (
        lab.on("dgx", f"sudo kill -9 {before}; for i in 1 2 3 4 5; do {asked}; done") == "200" * 5
    )
    assert served_by(lab) != before


def test_a_new_key_counts_without_a_restart(
    lab: DeployedLab, deploy_gateway: DeployGateway
) -> None:
    before = served_by(lab)
    key = "fable-key-of-a-newcomer"
    digests = {
        "lab": hashlib.sha256(lab.gateway_key.encode()).hexdigest(),
        "newcomer": {"sha256": hashlib.sha256(key.encode()).hexdigest(), "max_in_flight": 1},
    }
    done = deploy_gateway({"gateway.keys": digests})
    assert done.returncode == 0, done.stdout
    asked = f"curl -s -H 'x-api-key: {key}' localhost:{PORT}/v1/models {STATUS}"
    until(lab, asked, "200")
    lab.on("dgx", "sudo -u mavis /home/mavis/bin/fable_gateway.py keys revoke newcomer")
    until(lab, asked, "401")
    assert served_by(lab) == before


SERVE = f"/usr/bin/python3 -m http.server {PORT}"
AS_USER = "sudo -u mavis env XDG_RUNTIME_DIR=/run/user/$(id -u mavis)"


@pytest.fixture
def users_unit(lab: DeployedLab) -> Iterator[str]:
    """A unit of the service user's own systemd on the port: what prints its state."""
    lab.on("dgx", "sudo systemctl stop fable-gateway fable-gateway.socket")
    lab.on("dgx", "sudo systemctl start user@$(id -u mavis)")
    lab.on("dgx", f"{AS_USER} systemd-run --user -q --unit=my-gw {SERVE}")
    yield f"{AS_USER} systemctl --user is-active my-gw || true"
    lab.on("dgx", "sudo systemctl stop user@$(id -u mavis)")


def test_a_hand_made_gateway_is_named_and_taken_over_on_request_only(
    lab: DeployedLab, deploy_gateway: DeployGateway, users_unit: str
) -> None:
    until(lab, f"curl -s localhost:{PORT} {STATUS} || true", "200")
    refused = deploy_gateway({})
    assert refused.returncode == 1
    assert f"port {PORT} is held by my-gw.service of user mavis (process " in refused.stdout
    assert "gateway.take_over" in refused.stdout
    assert lab.on("dgx", users_unit) == "active"
    done = deploy_gateway({"gateway.take_over": True})
    assert done.returncode == 0, done.stdout
    assert lab.on("dgx", users_unit) == "inactive"
    assert sorted(instances(lab)) == ["active", "inactive"]
