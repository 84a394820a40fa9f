"""The lab's stand-in for the outside world: one HTTP server for mirror, checkpoint and wheels."""

from __future__ import annotations

import functools
import http.server
import threading
from pathlib import Path


class _Handler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Say nothing: requests of the hosts are not the operator's business."""


def serve(folder: Path, address: str, port: int) -> None:
    """Serve `folder` in a thread of its own for as long as this process lives."""
    handler = functools.partial(_Handler, directory=str(folder))
    server = http.server.ThreadingHTTPServer((address, port), handler)
    threading.Thread(target=server.serve_forever, name="site", daemon=True).start()
