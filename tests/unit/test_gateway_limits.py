"""The cap under any order of arrivals, ends and departures."""

from __future__ import annotations

import asyncio

import pytest
from fable_gateway.limits import Gauge
from hypothesis import given, settings
from hypothesis import strategies as st

# Per task: steps before it asks, steps that it holds, and the step at which it is cancelled.
TASKS = st.lists(
    st.tuples(st.integers(0, 6), st.integers(0, 6), st.none() | st.integers(0, 14)), max_size=24
)

# Of the event loop: all tasks one after the other need fewer.
ENOUGH_STEPS = 500


@settings(max_examples=200, deadline=None)
@given(limit=st.integers(1, 4), tasks=TASKS)
def test_never_above_the_limit_and_back_to_zero(
    limit: int, tasks: list[tuple[int, int, int | None]]
) -> None:
    holding = 0

    async def one(gauge: Gauge, before: int, hold: int) -> None:
        nonlocal holding
        for _ in range(before):
            await asyncio.sleep(0)
        async with gauge.slot(asyncio.get_running_loop().time() + 60):
            holding += 1
            assert holding <= limit
            try:
                for _ in range(hold):
                    await asyncio.sleep(0)
            finally:
                holding -= 1

    async def run() -> None:
        gauge = Gauge(limit, 100)
        started = [asyncio.create_task(one(gauge, before, hold)) for before, hold, _ in tasks]
        for step in range(ENOUGH_STEPS):
            for task, (_, _, cancel_at) in zip(started, tasks, strict=True):
                if cancel_at == step:
                    task.cancel()
            await asyncio.sleep(0)
        stuck = [task for task in started if not task.done()]
        for task in stuck:
            task.cancel()
        ends = await asyncio.gather(*started, return_exceptions=True)
        assert not stuck
        for end, (_, _, cancel_at) in zip(ends, tasks, strict=True):
            cancelled = cancel_at is not None and isinstance(end, asyncio.CancelledError)
            assert end is None or cancelled
        assert gauge.in_flight == 0

    asyncio.run(run())


def test_first_come_first_served_and_timeouts_take_no_slot() -> None:
    async def run() -> list[int]:
        gauge = Gauge(1, 100)
        order: list[int] = []
        now = asyncio.get_running_loop().time()

        async def one(number: int) -> None:
            async with gauge.slot(now + 60):
                order.append(number)
                await asyncio.sleep(0)

        async with gauge.slot(now + 60):
            waiting = [asyncio.create_task(one(number)) for number in range(5)]
            await asyncio.sleep(0)
            with pytest.raises(TimeoutError):
                async with gauge.slot(now):
                    pass
        await asyncio.gather(*waiting)
        assert gauge.in_flight == 0
        return order

    assert asyncio.run(run()) == [0, 1, 2, 3, 4]
