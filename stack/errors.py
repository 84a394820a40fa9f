"""Errors of the control side: one line, no traceback, also under plain `pyinfra`."""

from pyinfra.api.exceptions import PyinfraError


class StackError(PyinfraError):
    """A wrong setting, lock or state: names the thing, the place and the way out."""


class UsageError(StackError):
    """A command line that asks for what there is not."""
