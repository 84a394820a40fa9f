"""The nvidia-smi stand-in: four cards, who holds their memory, and settings until a reload."""

from __future__ import annotations

import csv
import json
import os
import subprocess
from pathlib import Path

import pytest
from engine_standin.processes import cards_occupied

from tests.unit.standin_support import NVIDIA_SMI, cards_used, nvidia_smi


def hold(state: Path, pid: int, gpu: int, mib: int, *, shift: int = 0) -> None:
    """Register a process, by the start time in /proc plus `shift` ticks."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    entry = {"pid": pid, "start_ticks": int(fields[19]) + shift, "gpu": gpu, "mib": mib}
    state.mkdir(exist_ok=True)
    (state / f"holder-{pid}.json").write_text(json.dumps(entry | {"user": "mavis"}))


def rows(state: Path, *arguments: str) -> list[list[str]]:
    answer = nvidia_smi(state, *arguments)
    assert answer.returncode == 0, answer.stdout
    return [[cell.strip() for cell in row] for row in csv.reader(answer.stdout.splitlines())]


def test_list(tmp_path: Path) -> None:
    lines = nvidia_smi(tmp_path, "-L").stdout.splitlines()
    assert [line.split(" (UUID: GPU-")[0] for line in lines] == [
        f"GPU {index}: Tesla V100-SXM2-32GB" for index in range(4)
    ]
    assert len(set(lines)) == 4


def test_every_field_with_header_and_units(tmp_path: Path) -> None:
    fields = (
        "index,name,memory.used,memory.total,compute_cap,driver_version,ecc.mode.current,"
        "persistence_mode,clocks.applications.graphics,clocks.applications.memory,power.limit,"
        "temperature.gpu,power.draw,utilization.gpu,uuid"
    )
    header, *cards = rows(tmp_path, f"--query-gpu={fields}", "--format=csv")
    assert header[2:4] == ["memory.used [MiB]", "memory.total [MiB]"]
    assert [name.split(" [")[0] for name in header] == fields.split(",")
    assert len(cards) == 4
    assert cards[2][:5] == ["2", "Tesla V100-SXM2-32GB", "0 MiB", "32768 MiB", "7.0"]
    bare = rows(tmp_path, "--query-gpu=memory.total,index", "--format=csv,noheader,nounits")
    assert bare == [["32768", str(index)] for index in range(4)]


def test_only_the_registered_live_process_counts(tmp_path: Path) -> None:
    with subprocess.Popen(["/bin/sleep", "60"]) as sleeper:
        hold(tmp_path, sleeper.pid, 1, 17613)
        hold(tmp_path, os.getpid(), 1, 100)
        assert cards_used(tmp_path) == [0, 17713, 0, 0]
        query = ["--query-compute-apps=pid,used_memory,gpu_uuid,process_name"]
        apps = rows(tmp_path, *query, "--format=csv,noheader,nounits")
        assert {tuple(app[:2]) for app in apps} == {
            (str(sleeper.pid), "17613"),
            (str(os.getpid()), "100"),
        }
        (sleeping,) = (app for app in apps if app[0] == str(sleeper.pid))
        assert sleeping[3] == os.path.realpath("/bin/sleep")
        assert str(sleeper.pid) in nvidia_smi(tmp_path).stdout
        sleeper.kill()
        os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)
        assert cards_used(tmp_path) == [0, 100, 0, 0]  # a zombie holds nothing
    assert cards_used(tmp_path) == [0, 100, 0, 0]
    hold(tmp_path, os.getpid(), 1, 100, shift=-1)  # an earlier process of the same pid
    assert cards_used(tmp_path) == [0, 0, 0, 0]
    assert nvidia_smi(tmp_path, *query, "--format=csv,noheader").stdout == ""


def test_damaged_entry_is_named_and_ignored(tmp_path: Path) -> None:
    (tmp_path / "holder-1.json").write_text("{")
    answer = nvidia_smi(tmp_path, "--query-gpu=memory.used", "--format=csv,noheader,nounits")
    assert answer.stdout.split() == ["0"] * 4
    assert "holder-1.json" in answer.stderr


def test_settings_last_until_the_driver_reloads(tmp_path: Path) -> None:
    state = tmp_path / "gpu"
    fields = (
        "--query-gpu=persistence_mode,power.limit,clocks.applications.memory,"
        "clocks.applications.graphics"
    )
    layout = "--format=csv,noheader,nounits"
    fresh = rows(state, fields, layout)
    assert fresh == [["Disabled", "300.00", "877", "1290"]] * 4
    for change in (["-pm", "1"], ["-pl", "250"], ["-i", "0,2", "-ac", "877,1530"]):
        assert nvidia_smi(state, *change).returncode == 0
    fast, slow = (["Enabled", "250.00", "877", clock] for clock in ("1530", "1290"))
    assert rows(state, fields, layout) == [fast, slow, fast, slow]
    assert state.stat().st_mode & 0o7777 == 0o1777  # the engine's user registers here too
    (state / "cards.json").unlink()
    assert rows(state, fields, layout) == fresh


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--frobnicate"], 2),
        (["--query-g=index", "--format=csv"], 2),  # an abbreviation
        (["--query-gpu=index"], 2),  # no format
        (["--query-gpu=index,speed", "--format=csv"], 2),
        (["--query-gpu=index", "--format=xml"], 2),
        (["--query-gpu=index", "--format=csv,nohead"], 2),
        (["-pl", "100"], 2),
        (["-pl", "much"], 2),
        (["-pm", "2"], 2),
        (["-ac", "877,2000"], 2),
        (["-ac", "900,1530"], 2),
        (["-L", "-pm", "1"], 2),
        (["-i", "4", "-L"], 6),
    ],
)
def test_wrong_arguments_change_nothing(tmp_path: Path, arguments: list[str], code: int) -> None:
    answer = nvidia_smi(tmp_path, *arguments)
    assert answer.returncode == code
    assert answer.stdout
    assert "Traceback" not in answer.stderr
    assert list(tmp_path.iterdir()) == []


def test_engine_notices_occupied_cards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    program = tools / "nvidia-smi"
    program.write_text(NVIDIA_SMI.read_text())
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:/usr/bin:/bin")
    monkeypatch.setenv("LAB_GPU_STATE", str(tmp_path / "gpu"))
    hold(tmp_path / "gpu", os.getpid(), 1, 199)
    assert not cards_occupied([0, 1])
    hold(tmp_path / "gpu", os.getpid(), 1, 200)
    assert cards_occupied([0, 1])
    assert not cards_occupied([0, 2])
