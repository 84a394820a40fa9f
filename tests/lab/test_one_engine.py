"""Whatever happens, exactly one engine serves: kills, cuts and faults on a real systemd."""

from __future__ import annotations

import json
import random
import subprocess
import time
from collections.abc import Iterator

import pytest

from tests.lab.engine_lab import KILL_AT, EngineHost, engine_host
from tests.lab.lab_support import DeployedLab

pytestmark = pytest.mark.timeout(900)
STATE = "/var/lib/fable-engine/state.json"
STEPS = ("prepare", "drain and stop", "boot", "commit")


@pytest.fixture(scope="module")
def host(lab: DeployedLab) -> Iterator[EngineHost]:
    found = engine_host(lab)
    yield found
    lab.run("script/deploy")


@pytest.fixture(autouse=True)
def serves_one(host: EngineHost) -> Iterator[None]:
    """Every case begins and ends with release one: the next switch works, whatever was before."""
    yield
    code, said = host.switch(host.one, "--retry")
    assert code == 0, said
    assert host.check(host.one)


@pytest.mark.parametrize("step", [*STEPS, "roll back"])
def test_a_switch_unit_killed_at_any_step(host: EngineHost, step: str) -> None:
    name = host.faulty("fail-gate-7", drain_seconds=9) if step == "roll back" else host.two
    asked = ["enginectl", "switch", name, "--retry", f"--reason={step}"]
    assert host.python(KILL_AT, step, *asked).splitlines()[-1] == "7"
    committed = host.check(host.one, *[host.two] * (step == "commit"))
    told = [event for event in host.history() if event.get("reason") == step]
    assert [event["outcome"] for event in told] in (
        [["interrupted"]] if step != "prepare" else [[], ["interrupted"]]
    ) or committed == host.two


