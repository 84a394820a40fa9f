"""Work on several threads that ends as a whole: the first error stops the others."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
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


class Budget:
    """Something that workers share, such as memory: each waits until its part is free."""

    def __init__(self, total: int) -> None:
        self._total = self._free = total
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def part(self, wanted: int) -> Iterator[None]:
        """Hold `wanted` of it, or all of it where that is less."""
        taken = min(wanted, self._total)
        with self._changed:
            self._changed.wait_for(lambda: self._free >= taken)
            self._free -= taken
        try:
            yield
        finally:
            with self._changed:
                self._free += taken
                self._changed.notify_all()


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
