"""Progress of long steps: bytes, rate and time left; plain lines where there is no terminal."""

from __future__ import annotations

import sys
import threading
import time

PLAIN_INTERVAL_S = 5.0
TERMINAL_INTERVAL_S = 0.2


class Progress:
    """Counts bytes of one long step and reports them on standard error. Thread-safe."""

    def __init__(self, label: str, total_bytes: int) -> None:
        self.label = label
        self.total_bytes = total_bytes
        self.done_bytes = 0
        self._terminal = sys.stderr.isatty()
        self._start = time.monotonic()
        self._last = self._start
        self._lock = threading.Lock()

    def add(self, count: int) -> None:
        """Record `count` further bytes."""
        with self._lock:
            self.done_bytes += count
            now = time.monotonic()
            interval = TERMINAL_INTERVAL_S if self._terminal else PLAIN_INTERVAL_S
            if now - self._last >= interval:
                self._last = now
                self._print(now, end="\r" if self._terminal else "\n")

    def close(self) -> None:
        """Print the closing line."""
        with self._lock:
            self._print(time.monotonic(), end="\n")

    def _print(self, now: float, end: str) -> None:
        elapsed = max(now - self._start, 1e-6)
        rate = self.done_bytes / elapsed
        left = f"{(self.total_bytes - self.done_bytes) / rate:.0f}" if rate else "?"
        text = (
            f"{self.label}: {size_text(self.done_bytes)} of {size_text(self.total_bytes)}, "
            f"{size_text(int(rate))}/s, {left} s left"
        )
        pad = "\x1b[K" if self._terminal else ""
        print(text + pad, end=end, file=sys.stderr, flush=True)


def size_text(count: int) -> str:
    """`count` bytes in decimal units, as disks and downloads are sold."""
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000 or unit == "GB":
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    raise AssertionError("unreachable")
