"""Errors that a user can cause, and how a program ends on them."""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Callable

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_UNABLE = 2
EXIT_INTERRUPTED = 130
WAYS_OUT = {
    errno.ENOSPC: "free space or inodes there, then run again",
    errno.EDQUOT: "free space within this user's quota, then run again",
    errno.EACCES: "give it to this user, then run again",
    errno.EPERM: "give it to this user, then run again",
    errno.EROFS: "make it writable, then run again",
}


class HostError(Exception):
    """Something a user can cause or cure.

    Args:
        message: one line that names the thing, the place and the way out.
        details: further lines, printed below it.
        exit_code: documented exit code of the program that meets it.
    """

    def __init__(self, message: str, *details: str, exit_code: int = EXIT_FAILED) -> None:
        super().__init__(message)
        self.message = message
        self.details = details
        self.exit_code = exit_code


def interrupt_on_sigterm() -> None:
    """SIGTERM ends this program as Ctrl-C does: what it started and wrote is removed."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)


def run_main(program: str, main: Callable[[], int]) -> int:
    """Run `main`; turn user errors, OS errors and Ctrl-C into one line and an exit code."""
    try:
        return main()
    except HostError as error:
        print(f"{program}: {error.message}", file=sys.stderr)
        for line in error.details:
            print(f"  {line}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print(f"{program}: interrupted; run it again to go on", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""
        way_out = f"; {WAYS_OUT[error.errno]}" if error.errno in WAYS_OUT else ""
        reason = " ".join(str(error.strerror or error).split())
        print(f"{program}: {place}{reason}{way_out}", file=sys.stderr)
        return EXIT_UNABLE
