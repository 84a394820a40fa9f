"""Work on several threads that ends as a whole: the first error stops the others."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import TypeVar

from hostlib.errors import HostError
from hostlib.progress import Progress

_Item = TypeVar("_Item")


class StoppableProgress(Progress):
    """A progress that ends the work of all threads that report to it once it is stopped."""

    def __init__(self, label: str, total_bytes: int) -> None:
        super().__init__(label, total_bytes)
        self._stopped = threading.Event()

    def stop(self) -> None:
        """End every thread at its next report."""
        self._stopped.set()

    def add(self, count: int) -> None:
        """Record `count` further bytes; raises HostError once it is stopped."""
        if self._stopped.is_set():
            raise HostError(f"{self.label}: stopped")
        super().add(count)


def for_each(
    items: Iterable[_Item],
    work: Callable[[_Item], None],
    workers: int,
    progress: StoppableProgress,
) -> None:
    """Do `work` on all items; the first error stops those that report to `progress`.

    Raises:
        HostError, OSError: whatever `work` raised first.
    """
    with ThreadPoolExecutor(workers) as pool:
        running = [pool.submit(work, item) for item in items]
        try:
            for done in as_completed(running):
                done.result()
        except BaseException:
            progress.stop()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    progress.close()
