"""Something of limited amount that several threads share, such as memory."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator


class Budget:
    """Each worker waits until its part is free."""

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
