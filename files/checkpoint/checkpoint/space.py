"""Room on the disk, looked at before anything is written."""

from __future__ import annotations

import shutil
from pathlib import Path

from hostlib.errors import EXIT_UNABLE, HostError
from hostlib.progress import size_text


def require_space(folder: Path, needed_bytes: int) -> None:
    """Raise HostError unless the file system of `folder` has so much free."""
    free_bytes = shutil.disk_usage(folder).free
    if needed_bytes > free_bytes:
        raise HostError(
            f"{folder}: {size_text(needed_bytes)} needed, {size_text(free_bytes)} free;"
            " make room, then run again",
            exit_code=EXIT_UNABLE,
        )
