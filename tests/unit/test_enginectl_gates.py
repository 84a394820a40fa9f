"""The gates on a log written in the engine's formats: each fails alone, and knows its limits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from enginectl.bootlog import GAP
from enginectl.gates import Gate, evaluate, observe
from enginectl.release import GateSettings
from enginectl.server import Chat, judge_chat
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.enginectl_support import census_line, good_log, prefix

SETTINGS = GateSettings(
    mtp_depth=7, tensor_parallel=4, census_modules_per_rank=128, vocab_rows=248320
)
WARM = Chat(True, 48, "48 tokens")
FIRST_CENSUS = 3


def gates(
    lines: list[str], settings: GateSettings = SETTINGS, warm: Chat | None = WARM
) -> dict[int, Gate]:
    found = evaluate(observe(lines, settings), settings, warm)
    assert [gate.number for gate in found] == list(range(1, 12))
    return {gate.number: gate for gate in found}


def verdicts(
    lines: list[str], settings: GateSettings = SETTINGS, warm: Chat | None = WARM
) -> dict[int, str]:
    """Only what is not a pass."""
    found = gates(lines, settings, warm).items()
    return {number: gate.verdict for number, gate in found if gate.verdict != "pass"}


def without(part: str) -> list[str]:
    return [line for line in good_log() if part not in line]


def replaced(part: str, by: str) -> list[str]:
    lines = [line.replace(part, by) for line in good_log()]
    assert lines != good_log()
    return lines


def test_a_good_boot_passes_all_with_evidence() -> None:
    lines = good_log()
    assert sum("eligible=YES" in line for line in lines) == 512
    found = gates(lines)
    assert verdicts(lines) == {}
    for number in (2, 3, 5, 6, 8, 9, 10, 11):
        evidence = found[number].evidence
        assert evidence is not None
        assert lines[evidence.line - 1].startswith(evidence.text[:40])


def test_the_miniature_passes_with_its_own_count() -> None:
    settings = GateSettings(7, 4, 8, 248320)
    assert verdicts(good_log(layers=4), settings) == {}
    assert verdicts(good_log(layers=4)) == {10: "fail"}


ALONE: dict[int, Callable[[], list[str]]] = {
    2: lambda: ["(APIServer pid=1) num_speculative_tokens=3", *good_log()],
    3: lambda: [
        *replaced("N=62080 K=5120 -> qpn2", "N=62080 K=5120 -> marlin"),
        f"{prefix(0)}Skinny route map: M=8 N=4096 K=5120 -> qpn2",
    ],
    4: lambda: [*good_log(), f"{prefix(2)}lm_head: falling back to requant pack"],
    5: lambda: replaced("kv_cache_dtype=auto", "kv_cache_dtype=fp8_e4m3"),
    6: lambda: without("quantization directive"),
    7: lambda: [*good_log(), f"{prefix(3)}attention route=scalar_paged"],
    8: lambda: without("XQA path active"),
    9: lambda: replaced("N=62080 K=5120 -> qpn2", "N=62080 K=5120 -> qpn"),
    10: lambda: [
        line.replace("eligible=YES", "eligible=NO reason=shape")
        if "layers.7.linear_attn.out_proj" in line and "Worker_TP2" in line
        else line
        for line in good_log()
    ],
    11: lambda: replaced("route=qpn8 ", "route=qpn8-prefill-reconstruct "),
}


@pytest.mark.parametrize("number", ALONE)
def test_each_gate_fails_alone(number: int) -> None:
    assert verdicts(ALONE[number]()) == {number: "fail"}


def test_gate_1_fails_alone_when_everything_was_printed() -> None:
    assert verdicts(good_log(), warm=Chat(False, 0, "HTTP 500")) == {1: "fail"}


@pytest.mark.parametrize(
    ("status", "body", "good"),
    [
        (200, b'{"choices":[{"message":{"content":"x"}}],"usage":{"completion_tokens":3}}', True),
        (200, b'{"choices":[{"message":{"content":"x"}}],"usage":{"completion_tokens":0}}', False),
        (200, b'{"choices":[{"message":{"content":null}}],"usage":{"completion_tokens":3}}', False),
        (200, b'{"choices":[{"message":{"content":[]}}],"usage":{"completion_tokens":3}}', False),
        (200, b'{"choices":[],"usage":{"completion_tokens":3}}', False),
        (200, b'{"choices":[{"message":{"content":"x"}}]}', False),
        (200, b"\xff\xfe", False),
        (500, b"cannot schedule new futures", False),
    ],
)
def test_warm_request_needs_text_and_tokens(status: int, body: bytes, good: bool) -> None:
    assert judge_chat(status, body).succeeded is good


def test_the_other_repack_phrase_counts_too() -> None:
    line = f"{prefix(1)}lm_head: packing from the model's own weights"
    assert verdicts([*good_log(), line]) == {4: "fail"}


def test_the_other_exact_route_is_dispatch_too() -> None:
    assert verdicts(replaced("route=qpn8 ", "route=qpn8-mt2 ")) == {}


@pytest.mark.parametrize("route", ["qpn8-chunked", "qpn80", "qpn"])
def test_other_routes_are_no_dispatch(route: str) -> None:
    assert verdicts(replaced("route=qpn8 ", f"route={route} ")) == {11: "fail"}


def test_the_first_depth_and_the_first_cache_type_count() -> None:
    late = ["num_speculative_tokens=3", "kv_cache_dtype=fp8"]
    assert verdicts([*good_log(), *late]) == {}
    assert verdicts([*late, *good_log()]) == {2: "fail", 5: "fail"}


def test_lm_head_of_another_vocabulary_fails() -> None:
    settings = GateSettings(7, 4, 128, 151936)
    assert verdicts(good_log(), settings) == {3: "fail"}


def test_without_speculation_depth_and_verifier_do_not_apply() -> None:
    lines = [
        line for line in without("XQA path active") if "num_speculative_tokens" not in line
    ] + ["config: kv_cache_dtype=auto"]
    settings = GateSettings(0, 4, 128, 248320)
    assert verdicts(lines, settings) == {}


def test_a_checkpoint_without_fused_modules_needs_no_census() -> None:
    lines = [line for line in good_log() if "QPN8_CENSUS" not in line]
    assert verdicts(lines, GateSettings(7, 4, 0, 248320)) == {}
    assert verdicts(good_log(), GateSettings(7, 4, 0, 248320)) == {10: "fail"}


# Four ranks write to one stream.


def test_glued_lines_are_counted() -> None:
    lines = good_log()
    one, two, three = lines[FIRST_CENSUS : FIRST_CENSUS + 3]
    glued = [*lines[:FIRST_CENSUS], one + two + three, "", "", *lines[FIRST_CENSUS + 3 :]]
    assert verdicts(glued) == {}


@given(st.lists(st.integers(0, len(good_log()) - 2), max_size=60), st.randoms())
def test_glueing_anywhere_in_any_order_of_ranks_never_fails_a_good_boot(
    joints: list[int], random: object
) -> None:
    lines = good_log()
    census = lines[FIRST_CENSUS : FIRST_CENSUS + 512]
    random.shuffle(census)  # type: ignore[attr-defined]
    lines[FIRST_CENSUS : FIRST_CENSUS + 512] = census
    for joint in sorted(set(joints), reverse=True):
        lines[joint : joint + 2] = [lines[joint] + lines[joint + 1], ""]
    assert verdicts(lines) == {}


@given(st.integers(0, 511), st.integers(0, 511), st.integers(1, 250))
def test_a_line_cut_into_by_another_is_counted_or_untold(one: int, two: int, at: int) -> None:
    lines = good_log()
    inner = lines.pop(FIRST_CENSUS + two)
    place = FIRST_CENSUS + min(one, 510)
    outer = lines[place]
    lines[place : place + 1] = [outer[:at] + inner, outer[at:]]
    assert verdicts(lines) in ({}, {10: "cannot tell"})


def test_a_torn_head_is_still_counted_by_its_verdict() -> None:
    lines = good_log()
    lines[FIRST_CENSUS] = lines[FIRST_CENSUS].replace("QPN8_CENSUS_LOAD", "QPN8_CEN")
    assert verdicts(lines) == {}


def test_a_torn_verdict_cannot_be_told() -> None:
    lines = good_log()
    lines[FIRST_CENSUS] = lines[FIRST_CENSUS].replace("eligible=YES", "eligi")
    assert verdicts(lines) == {10: "cannot tell"}


def test_a_line_that_only_one_rank_lacks_was_lost() -> None:
    lines = good_log()
    del lines[FIRST_CENSUS + 100]
    found = gates(lines)[10]
    assert found.verdict == "cannot tell"
    assert "lines lost" in found.reason
    assert "511" in found.reason


def test_a_module_that_every_rank_lacks_is_missing() -> None:
    assert verdicts(without("layers.9.linear_attn.out_proj")) == {10: "fail"}


def test_a_refusal_in_place_of_a_line_fails_even_in_a_log_with_gaps() -> None:
    lines = [GAP, *ALONE[10]()]
    assert verdicts(lines)[10] == "fail"


def test_more_modules_than_wanted_fail() -> None:
    extra = [census_line(rank, 64, "linear_attn.out_proj") for rank in range(4)]
    assert verdicts(good_log() + extra) == {10: "fail"}


def test_no_census_at_all_fails() -> None:
    assert verdicts(without("QPN8_CENSUS_LOAD")) == {10: "fail"}


# "Cannot tell" is an answer of its own.


def test_an_empty_log_tells_nothing() -> None:
    assert verdicts([]) == dict.fromkeys(range(2, 12), "cannot tell")


def test_absence_proves_nothing_in_an_incomplete_log() -> None:
    found = verdicts([*good_log()[:40], GAP])
    assert found == dict.fromkeys((3, 4, 7, 8, 9, 10, 11), "cannot tell")
    assert verdicts([*good_log(), GAP]) == dict.fromkeys((4, 7), "cannot tell")


def test_lines_printed_on_first_use_cannot_be_told_before_a_request() -> None:
    before = [line for line in good_log() if "route" not in line and "XQA" not in line]
    assert verdicts(before, warm=None) == dict.fromkeys((1, 3, 8, 9, 11), "cannot tell")
    assert verdicts(before) == dict.fromkeys((3, 8, 9, 11), "fail")


def test_a_missing_configuration_line_cannot_be_told() -> None:
    lines = [line for line in good_log() if "num_speculative_tokens" not in line]
    assert verdicts(lines) == {2: "cannot tell", 5: "cannot tell"}


@given(st.lists(st.text(max_size=80), max_size=20))
def test_any_text_is_judged_without_an_error(lines: list[str]) -> None:
    assert len(gates(lines)) == 11
