"""What requests do together while the engine is away: one tries, the others wait for its news."""

from __future__ import annotations

import asyncio
import random

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 2.0
# An engine that has not declined a request for this long is working on it.
ACCEPTED_S = 1.0


def pause_seconds(attempt: int, chance: float) -> float:
    """Pause after failed attempt 0, 1, …: doubled each time, halved at most by `chance` in [0, 1).

    The jitter keeps gateways that lost the same engine from trying in step.
    """
    longest: float = min(FIRST_PAUSE_S * 2 ** min(attempt, 10), LONGEST_PAUSE_S)
    return longest * (1 - chance / 2)


class Patience:
    """Whether the engine is there, as the requests themselves find out.

    Each request awaits `turn`, tries, and tells the outcome: `back`, `away`, or `gone` if it was
    given up. While the engine is away one request at a time gets its turn, after a pause.
    """

    def __init__(self) -> None:
        self.is_away = False
        self._attempt = 0
        self._trying = False
        self._news = asyncio.Event()

    async def turn(self, deadline: float) -> bool:
        """Wait until it makes sense to try.

        Returns:
            Whether this one tries for all the others.

        Raises:
            TimeoutError: `deadline`, in the event loop's time, came while another one tried.
        """
        loop = asyncio.get_running_loop()
        while self.is_away:
            if self._trying:
                async with asyncio.timeout_at(deadline):
                    await self._news.wait()
                continue
            self._trying = True
            pause = pause_seconds(self._attempt, random.random())  # noqa: S311
            try:
                # The last try is at the deadline itself.
                await asyncio.sleep(max(0.0, min(pause, deadline - loop.time())))
            except BaseException:
                self.gone(trying=True)
                raise
            return True
        return False

    def back(self) -> None:
        """The engine took a request."""
        self.is_away, self._trying, self._attempt = False, False, 0
        self._tell()

    def away(self, *, trying: bool) -> None:
        """The engine declined a request; `trying` is what `turn` gave for it."""
        if trying:
            self._attempt += 1
        if trying or not self.is_away:
            self._trying = False
        self.is_away = True
        self._tell()

    def gone(self, *, trying: bool) -> None:
        """A request ended without an outcome."""
        if trying:
            self._trying = False
            self._tell()

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()
