"""What the toolkit's tests on real CUDA parts share.

Needs gcc, and the parts in the lab's cache or the packages to build them from.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cuda_toolkit.environment import STEERING

from lab import image, mirror
from lab.places import CACHE
from tests.unit.toolkit_support import Site

TILELANG = "tilelang reduce.h"
EXTENSION = "torch extension"
CHECKS = [
    "environment", "compiler", "header origin", "versions", "probe hmax_nan", "probe tma_enum",
    TILELANG, EXTENSION,
]  # fmt: skip
DEADLINE_S = 300


def apt_sources() -> str:
    """The source list of the lab's base image, or of this machine where there is no image yet."""
    base = CACHE / f"base-{image.recipe_digest()}"
    if base.exists():
        return image.apt_sources(base)
    places = [*Path("/etc/apt").glob("sources.list"), *Path("/etc/apt/sources.list.d").iterdir()]
    return "\n\n".join(path.read_text() for path in sorted(places) if path.is_file())


def new_site(folder: Path, programs: Path, info: mirror.MirrorInfo, base_url: str = "") -> Site:
    return Site(info.folder, programs, folder, info.lock(base_url or str(info.folder)))


def proof(
    site: Site,
    prefix: Path,
    *more: str,
    before: tuple[str, ...] = (),
    variables: Mapping[str, str] | None = None,
) -> tuple[int, dict[str, Any]]:
    """Run the program on `prefix`: its exit code and JSON object, or the line of its error.

    Args:
        before: words before the command, such as a mount namespace.
        variables: besides this process's own, of which those that steer a compiler are left out.
    """
    own = {name: value for name, value in os.environ.items() if name not in STEERING}
    done = subprocess.run(
        [*before, site.programs / "cuda-proof", prefix, "--json", *more],
        check=False, capture_output=True, text=True, timeout=DEADLINE_S,
        env={**own, **(variables or {})},
    )  # fmt: skip
    assert "Traceback" not in done.stderr
    return done.returncode, json.loads(done.stdout) if done.stdout else {"line": done.stderr}


def failed(report: dict[str, Any]) -> list[str]:
    """Names of the checks that failed."""
    return [check["name"] for check in report["checks"] if not check["ok"]]


def check_named(report: dict[str, Any], name: str) -> dict[str, Any]:
    """The one check whose name begins with `name`."""
    (found,) = [check for check in report["checks"] if check["name"].startswith(name)]
    assert isinstance(found, dict)
    return found


def engine_environment(tree: Path, **more: str) -> dict[str, str]:
    """The variables of an engine that compiles with `tree`."""
    return {
        "CUDA_HOME": str(tree),
        "PATH": f"{tree}/bin:/usr/local/bin:/usr/bin:/bin",
        "LANG": "C.UTF-8",
        **more,
    }


def tilelang_venv(folder: Path, part: Path) -> Path:
    """A folder laid out as a venv that holds the kept files of a tilelang wheel."""
    site = folder / "lib/python3.12/site-packages"
    site.parent.mkdir(parents=True)
    site.symlink_to(part)
    return folder
