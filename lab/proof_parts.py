"""Real parts for the toolkit's proof: tilelang's headers, and the CUDA 12.0 headers of the history.

Each comes from a wheel that is pinned by digest; of it only the folders named in proof_parts.json
are kept, in the lab's cache.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from lab.errors import EXIT_NO_NETWORK, LabError
from lab.image import cache_lock
from lab.mirror import WHEEL_PLATFORMS
from lab.places import CACHE

PARTS = Path(__file__).with_name("proof_parts.json")
PLATFORMS = (*WHEEL_PLATFORMS, "manylinux_2_27_x86_64", "manylinux_2_28_x86_64")
DOWNLOAD_TIMEOUT_S = 900
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
    requirements = work / "requirements.txt"
    requirements.write_text(
        f"{entry['distribution']}=={entry['version']} --hash=sha256:{entry['sha256']}\n"
    )
    platforms = [item for platform in PLATFORMS for item in ("--platform", platform)]
    print(f"lab: fetching {name} for the toolkit's proof (once)", file=sys.stderr, flush=True)
    done = subprocess.run(
        [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check",
         "--no-deps", "--only-binary=:all:", *platforms, "--require-hashes",
         "--dest", str(work), "--requirement", str(requirements)],
        capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S, check=False,
    )  # fmt: skip
    if done.returncode != 0:
        raise LabError(
            f"{name}: pip cannot fetch it; check the network and pip's settings, then run again",
            *done.stderr.strip().splitlines()[-4:],
            exit_code=EXIT_NO_NETWORK,
        )
    (wheel,) = work.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        folders = tuple(entry["folders"])
        archive.extractall(
            staged, [item for item in archive.namelist() if item.startswith(folders)]
        )
