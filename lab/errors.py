"""Errors of the lab that a person can cure, with documented exit codes."""

from __future__ import annotations

from stack.errors import StackError

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_NO_ROOT = 3
EXIT_NO_NETWORK = 4
EXIT_NO_SPACE = 5
EXIT_APT_LOCKED = 6
EXIT_PORT_IN_USE = 7
EXIT_STALE_LAB = 8


class LabError(StackError):
    """One line that names the thing, the place and the way out; details go below it."""

    def __init__(self, message: str, *details: str, exit_code: int = EXIT_FAILED) -> None:
        super().__init__(message)
        self.message = message
        self.details = details
        self.exit_code = exit_code
