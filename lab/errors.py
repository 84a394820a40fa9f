"""Errors of the lab that a person can cure, with documented exit codes."""

from __future__ import annotations

from stack.errors import StackError
from stack.exits import EXIT_FAILED


class LabError(StackError):
    """One line that names the thing, the place and the way out; details go below it."""

    def __init__(self, message: str, *details: str, exit_code: int = EXIT_FAILED) -> None:
        super().__init__(message)
        self.message = message
        self.details = details
        self.exit_code = exit_code
