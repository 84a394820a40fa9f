"""Files handled in parallel: the first failure stops the rest."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed

from hostlib.errors import HostError
from hostlib.progress import Progress


class StoppableProgress(Progress):
    """Progress that ends a thread at its next chunk once `stop` is set."""

    def __init__(self, label: str, total_bytes: int) -> None:
        super().__init__(label, total_bytes)
        self.stop = threading.Event()

    def add(self, count: int) -> None:
        """Record `count` further bytes; raises HostError once `stop` is set."""
        if self.stop.is_set():
            raise HostError(f"{self.label}: stopped")
        super().add(count)


def for_each(
    names: Iterable[str], job: Callable[[str], None], workers: int, progress: StoppableProgress
) -> None:
    """Run `job` on every name, `workers` at a time; raise the first error and stop the others."""
    with ThreadPoolExecutor(workers) as pool:
        futures = [pool.submit(job, name) for name in names]
        try:
            for future in as_completed(futures):
                future.result()
        except BaseException:
            progress.stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    progress.close()
