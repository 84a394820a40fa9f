"""A change of one setting: served when it passes the gates, undone by itself when it does not."""

from __future__ import annotations

import json
from collections.abc import Callable
from subprocess import CompletedProcess

import pytest

from tests.lab.lab_support import DeployedLab

pytestmark = pytest.mark.timeout(900)
Deploy = Callable[[dict[str, object]], CompletedProcess[str]]


def test_another_depth_is_switched_to(lab: DeployedLab, deploy_with: Deploy) -> None:
    before = lab.status()["committed"]
    done = deploy_with({"engine.num_speculative_tokens": 3})
    assert done.returncode == 0, done.stdout
    status = lab.status()
    assert status["committed"] != before
    assert status["previous"] == before
    assert status["running"]["mtp_depth"] == 3  # type: ignore[index]


@pytest.mark.parametrize("gate", [3])
def test_a_failing_gate_rolls_back(lab: DeployedLab, deploy_with: Deploy, gate: int) -> None:
    lab.run("script/deploy")
    before = lab.status()
    environment = settings_environment()
    faulty: dict[str, object] = {
        "engine.environment": {**environment, "LAB_ENGINE_FAULTS": f"fail-gate-{gate}"}
    }
    done = deploy_with(faulty)
    assert done.returncode == 1, done.stdout
    assert "Traceback" not in done.stdout
    assert f"gate {gate} " in done.stdout
    after = lab.status()
    assert after["committed"] == before["committed"]
    assert after["healthy"] is True
    assert after["trial"] is None
    again = deploy_with(faulty)
    assert again.returncode == 1
    assert "was rejected" in again.stdout
    assert lab.status() == after


def test_an_engine_that_never_listens_rolls_back(lab: DeployedLab, deploy_with: Deploy) -> None:
    lab.run("script/deploy")
    before = lab.status()["committed"]
    faulty = {**settings_environment(), "LAB_ENGINE_FAULTS": "never-listen"}
    done = deploy_with(
        {
            "engine.environment": faulty,
            "engine.boot_deadline_seconds": 8,
            "engine.cold_boot_deadline_seconds": 8,
        }
    )
    assert done.returncode == 1, done.stdout
    after = lab.status()
    assert (after["committed"], after["healthy"]) == (before, True)
    history = lab.on("v100", "sudo tail -n 1 /var/lib/fable-engine/history.jsonl")
    event = json.loads(history)
    assert (event["event"], event["outcome"]) == ("switch ended", "rolled back")


def test_power_cut_during_a_switch_leaves_the_committed_release(
    lab: DeployedLab, deploy_with: Deploy
) -> None:
    lab.run("script/deploy")
    before = lab.status()["committed"]
    slow = {**settings_environment(), "LAB_ENGINE_FAULTS": "never-listen"}
    deploy_with(
        {
            "engine.environment": slow,
            "engine.boot_deadline_seconds": 1,
            "engine.cold_boot_deadline_seconds": 1,
        }
    )
    name = lab.on("v100", "sudo ls -t /var/lib/fable-engine/releases | head -1")
    lab.on(
        "v100",
        f"sudo systemd-run --quiet --unit=lab-switch enginectl switch {name} --retry "
        "--reason power-cut",
    )
    lab.on(
        "v100", "for i in $(seq 100); do test -e /run/fable-engine/trial && break; sleep .05; done"
    )
    lab.run("script/lab", "cut", "v100")
    lab.run("script/lab", "start", "v100")
    lab.wait_for_engine()
    after = lab.status()
    assert (after["committed"], after["trial"], after["healthy"]) == (before, None, True)


def test_a_wrong_setting_is_refused_before_anything_changes(
    lab: DeployedLab, deploy_with: Deploy
) -> None:
    before = lab.status()
    done = deploy_with({"engine.num_speculative_tokens": 16})
    assert done.returncode != 0
    assert "engine.num_speculative_tokens" in done.stdout
    assert "Traceback" not in done.stdout
    assert lab.status() == before


def test_left_as_found(lab: DeployedLab) -> None:
    lab.run("script/deploy")
    lab.run("script/verify", "-q")


def settings_environment() -> dict[str, str]:
    """The engine's environment in the settings, to be extended by a fault."""
    import runpy

    engine = runpy.run_path("group_data/v100.py")["engine"]
    environment: dict[str, str] = engine["environment"]
    return environment
