"""What somebody changed behind the deploy's back is seen, and set right or refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from subprocess import CompletedProcess

import pytest

from tests.lab.lab_support import DeployedLab

pytestmark = pytest.mark.timeout(600)
Deploy = Callable[[dict[str, object]], CompletedProcess[str]]
STRANGER = (
    "curl -s -m 5 -o /dev/null -w '%{http_code}' --interface 198.19.77.13 "
    "http://198.19.77.21:8601/health || true"
)


@pytest.fixture(autouse=True)
def whole(lab: DeployedLab) -> Iterator[None]:
    """Every case ends with both hosts as the settings want them."""
    yield
    assert lab.run("script/deploy").returncode == 0
    lab.run("script/verify", "-q")


@pytest.mark.parametrize(
    "command",
    [
        "nft flush ruleset",
        "nft delete table inet fable_engine",
        "nft add element inet fable_engine consumers4 '{ 198.19.77.13 }' && "
        "systemctl restart fable-firewall",
        "systemctl stop fable-firewall",
    ],
)
def test_a_lost_packet_filter_is_loaded_again(lab: DeployedLab, command: str) -> None:
    lab.on("v100", f"sudo sh -c {json.dumps(command)}")
    lab.run("script/deploy")
    assert lab.on("dgx", STRANGER) == "000"


@pytest.mark.parametrize("verb", ["start", "restart", "stop", "reload-or-restart"])
def test_the_distributions_own_filter_does_not_open_the_port(lab: DeployedLab, verb: str) -> None:
    lab.on("v100", f"sudo systemctl {verb} nftables")
    assert lab.on("dgx", STRANGER) == "000"
    lab.on("v100", "sudo systemctl stop nftables")
    assert lab.on("dgx", STRANGER) == "000"


def test_an_engine_started_after_a_flush_loads_its_filter_itself(lab: DeployedLab) -> None:
    lab.on("v100", "sudo nft flush ruleset && sudo systemctl restart fable-engine")
    lab.wait_for_engine()
    assert lab.on("dgx", STRANGER) == "000"


def test_a_stopped_gateway_and_a_stopped_engine_come_back(lab: DeployedLab) -> None:
    lab.on("v100", "sudo systemctl stop fable-engine")
    lab.on("dgx", "sudo systemctl stop fable-gateway")
    lab.run("script/deploy")
    assert lab.status()["serving"] is True


def test_a_gateway_with_an_older_config_is_restarted(lab: DeployedLab) -> None:
    """As after a run that was cut off between writing the file and the restart."""
    path = "/etc/fable-gateway/config.json"
    lab.on("dgx", f"sudo cp -p {path} /var/tmp/whole.json")
    edit = 's/"deployment": "[0-9a-f]*"/"deployment": "old"/'
    lab.on("dgx", f"sudo sed -i '{edit}' {path} && sudo systemctl restart fable-gateway")
    lab.on("dgx", f"sudo cp -p /var/tmp/whole.json {path}")
    shown = lab.run("script/deploy").stdout
    assert "Gateway: runs this deployment" in shown
    health = json.loads(lab.on("dgx", "curl -s http://127.0.0.1:18777/health"))
    assert health["deployment"] != "old"


def test_an_engine_with_other_arguments_is_replaced(lab: DeployedLab, deploy_with: Deploy) -> None:
    """A switch that was killed after the boot leaves its candidate serving."""
    wanted = lab.status()["committed"]
    assert deploy_with({"engine.max_num_seqs": 1}).returncode == 0
    state = "/var/lib/fable-engine/state.json"
    edit = f's/"committed": "[^"]*"/"committed": "{wanted}"/'
    lab.on("v100", f"sudo sed -i '{edit}' {state}")
    status = lab.status()
    assert status["committed"] == wanted
    lab.run("script/deploy")  # or settle, whichever comes first
    lab.wait_for_engine()
    assert lab.status()["running"]["max_num_seqs"] == 2  # type: ignore[index]


def test_a_server_that_is_not_the_units_is_not_taken_for_the_engine(lab: DeployedLab) -> None:
    """The nohup server of old: it answers, and the unit does not run."""
    lab.on("v100", "sudo enginectl drain --reason nohup")
    program = (
        "import http.server as h; "
        "h.HTTPServer(('198.19.77.21', 8601), h.SimpleHTTPRequestHandler).serve_forever()"
    )
    lab.on(
        "v100",
        "mkdir -p /tmp/s && touch /tmp/s/health && cd /tmp/s && "
        f'sudo systemd-run -q --unit=stranger --working-directory=/tmp/s python3 -c "{program}"',
    )
    wait = (
        "for i in $(seq 50); do curl -sf http://198.19.77.21:8601/health && break; sleep .1; done"
    )
    try:
        lab.on("v100", wait)
        status = lab.status()
        assert (status["healthy"], status["serving"]) == (True, False)
        refused = lab.run("script/deploy", check=False)
        assert refused.returncode == 1
        assert "listens on 198.19.77.21:8601" in refused.stdout
    finally:
        lab.on("v100", "sudo systemctl stop stranger && sudo enginectl settle")


def test_a_damaged_venv_is_built_again(lab: DeployedLab) -> None:
    lab.on("v100", "sudo sh -c 'rm -r /mnt/data/nvfp4/venvs/*/lib/python3*/site-packages/aiohttp'")
    lab.run("script/deploy")
    lab.on("v100", "sudo systemctl restart fable-engine")
    lab.wait_for_engine()


def test_without_its_data_disk_nothing_is_written(lab: DeployedLab) -> None:
    lab.on("v100", "sudo enginectl drain --reason disk && sudo umount /mnt/data")
    try:
        refused = lab.run("script/deploy", check=False)
    finally:
        seen = lab.on("v100", "ls -A /mnt/data")
        lab.on("v100", "sudo systemctl start mnt-data.mount && sudo enginectl settle")
    assert refused.returncode == 1
    assert "/mnt/data is not mounted" in refused.stdout
    assert "Traceback" not in refused.stdout
    assert seen == ""


def test_a_gateway_made_by_hand_is_never_overwritten_unawares(lab: DeployedLab) -> None:
    place = "/home/mavis/bin/fable_gateway.py"
    lab.on("dgx", f"echo '# written by hand' | sudo -u mavis tee {place}")
    refused = lab.run("script/deploy", check=False)
    assert refused.returncode == 1
    assert f"{place}: stands there and was not laid down by a deploy" in refused.stdout
    assert "gateway.take_over" in refused.stdout
    assert lab.on("dgx", f"sudo cat {place}") == "# written by hand"
    lab.on("dgx", f"sudo rm {place}")


@pytest.mark.parametrize("limit", ["nosuch", "v1oo"])
def test_a_limit_that_means_nobody_is_refused(lab: DeployedLab, limit: str) -> None:
    refused = lab.run("script/deploy", "--limit", limit, check=False)
    assert refused.returncode == 2
    assert f"--limit {limit}" in refused.stdout
