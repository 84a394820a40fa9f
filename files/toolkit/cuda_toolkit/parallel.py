"""Work on several threads that ends as a whole: the first error stops the others."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
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
        self._stopped.set()

    def add(self, count: int) -> None:
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
    with ThreadPoolExecutor(max_workers=workers) as pool:
        running = [pool.submit(work, item) for item in items]
        try:
            done, _ = wait(running, return_when=FIRST_EXCEPTION)
            errors = [error for item in done if (error := item.exception())]
        finally:
            progress.stop()
            pool.shutdown(wait=False, cancel_futures=True)
    if errors:
        raise errors[0]
    progress.close()
