"""Programs that a proof runs: each with a deadline, all ended together when the proof is."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Outcome:
    """How a program ended; `code` is None when its deadline ended it."""

    code: int | None
    output: str
    errors: str


class Runner:
    """Runs programs in one environment and one scratch folder. Thread-safe."""

    def __init__(self, environment: Mapping[str, str], work: Path) -> None:
        # A compiler that is killed leaves its files in TMPDIR: they go with the scratch folder.
        self.environment = {**environment, "TMPDIR": str(work)}
        self.work = work
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[str]] = set()
        self._stopped = False

    def run(self, command: Sequence[str | Path], deadline_s: float) -> Outcome:
        """Run `command` to its end, or for `deadline_s` seconds.

        Raises:
            OSError: it cannot be started.
        """
        with self._lock:
            if self._stopped:
                return Outcome(None, "", "")
            process = subprocess.Popen(
                command,
                cwd=self.work,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                start_new_session=True,
            )
            self._running.add(process)
        with process:
            try:
                output, errors = process.communicate(timeout=deadline_s)
                code: int | None = process.returncode
            except subprocess.TimeoutExpired:
                _kill_group(process)
                output, errors = process.communicate()
                code = None
            finally:
                with self._lock:
                    self._running.discard(process)
        return Outcome(code, output, errors)

    def stop(self) -> None:
        """End every program that still runs, with its children; none is started any more."""
        with self._lock:
            self._stopped = True
            for process in self._running:
                _kill_group(process)


def _kill_group(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
