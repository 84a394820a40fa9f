"""One at a time: what holds the lock may stop and start the engine."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from hostlib.atomic import locked
from hostlib.errors import HostError

from enginectl import exits
from enginectl.paths import Places
from enginectl.timing import POLL_SECONDS

# Settle holds the lock for a moment, on a busy host for some seconds; only for it others wait.
SETTLE = "settle"
SETTLE_SECONDS = 60.0
UNKNOWN = "another process"  # it has not written its name yet


@contextlib.contextmanager
def one_at_a_time(places: Places, owner: str) -> Iterator[None]:
    """Hold the lock; wait for a settle, and for nobody else.

    Raises:
        HostError: another one holds it, and is named.
    """
    deadline = time.monotonic() + SETTLE_SECONDS
    with contextlib.ExitStack() as stack:
        while True:
            try:
                stack.enter_context(_lock(places, owner))
                break
            except HostError:
                waits = owner != SETTLE and holder(places).startswith((f"{SETTLE} (", UNKNOWN))
                if not waits or time.monotonic() >= deadline:
                    raise
            time.sleep(POLL_SECONDS)
        yield


def holder(places: Places) -> str:
    """Who holds the lock, in words."""
    try:
        return places.lock.read_text(encoding="utf-8").strip() or UNKNOWN
    except OSError:
        return UNKNOWN


def _lock(places: Places, owner: str) -> contextlib.AbstractContextManager[int]:
    return locked(places.lock, owner, wait_seconds=0, busy_exit_code=exits.EXIT_LOCKED)