def test_a_cut_connection_changes_nothing_in_the_outcome(host: EngineHost) -> None:
    ssh = subprocess.Popen(
        ["ssh", "-F", host.lab.folder / "ssh_config", "-o", "ControlPath=none", "v100",
         f"sudo enginectl switch {host.two} --retry --reason cut-connection"],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    host.on("for i in $(seq 300); do test -e /run/fable-engine/trial && break; sleep .05; done")
    ssh.kill()
    ssh.wait()
    deadline = time.monotonic() + 60
    while host.status()["committed"] != host.two:
        assert time.monotonic() < deadline
        time.sleep(0.3)
    host.check(host.two)


def test_power_cuts_at_random_moments(host: EngineHost, cuts: int) -> None:
    """Also while the host comes up again; between two releases, both of which are good."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}, {cuts} cuts")
    dice = random.Random(seed)
    committed = host.one
    for number in range(cuts):
        wanted = host.two if committed == host.one else host.one
        moment = dice.uniform(0, 6)
        host.on(
            "sudo systemd-run --quiet --collect "
            f"enginectl switch {wanted} --retry --reason cut-{number}",
        )
        time.sleep(moment)
        host.lab.run("script/lab", "cut", "v100")
        host.lab.run("script/lab", "start", "v100")
        print(f"cut {number} after {moment:.3f} s", flush=True)
        committed = host.check(committed, wanted)


@pytest.mark.parametrize("gate", range(1, 12))
def test_each_gate_failing_alone(host: EngineHost, gate: int) -> None:
    """In a switch it rolls back; on an unattended start it serves, and says so loudly."""
    name = host.faulty(f"fail-gate-{gate}")
    code, said = host.switch(name)
    assert code == 5, said
    assert f"gate {gate} (" in said
    host.check(host.one)
    state = json.loads(host.on(f"cat {STATE}"))
    assert f"gate {gate} (" in state["rejected"][name]
    edit = f's/"committed": "[^"]*"/"committed": "{name}"/'
    host.on(f"sudo sed -i '{edit}' {STATE} && sudo systemctl restart fable-engine")
    code, said = host.ctl("status")
    assert code == 11, said
    assert f"DEGRADED  gate {gate} (" in said
    assert host.history()[-1]["outcome"] == "degraded"
    back = f's/"committed": "[^"]*"/"committed": "{host.one}"/'
    host.on(f"sudo sed -i '{back}' {STATE} && sudo systemctl restart fable-engine")


@pytest.mark.parametrize("fault", ["never-listen", "exit-after-boot", "die-in-warmup"])
def test_an_engine_without_an_answer_is_rolled_back_and_not_tried_again(
    host: EngineHost, fault: str
) -> None:
    name = host.faulty(fault, boot_deadline_seconds=4, cold_boot_deadline_seconds=4)
    code, said = host.switch(name)
    assert code == 5, said
    host.check(host.one)
    before = host.on("sudo wc -c </var/lib/fable-engine/history.jsonl")
    for _ in range(3):
        code, said = host.switch(name)
        assert (code, len(said.splitlines())) == (10, 1)
        assert "--retry" in said
    assert host.on("sudo wc -c </var/lib/fable-engine/history.jsonl") == before


def test_boots_without_an_answer_lead_to_the_release_before(host: EngineHost) -> None:
    bad = host.faulty(
        "never-listen", boot_deadline_seconds=2, cold_boot_deadline_seconds=2, failed_boots=1
    )
    state = {"committed": bad, "previous": host.one, "rejected": {}, "failed_boots": 0}
    text = json.dumps({"format": 1, **state})
    host.on(
        f"echo '{text}' | sudo tee {STATE} >/dev/null; sudo systemctl --no-block restart "
        "fable-engine",
    )
    host.check(host.one)
    assert [event["outcome"] for event in host.history()[-2:]] == ["no answer", "serves"]
    found = json.loads(host.on(f"cat {STATE}"))
    assert (found["previous"], list(found["rejected"]), found["failed_boots"]) == (bad, [bad], 0)


def test_the_release_from_before_fails_too(host: EngineHost) -> None:
    """Rollback failed is said, and the committed release is tried until it answers."""
    flag = "/mnt/data/one-fails"  # the unit has a /var/tmp of its own
    fragile = host.release(
        env={"LAB_ENGINE_FAULTS": flag, "MARK": "fragile"},
        boot_deadline_seconds=3,
        cold_boot_deadline_seconds=3,
    )
    host.on(f"sudo rm -f {flag}")
    assert host.switch(fragile)[0] == 0
    host.on(f"""echo '["exit-after-boot"]' | sudo tee {flag}""")
    code, said = host.switch(host.faulty("exit-after-boot"), "--retry")
    assert code == 6, said
    code, said = host.ctl("status")
    assert code == 1
    assert "boots in a row gave no answer" in said
    host.on(f"sudo rm {flag}")
    host.check(fragile, host.one)


def test_an_engine_that_ignores_its_end_and_leaves_a_worker(host: EngineHost) -> None:
    drop_in = "/run/systemd/system/fable-engine.service.d"
    host.on(
        f"sudo mkdir -p {drop_in} && printf '[Service]\\nTimeoutStopSec=2\\n' | "
        f"sudo tee {drop_in}/stop.conf >/dev/null && sudo systemctl daemon-reload",
    )
    try:
        stubborn = host.faulty("hang-on-sigterm,orphan-worker")
        assert host.switch(stubborn)[0] == 0
        assert host.switch(host.two)[0] == 0
        host.check(host.two)
        shown = host.ctl("status")[1]
        assert "its text has changed" not in shown
    finally:
        host.on(f"sudo rm -r {drop_in} && sudo systemctl daemon-reload")
    assert "its text has changed; takes effect with the next start" in host.ctl("status")[1]


def test_a_stranger_on_a_card_is_named_before_anything_stops(host: EngineHost) -> None:
    """And an unattended start waits for the cards rather than boot onto occupied ones."""
    program = (
        "import json, os, pathlib, time\n"
        "pid = os.getpid()\n"
        "ticks = int(pathlib.Path('/proc/self/stat').read_text().rpartition(')')[2].split()[19])\n"
        "holder = {'pid': pid, 'start_ticks': ticks, 'gpu': 2, 'mib': 9000, 'user': 'root'}\n"
        "pathlib.Path(f'/run/lab-gpu/holder-{pid}.json').write_text(json.dumps(holder))\n"
        "time.sleep(600)\n"
    )
    before = host.status()["unit"]
    host.on(f"cat >/tmp/hog.py <<'END'\n{program}END\n")
    host.on("sudo systemd-run -q --collect --unit=hog python3 /tmp/hog.py; sleep 1")
    try:
        code, said = host.switch(host.two)
        assert code == 3, said
        assert "(root, /usr/bin/python3 /tmp/hog.py) holds 9000 MiB of card 2" in said
        assert host.status()["unit"] == before
        host.on("sudo systemctl --no-block restart fable-engine; sleep 3")
        assert host.ctl("status")[0] == 1
    finally:
        host.on("sudo systemctl stop hog")
    host.check(host.one)


def test_an_orphan_of_an_engine_is_ended_at_the_next_start(host: EngineHost) -> None:
    """A worker that got out of the unit's control group holds a card."""
    python = host.on(f"sudo sh -c 'cat /proc/{main_pid(host)}/cmdline' | tr '\\0' '\\n'")
    worker = (
        f"{python.splitlines()[0]} -c \"import sys; sys.path.append('lab'); "
        "from engine_standin.processes import register; from pathlib import Path; import time; "
        "register(Path('/run/lab-gpu'), 1, 9000); time.sleep(600)\""
    )
    host.on(f"sudo systemd-run -q --collect --unit=orphan --uid=mavis {worker}; sleep 1")
    host.on("sudo systemctl restart fable-engine")
    host.check(host.one)
    assert host.on("systemctl is-active orphan || true") != "active"


@pytest.mark.parametrize("content", ["", '{"format": 1, "comm'])
def test_a_truncated_state_is_set_right_and_says_so(host: EngineHost, content: str) -> None:
    host.on(f"sudo sh -c {json.dumps(f'echo -n {content!r} >{STATE}')}")
    assert "is damaged" in host.ctl("status")[1]
    host.lab.run("script/lab", "cut", "v100")
    host.lab.run("script/lab", "start", "v100")
    host.served()
    host.on("sudo systemctl start fable-settle")
    host.check(host.one)
    assert "set right" in host.history()[-1].get("action", "") + host.history()[-2].get(
        "action", ""
    )


def test_rollback_and_drain(host: EngineHost) -> None:
    assert host.switch(host.two, "--retry")[0] == 0
    code, said = host.ctl("rollback", "--reason=worse")
    assert code == 0, said
    host.check(host.one)
    assert host.switch(host.two)[0] == 10
    assert host.ctl("drain", "--reason=fans")[0] == 0
    host.on("sudo systemctl start fable-settle")
    assert "held down by" in host.ctl("status")[1]
    code, said = host.ctl("settle")
    assert code == 0, said
    host.check(host.one)


def main_pid(host: EngineHost) -> int:
    return int(host.status()["unit"]["main_pid"])
