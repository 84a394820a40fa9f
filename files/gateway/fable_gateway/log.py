"""The journal: one JSON object a line, never a key, a prompt or an answer."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path


def write(event: str, **fields: object) -> None:
    """One line on standard error; fields that are None are left out."""
    line = {"event": event} | {name: value for name, value in fields.items() if value is not None}
    print(json.dumps(line), file=sys.stderr, flush=True)


class Handler(logging.Handler):
    """Libraries' own log records, without their arguments.

    The HTTP parser quotes what it could not read, and that may be a line with a key.
    """

    def emit(self, record: logging.LogRecord) -> None:
        """Write the constant text, and where and as what an exception arose."""
        kind, _, trace = record.exc_info or (None, None, None)
        while trace and trace.tb_next:
            trace = trace.tb_next
        place = trace and f"{Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno}"
        error = kind.__name__ if kind else None
        write("library", logger=record.name, text=str(record.msg), error=error, place=place)


def take_over() -> None:
    """Send every library's warnings and errors through `Handler`."""
    logging.basicConfig(handlers=[Handler()], level=logging.WARNING, force=True)
    logging.captureWarnings(capture=True)
