"""From nothing to two hosts that serve, and back after a reboot and a power cut."""

from __future__ import annotations

import json
import re
import subprocess

import openai
import pytest

from tests.lab.lab_support import REPOSITORY, DeployedLab

pytestmark = pytest.mark.timeout(900)
NAMES = ("qwen38-27b", "qwen3.8-27b", "fable-27b")


def client(lab: DeployedLab, key: str | None = None) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=f"http://127.0.0.1:{lab.port('gateway')}/v1",
        api_key=key or lab.gateway_key,
        timeout=120,
        max_retries=0,
    )


def test_printed_curl_line_works(lab: DeployedLab) -> None:
    line = re.search(r"^try +(curl .*)$", lab.first_deploy, re.MULTILINE)
    assert line is not None, lab.first_deploy
    answer = subprocess.run(
        ["bash", "-c", line.group(1)], capture_output=True, text=True, timeout=120, check=True
    )
    assert '"choices"' in answer.stdout


def test_first_deploy_says_what_was_proved(lab: DeployedLab) -> None:
    assert "ok   header origin:" in lab.first_deploy
    assert "compiles for sm_70" in lab.first_deploy
    assert re.search(r"11 pass +QPN8 dispatched", lab.first_deploy)


def test_second_deploy_changes_nothing_and_says_so(lab: DeployedLab) -> None:
    before = lab.status()["unit"]
    again = lab.run("script/deploy").stdout
    assert "no changes" in again
    assert "Starting operation" not in again
    assert lab.status()["unit"] == before


def test_plain_pyinfra_works_and_has_nothing_to_change(lab: DeployedLab) -> None:
    done = lab.run(".venv/bin/pyinfra", "-y", "inventory/lab.py", "deploy.py").stdout
    totals = re.search(r"Grand total +(\d+) +(\S+) +(\S+) +(\d+)", done)
    assert totals is not None, done
    operations, success, errors, unchanged = totals.groups()
    assert (success, errors) == ("-", "-"), done
    assert operations == unchanged


def test_state_is_as_the_settings_want_it(lab: DeployedLab) -> None:
    verified = lab.run("script/verify", "-q").stdout
    assert re.search(r"^\d\d passed", verified, re.MULTILINE), verified


@pytest.mark.parametrize("name", NAMES)
def test_official_client_talks_through_the_gateway(lab: DeployedLab, name: str) -> None:
    answer = client(lab).chat.completions.create(
        model=name, messages=[{"role": "user", "content": "Tell a tale."}], max_tokens=200
    )
    assert answer.model == NAMES[0], "the engine answers under its first name"
    assert answer.choices[0].message.content
    assert answer.usage is not None
    assert answer.usage.completion_tokens > 0


def test_official_client_streams_through_the_gateway(lab: DeployedLab) -> None:
    stream = client(lab).chat.completions.create(
        model=NAMES[0],
        messages=[{"role": "user", "content": "Tell a long tale."}],
        max_tokens=96,
        stream=True,
        stream_options={"include_usage": True},
    )
    events = list(stream)
    with_tokens = [
        e for e in events if e.choices and e.choices[0].delta.model_dump(exclude_none=True)
    ]
    usage = events[-1].usage
    assert usage is not None
    assert usage.completion_tokens > len(with_tokens), "one event carries several tokens"
    assert [e.choices[0].finish_reason for e in events if e.choices][-1]


def test_completions_go_through_the_gateway(lab: DeployedLab) -> None:
    answer = client(lab).completions.create(model=NAMES[0], prompt="Once", max_tokens=16)
    assert answer.choices[0].text


def test_a_wrong_key_is_refused(lab: DeployedLab) -> None:
    with pytest.raises(openai.AuthenticationError):
        client(lab, key="wrong").models.list()


def test_engine_comes_back_by_itself_after_a_reboot(lab: DeployedLab) -> None:
    before = lab.status()
    lab.run("script/lab", "reboot", "v100")
    lab.wait_for_engine()
    after = lab.status()
    assert after["unit"]["invocation"] != before["unit"]["invocation"]  # type: ignore[index]
    assert after["committed"] == before["committed"]
    assert lab.on("v100", "uptime -p"), "the host answers"
    lab.run("script/verify", "-q")


def test_engine_waited_for_the_late_disk_and_the_late_address(lab: DeployedLab) -> None:
    """By systemd's own clock, and without a single failed start."""
    lab.run("script/lab", "reboot", "v100")
    lab.wait_for_engine()

    def clock(unit: str, property_: str) -> int:
        return int(lab.on("v100", f"systemctl show -P {property_}TimestampMonotonic {unit}"))

    started = clock("fable-engine.service", "ExecMainStart")
    address = clock("lab-tailnet.service", "ActiveEnter")
    lines = lab.on("v100", "sudo journalctl -b -u fable-engine -o json --no-pager").splitlines()
    entries = [json.loads(line) for line in lines]
    listening = [
        int(entry["__MONOTONIC_TIMESTAMP"])
        for entry in entries
        if "Application startup complete" in str(entry["MESSAGE"])
    ]
    assert clock("mnt-data.mount", "ActiveEnter") <= started
    assert len(listening) == 1
    assert address <= listening[0]
    assert lab.on("v100", "systemctl show -P NRestarts fable-engine") == "0"


def test_engine_comes_back_by_itself_after_a_power_cut(lab: DeployedLab) -> None:
    lab.run("script/lab", "cut", "v100")
    lab.run("script/lab", "start", "v100")
    lab.wait_for_engine()
    lab.run("script/verify", "-q")


def test_both_hosts_come_back_after_a_power_cut_of_both(lab: DeployedLab) -> None:
    for verb in ("cut", "start"):
        for host in ("v100", "dgx"):
            lab.run("script/lab", verb, host)
    lab.wait_for_engine()
    answer = client(lab).completions.create(model=NAMES[0], prompt="Once", max_tokens=8)
    assert answer.choices[0].text


def test_engine_killed_is_started_again(lab: DeployedLab) -> None:
    pid = lab.status()["unit"]["main_pid"]  # type: ignore[index]
    lab.on("v100", f"sudo kill -9 {pid}")
    lab.wait_for_engine()
    unit = lab.status()["unit"]
    assert unit["main_pid"] != pid  # type: ignore[index]
    assert unit["restarts"] >= 1  # type: ignore[index]


def test_no_machine_path_reaches_the_hosts(lab: DeployedLab) -> None:
    found = lab.on(
        "v100",
        f"sudo grep -rl {REPOSITORY} /etc/fable-engine /var/lib/fable-engine "
        "/usr/local/lib/fable || true",
    )
    assert found == ""
