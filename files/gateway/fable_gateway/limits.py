"""The cap on requests inside the engine, the queue before it, rates, and memory for bodies."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import Counter, deque
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass

MINUTE_S = 60.0


class QueueFull(Exception):
    """No more may wait."""


@dataclass(frozen=True, eq=False)
class _Waiter:
    name: str
    most: int
    turn: asyncio.Future[None]


class Gauge:
    """At most `limit` holders at a time, and at most `max_queued` who wait for that.

    Each holder belongs to a name. A free slot goes to the name that holds the fewest, of those to
    the one that was served longest ago, and there to the one that came first. When too many wait,
    the newest of the name with the most is sent away. A slot is handed on directly, so `in_flight`
    never exceeds `limit`, and one who is cancelled in that very moment hands it on.
    """

    def __init__(self, limit: int, max_queued: int) -> None:
        self.limit = limit
        self.max_queued = max_queued
        self.in_flight = 0
        self._held: Counter[str] = Counter()
        self._queues: dict[str, deque[_Waiter]] = {}
        self._served: dict[str, int] = {}
        self._clock = itertools.count()

    @property
    def waiting(self) -> int:
        """How many wait now."""
        return sum(map(len, self._queues.values()))

    @contextlib.asynccontextmanager
    async def slot(
        self, deadline: float, name: str = "", most: int | None = None
    ) -> AsyncIterator[None]:
        """Hold a slot.

        Args:
            deadline: until when to wait, in the event loop's time.
            name: whose it is.
            most: slots that `name` may hold at the same time; None for no limit of its own.

        Raises:
            TimeoutError: no slot came free in time.
            QueueFull: too many wait already.
        """
        most = self.limit if most is None else most
        if self.in_flight < self.limit and not self._queues and self._held[name] < most:
            self._take(name)
        else:
            async with asyncio.timeout_at(deadline):
                await self._wait(name, most)
        try:
            yield
        finally:
            self._release(name)

    def _take(self, name: str) -> None:
        self.in_flight += 1
        self._held[name] += 1
        self._served[name] = next(self._clock)

    async def _wait(self, name: str, most: int) -> None:
        waiter = _Waiter(name, most, asyncio.get_running_loop().create_future())
        self._queues.setdefault(name, deque()).append(waiter)
        self._hand_out()
        if not waiter.turn.done() and self.waiting > self.max_queued:
            self._send_away(name)
        try:
            await waiter.turn
        except asyncio.CancelledError:
            if waiter.turn.cancelled():
                self._forget(waiter)
            elif waiter.turn.exception() is None:
                self._release(name)
            raise

    def _release(self, name: str) -> None:
        self.in_flight -= 1
        self._held[name] -= 1
        if not self._held[name]:
            del self._held[name]
        self._hand_out()

    def _hand_out(self) -> None:
        while self.in_flight < self.limit:
            heads = [q[0] for q in self._queues.values() if self._held[q[0].name] < q[0].most]
            if not heads:
                break
            chosen = min(heads, key=lambda w: (self._held[w.name], self._served.get(w.name, -1)))
            self._forget(chosen)
            if chosen.turn.done():
                continue
            self._take(chosen.name)
            chosen.turn.set_result(None)

    def _send_away(self, newcomer: str) -> None:
        longest = max(self._queues.values(), key=lambda q: (len(q), q[0].name == newcomer))
        victim = longest[-1]
        self._forget(victim)
        if not victim.turn.done():
            victim.turn.set_exception(QueueFull)

    def _forget(self, waiter: _Waiter) -> None:
        queue = self._queues.get(waiter.name)
        if queue is None:
            return
        with contextlib.suppress(ValueError):
            queue.remove(waiter)
        if not queue:
            del self._queues[waiter.name]


class Rates:
    """Requests of each name in the last 60 seconds, exactly."""

    def __init__(self) -> None:
        self._times: dict[str, deque[float]] = {}

    def wait_seconds(self, name: str, per_minute: int, now: float) -> float:
        """0 if `name` may ask at `now` (and then it counts); otherwise how long it must wait."""
        times = self._times.setdefault(name, deque())
        while times and now - times[0] >= MINUTE_S:
            times.popleft()
        if len(times) >= per_minute:
            return times[len(times) - per_minute] + MINUTE_S - now
        times.append(now)
        return 0.0


class Share:
    """Part of a `Budget`; see there."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._size = 0

    async def reserve(self, size: int, deadline: float) -> None:
        """Take `size` more bytes as soon as they are free.

        Raises:
            TimeoutError: they were not free by `deadline`, in the event loop's time.
        """
        async with asyncio.timeout_at(deadline):
            while size > self._budget.free:
                await self._budget.changed.wait()
        self._take(size)

    def grow(self, size: int) -> bool:
        """Take `size` more bytes at once; False if they are not free.

        Two who hold half of what they need must not wait for each other.
        """
        if size > self._budget.free:
            return False
        self._take(size)
        return True

    def release(self) -> None:
        """Give everything back; safe to call again."""
        self._budget.give_back(self._size)
        self._size = 0

    def _take(self, size: int) -> None:
        self._budget.free -= size
        self._size += size


class Budget:
    """Bytes that request bodies may take together."""

    def __init__(self, size: int) -> None:
        self.free = size
        self.changed = asyncio.Event()

    @contextlib.contextmanager
    def share(self) -> Iterator[Share]:
        """A share that is empty at first and given back at the end."""
        share = Share(self)
        try:
            yield share
        finally:
            share.release()

    def give_back(self, size: int) -> None:
        """Free `size` bytes, and let those who wait look again."""
        self.free += size
        self.changed.set()
        self.changed = asyncio.Event()
