"""Real parts for the toolkit's proof: tilelang's headers, and the CUDA 12.0 headers of the history.

Each comes from a wheel that is pinned by digest; of it only the folders named in proof_parts.json
are kept, in the lab's cache.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from lab.downloads import download_wheels
from lab.image import cache_lock
from lab.places import CACHE

PARTS = Path(__file__).with_name("proof_parts.json")
# The 12.0 cccl lacks `nv/target`, so the history is made of these two.
HISTORY = {
    "runtime-12.0": "nvidia/cuda_runtime/include",
    "cccl-12.4": "nvidia/cuda_cccl/include",
}


def part(name: str) -> Path:
    """The folder with the kept files of part `name`, fetched when the cache lacks it.

    Raises:
        LabError: it cannot be had, or its digest is not the pinned one.
    """
    entry: dict[str, Any] = json.loads(PARTS.read_text(encoding="utf-8"))[name]
    recipe = hashlib.sha256(json.dumps(entry, sort_keys=True).encode()).hexdigest()[:16]
    final = CACHE / f"part-{name}-{recipe}"
    with cache_lock("parts"):
        if not final.exists():
            for stale in CACHE.glob("part-tmp.*"):
                shutil.rmtree(stale)
            with tempfile.TemporaryDirectory(prefix="part-tmp.", dir=CACHE) as work:
                staged = Path(work) / "staged"
                _fetch(name, entry, Path(work), staged)
                staged.rename(final)
    return final


def history_headers() -> list[Path]:
    """The folders whose files, laid into /usr/include, make the distribution's CUDA 12.0."""
    return [part(name) / folder for name, folder in HISTORY.items()]


def _fetch(name: str, entry: dict[str, Any], work: Path, staged: Path) -> None:
    print(f"lab: fetching {name} for the toolkit's proof (once)", file=sys.stderr, flush=True)
    download_wheels(name, {entry["distribution"]: entry}, work)
    (wheel,) = work.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        folders = tuple(entry["folders"])
        archive.extractall(
            staged, [item for item in archive.namelist() if item.startswith(folders)]
        )
