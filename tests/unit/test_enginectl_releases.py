"""What there is, what changes from one release to another, and what may go."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from enginectl import releases, timing
from enginectl.paths import Places
from enginectl.state import State
from hypothesis import given
from hypothesis import strategies as st

from stack import memory
from stack.settings import Engine
from tests.unit.enginectl_support import commit, content, install, lay_down, named

NAMES = [f"skinny-{number:016x}" for number in range(12)]
OLD_STACK = [f"iq4xs-{number:016x}" for number in range(3)]


def other_depth(value: dict[str, Any], depth: int) -> dict[str, Any]:
    """The same release with another k, as the settings would render it."""
    argv = [
        word.replace('tokens":7', f'tokens":{depth}') if word.startswith("{") else word
        for word in value["argv"]
    ]
    return named({**value, "argv": argv, "gates": {**value["gates"], "mtp_depth": depth}})


def test_a_change_is_told_in_the_operators_words(tmp_path: Path) -> None:
    base = content(tmp_path / "parts")
    one = lay_down(tmp_path, base)
    two = other_depth(base, 3)
    two["argv"][two["argv"].index("2")] = "4"
    two["argv"] = [word.replace("=0.50", "=0.85") for word in two["argv"]] + ["--enforce-eager"]
    two["env"] = {"PATH": "/usr/bin:/bin", "VLLM_NEW": "1"}
    two = named(two)
    other = lay_down(tmp_path, two)
    assert releases.diff(Places(tmp_path), one, other) == [
        "MNS 2 → 4",
        "GMU 0.50 → 0.85",
        "k 7 → 3",
        "env.COLOUR: gone, was grün",
        "gates.mtp_depth 7 → 3",
        "--enforce-eager: new, set",
        "env.VLLM_NEW: new, 1",
    ]
    assert releases.diff(Places(tmp_path), one, one) == []


def test_diff_and_list_as_commands(tmp_path: Path) -> None:
    program = install(tmp_path / "lib")
    base = content(tmp_path / "parts")
    one, two = lay_down(tmp_path, base), lay_down(tmp_path, other_depth(base, 3))
    commit(tmp_path, two, one, rejected={one: "gate 7"})
    (tmp_path / "var/lib/fable-engine/releases" / one / "release.json").write_text("{")

    def ctl(*words: str) -> subprocess.CompletedProcess[str]:
        command = [str(program), *words, "--root", str(tmp_path)]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    listed = {entry["name"]: entry for entry in json.loads(ctl("releases", "--json").stdout)}
    assert (listed[two]["committed"], listed[two]["problem"]) == (True, None)
    assert (listed[one]["previous"], listed[one]["rejected"]) == (True, "gate 7")
    assert "JSON" in listed[one]["problem"]
    refused = ctl("diff", one, two)
    assert (refused.returncode, refused.stderr.count("\n")) == (1, 1)
    assert ctl("history").stdout == "nothing has happened yet\n"


@given(
    order=st.permutations(NAMES + OLD_STACK),
    committed=st.sampled_from(NAMES),
    previous=st.none() | st.sampled_from(NAMES + OLD_STACK),
    trial=st.none() | st.sampled_from(NAMES),
    kept=st.integers(1, 20),
)
def test_nothing_that_is_needed_is_ever_collected(
    order: list[str], committed: str, previous: str | None, trial: str | None, kept: int
) -> None:
    gone = releases.removable(order, State(committed, previous), trial, kept)
    assert not {committed, previous, trial} & set(gone)
    assert not {*OLD_STACK} & set(gone)
    assert not {*order[-kept:]} & set(gone)
    assert len(order) - len(gone) <= kept + 3 + len(OLD_STACK)


def test_collected_releases_are_gone_and_the_rest_is_whole(tmp_path: Path) -> None:
    base = content(tmp_path / "parts")
    names = [lay_down(tmp_path, other_depth(base, depth)) for depth in range(6)]
    commit(tmp_path, names[0], names[1])
    left_by_a_kill = tmp_path / "var/lib/fable-engine/releases/.gone.x"
    left_by_a_kill.mkdir()
    assert sorted(releases.collect(Places(tmp_path), 2)) == sorted(names[2:4])
    found = subprocess.run(
        ["ls", "-A", left_by_a_kill.parent], capture_output=True, text=True, check=True
    )
    assert sorted(found.stdout.split()) == sorted([*names[:2], *names[4:]])


ENGINE: dict[str, Any] = {
    "gpu_memory_utilization": 0.50,
    "max_num_batched_tokens": 4096,
    "max_num_seqs": 2,
    "max_model_len": 135168,
    "tensor_parallel_size": 4,
}


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({}, "fits"),
        ({"gpu_memory_utilization": 0.40}, "short"),
        ({"gpu_memory_utilization": 0.40, "max_model_len": 32768}, "fits"),
        ({"max_num_seqs": 3}, "short"),
        ({"max_num_batched_tokens": 32768}, "short"),
        ({"max_num_batched_tokens": 32768, "max_num_seqs": 1}, "fits"),
        ({"max_num_batched_tokens": 131072}, "unsure"),
        ({"gpu_memory_utilization": 0.85}, "unsure"),
        ({"tensor_parallel_size": 2}, "unsure"),
    ],
)
def test_the_memory_verdict_agrees_with_what_was_measured(
    changes: dict[str, Any], verdict: str
) -> None:
    engine = Engine.model_construct(None, **{**ENGINE, **changes})
    assert memory.verdict(engine)["verdict"] == verdict


def test_pools_that_were_measured_come_out_as_measured() -> None:
    def pool(**changes: Any) -> int:
        return memory.expected_pool(Engine.model_construct(None, **{**ENGINE, **changes}))

    assert (pool(), pool(gpu_memory_utilization=0.40)) == (351_436, 126_670)
    assert pool() - pool(max_num_batched_tokens=32768) == 332_000 - 183_000
    assert pool(max_num_batched_tokens=131_072) == 0, "no room for a cache: it does not boot"


def test_times_fit_into_each_other() -> None:
    assert timing.LONGEST_DRAIN_SECONDS < timing.STOP_SECONDS < timing.STOPPED_SECONDS
