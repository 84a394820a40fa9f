"""The timing model against the published matrix, and the arithmetic of rounds."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from engine_standin.simulation import Engine, Finished, replay
from engine_standin.timing import Timing, accepted_drafts, interpolate, load
from hypothesis import given
from hypothesis import strategies as st

DOMAINS = ["essay", "code", "prose", "chinese"]
# tok/s of the published matrix, steady: depth -> domain
SINGLE = {
    7: {"essay": 101.6, "code": 127.4, "prose": 100.4, "chinese": 98.7},
    3: {"essay": 109.8, "code": 126.9, "prose": 111.2, "chinese": 106.1},
    1: {"essay": 85.1, "code": 89.6, "prose": 82.7, "chinese": 82.0},
}
# aggregate tok/s with 8 requests at once: (depth, slots)
EIGHT = {(7, 1): 105.5, (7, 2): 149.8, (7, 4): 19.0, (3, 1): 110.0, (3, 4): 20.6, (1, 1): 82.5}


@pytest.fixture(scope="module")
def timing() -> Timing:
    return load()


def warm(timing: Timing, depth: int, slots: int) -> Engine:
    return Engine(replace(timing, jit_seconds={}), depth, slots)


def batch(engine: Engine, concurrency: int, tokens: int = 256) -> list[Finished]:
    return replay(engine, [(20, tokens, DOMAINS[i % 4]) for i in range(concurrency)])


@pytest.mark.parametrize(("depth", "domain"), [*itertools.product(SINGLE, DOMAINS)])
def test_single_stream_matches_the_matrix(timing: Timing, depth: int, domain: str) -> None:
    (done,) = replay(warm(timing, depth, 1), [(20, 384, domain)])
    assert 384 / done.last == pytest.approx(SINGLE[depth][domain], rel=0.02)


@pytest.mark.parametrize(("depth", "slots"), EIGHT)
def test_eight_at_once_match_the_matrix(timing: Timing, depth: int, slots: int) -> None:
    done = batch(warm(timing, depth, slots), 8)
    aggregate = 8 * 256 / max(one.last for one in done)
    assert aggregate == pytest.approx(EIGHT[depth, slots], rel=0.05)


def test_more_than_two_running_collapse(timing: Timing) -> None:
    done = batch(warm(timing, 7, 4), 4)
    assert all(4.0 < 256 / one.last < 6.5 for one in done)


def test_ranking_of_the_matrix(timing: Timing) -> None:
    rates = {d: 384 / replay(warm(timing, d, 1), [(20, 384, "essay")])[0].last for d in (1, 3, 7)}
    assert sorted(rates, key=rates.__getitem__) == [1, 7, 3]


@pytest.mark.parametrize(("prompt", "seconds"), [(2908, 0.60), (11601, 0.81)])
def test_time_to_first_token(timing: Timing, prompt: int, seconds: float) -> None:
    (done,) = replay(warm(timing, 7, 1), [(prompt, 64, "essay")])
    assert done.first == pytest.approx(seconds)


def test_first_request_pays_the_compilation(timing: Timing) -> None:
    engine = Engine(timing, 3, 1)
    first, second = (replay(engine, [(20, 384, "essay")])[0].last for _ in range(2))
    assert 384 / first == pytest.approx(60.5, rel=0.02)
    assert 384 / second == pytest.approx(109.8, rel=0.02)


@given(length_share=st.floats(0.0, 1.0), k=st.integers(1, 15), rounds=st.integers(1, 400))
def test_accepted_drafts_keep_their_mean(length_share: float, k: int, rounds: int) -> None:
    length = 1 + length_share * k
    drawn = list(itertools.islice(accepted_drafts(length, k), rounds))
    assert all(0 <= count <= k for count in drawn)
    # A low-discrepancy sequence errs by a few draws in all, however many the rounds.
    assert abs(sum(drawn) - rounds * (length - 1)) <= 4 * k


@given(
    requests=st.lists(
        st.tuples(st.integers(1, 5000), st.integers(1, 300), st.sampled_from(DOMAINS)),
        min_size=1,
        max_size=12,
    ),
    depth=st.integers(0, 15),
    slots=st.integers(1, 8),
)
def test_every_token_is_counted_once(
    requests: list[tuple[int, int, str]], depth: int, slots: int
) -> None:
    engine = Engine(load(), depth, slots)
    done = replay(engine, requests)
    counters = engine.counters
    assert counters.generation_tokens == sum(tokens for _, tokens, _ in requests)
    assert counters.prompt_tokens == sum(prompt for prompt, _, _ in requests)
    assert counters.accepted_tokens == sum(counters.accepted_per_position)
    assert counters.draft_tokens == counters.drafts * depth
    assert counters.accepted_per_position == sorted(counters.accepted_per_position, reverse=True)
    assert all(0 < one.first <= one.last for one in done)
    assert engine.tokens_held() == 0


@given(
    slots=st.integers(1, 4),
    plan=st.lists(st.tuples(st.integers(0, 9), st.booleans()), max_size=60),
)
def test_slots_are_never_exceeded_nor_leaked(slots: int, plan: list[tuple[int, bool]]) -> None:
    engine = Engine(load(), 7, slots)
    for name, submit in plan:
        engine.abort(str(name))
        if submit:
            engine.submit(str(name), 10, 50, "essay")
        engine.step()
        assert len(engine.running) <= slots
    for name in range(10):
        engine.abort(str(name))
    assert engine.step() is None


def test_interpolation_goes_through_the_points() -> None:
    points = ((1.0, 2.0), (3.0, 4.0), (7.0, 12.0))
    assert [interpolate(points, x) for x in (1, 3, 7)] == [2.0, 4.0, 12.0]
    assert [interpolate(points, x) for x in (0, 2, 5, 8)] == [1.0, 3.0, 8.0, 14.0]
