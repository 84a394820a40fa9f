"""Cap, queue, rates and memory under any order of arrivals, ends and departures."""

from __future__ import annotations

import asyncio
from collections import Counter, deque

import pytest
from fable_gateway.limits import MINUTE_S, Budget, Gauge, QueueFull, Rates
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

FAR_S = 3600.0
PLACES = st.integers(0, 1000)
NAMES = st.sampled_from(["alice", "bob", "carol"])


class GaugeMachine(RuleBasedStateMachine):
    """Clients of three names come, end, and leave, from the queue as well as from a slot."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.gauge = Gauge(3, 4)
        self.holding: Counter[str] = Counter()
        self.ends: dict[asyncio.Task[str], asyncio.Event] = {}
        self.there: list[asyncio.Task[str]] = []

    def settle(self) -> None:
        for _ in range(8):
            self.loop.run_until_complete(asyncio.sleep(0))

    async def _client(self, name: str, most: int | None, end: asyncio.Event) -> str:
        try:
            async with self.gauge.slot(self.loop.time() + FAR_S, name, most):
                self.holding[name] += 1
                assert most is None or self.holding[name] <= most
                try:
                    await end.wait()
                finally:
                    self.holding[name] -= 1
        except QueueFull:
            return "full"
        return "served"

    @rule(name=NAMES)
    def arrive(self, name: str) -> None:
        end = asyncio.Event()
        most = 1 if name == "carol" else None
        task = self.loop.create_task(self._client(name, most, end))
        self.ends[task] = end
        self.there.append(task)
        self.settle()

    @precondition(lambda self: self.there)
    @rule(place=PLACES)
    def end(self, place: int) -> None:
        self.ends[self._taken(place)].set()
        self.settle()

    @precondition(lambda self: self.there)
    @rule(place=PLACES)
    def leave(self, place: int) -> None:
        self._taken(place).cancel()
        self.settle()

    def _taken(self, place: int) -> asyncio.Task[str]:
        """One of those who are there, who then counts no more."""
        return self.there.pop(place % len(self.there))

    @invariant()
    def exact(self) -> None:
        assert self.gauge.in_flight == self.holding.total() <= self.gauge.limit
        assert self.gauge.waiting <= self.gauge.max_queued
        waits = [t for t in self.ends if not t.done()]
        assert len(waits) == self.gauge.waiting + self.gauge.in_flight

    def teardown(self) -> None:
        for task in self.ends:
            task.cancel()
        self.settle()
        assert self.gauge.in_flight == self.gauge.waiting == 0
        self.loop.close()


GaugeMachine.TestCase.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)
TestGauge = GaugeMachine.TestCase


async def _order(gauge: Gauge, arrivals: list[str], *, late: bool) -> list[str]:
    """The names in the order in which they get the slot, and "full" for those sent away.

    With `late` one more comes whose deadline has passed.
    """
    order: list[str] = []
    deadline = asyncio.get_running_loop().time() + FAR_S

    async def one(name: str) -> None:
        try:
            async with gauge.slot(deadline, name):
                order.append(name)
                await asyncio.sleep(0)
        except QueueFull:
            order.append(f"{name} full")

    async with gauge.slot(deadline, "holder"):
        waiting = [asyncio.create_task(one(name)) for name in arrivals]
        await asyncio.sleep(0)
        if late:
            with pytest.raises(TimeoutError):
                async with gauge.slot(asyncio.get_running_loop().time() - 1, "late"):
                    pass
    await asyncio.gather(*waiting)
    assert gauge.in_flight == 0
    return order


def test_names_take_turns_and_a_timeout_takes_no_slot() -> None:
    arrivals = ["greedy"] * 4 + ["modest", "other"]
    order = asyncio.run(_order(Gauge(1, 100), arrivals, late=True))
    assert order == ["greedy", "modest", "other", "greedy", "greedy", "greedy"]


def test_one_name_is_served_in_the_order_of_arrival() -> None:
    async def run() -> list[int]:
        gauge, order = Gauge(1, 100), list[int]()
        deadline = asyncio.get_running_loop().time() + FAR_S

        async def one(number: int) -> None:
            async with gauge.slot(deadline, "alice"):
                order.append(number)

        await asyncio.gather(*(one(number) for number in range(20)))
        return order

    assert asyncio.run(run()) == list(range(20))


def test_who_leaves_in_the_moment_of_its_turn_hands_the_slot_on() -> None:
    async def run() -> list[object]:
        gauge = Gauge(1, 100)
        deadline = asyncio.get_running_loop().time() + FAR_S

        async def one() -> str:
            async with gauge.slot(deadline, "alice"):
                return "served"

        async with gauge.slot(deadline, "alice"):
            leaves, next_one = asyncio.create_task(one()), asyncio.create_task(one())
            await asyncio.sleep(0)
        # The slot is its own by now, and it does not know yet.
        assert gauge.waiting == 1
        leaves.cancel()
        ends = await asyncio.gather(leaves, next_one, return_exceptions=True)
        assert gauge.in_flight == 0
        return list(ends)

    left, served = asyncio.run(run())
    assert isinstance(left, asyncio.CancelledError)
    assert served == "served"


def test_a_full_queue_sends_the_greediest_away() -> None:
    arrivals = ["greedy"] * 3 + ["modest"]
    order = asyncio.run(_order(Gauge(1, 3), arrivals, late=False))
    assert sorted(order) == ["greedy", "greedy", "greedy full", "modest"]


@given(
    st.integers(1, 5),
    st.lists(st.tuples(NAMES, st.floats(0, 90, allow_subnormal=False)), max_size=60),
)
def test_no_minute_holds_more_than_its_rate(
    per_minute: int, steps: list[tuple[str, float]]
) -> None:
    rates, now = Rates(), 1000.0
    granted: dict[str, deque[float]] = {}
    for name, pause in steps:
        now += pause
        wait = rates.wait_seconds(name, per_minute, now)
        mine = granted.setdefault(name, deque())
        recent = [time for time in mine if now - time < MINUTE_S]
        assert (wait == 0) == (len(recent) < per_minute)
        if wait:
            assert rates.wait_seconds(name, per_minute, now + wait + 1e-6) == 0
            now += wait + 1e-6
        mine.append(now)


@given(st.integers(1, 100), st.lists(st.tuples(st.booleans(), st.integers(0, 100)), max_size=30))
def test_shares_never_exceed_the_budget_and_all_of_it_comes_back(
    size: int, steps: list[tuple[bool, int]]
) -> None:
    async def run() -> None:
        budget = Budget(size)
        now = asyncio.get_running_loop().time()
        with budget.share() as share:
            for grow, more in steps:
                fits, before = more <= budget.free, budget.free
                if grow:
                    assert share.grow(more) is fits
                elif fits:
                    await share.reserve(more, now + FAR_S)
                else:
                    with pytest.raises(TimeoutError):
                        await share.reserve(more, now)
                assert budget.free == (before - more if fits else before)
                assert budget.free >= 0
        assert budget.free == size

    asyncio.run(run())


def test_who_waits_for_memory_gets_it_when_it_comes_back() -> None:
    async def run() -> None:
        budget = Budget(10)
        deadline = asyncio.get_running_loop().time() + FAR_S
        with budget.share() as first, budget.share() as second:
            await first.reserve(8, deadline)
            waiting = asyncio.create_task(second.reserve(5, deadline))
            await asyncio.sleep(0)
            assert not waiting.done()
            first.release()
            await waiting
            assert budget.free == 5

    asyncio.run(run())
