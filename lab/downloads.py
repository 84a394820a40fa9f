"""Packages for the lab, fetched by this machine's own pip and apt, each pinned by its digest."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from lab.errors import LabError
from stack.exits import EXIT_NO_NETWORK

WHEEL_PLATFORMS = (
    "manylinux1_x86_64",
    "manylinux2010_x86_64",
    "manylinux2014_x86_64",
    "manylinux_2_27_x86_64",
    "manylinux_2_28_x86_64",
)
TIMEOUT_S = 900
SHOWN_LINES = 6


def download_wheels(place: str, pins: Mapping[str, Mapping[str, str]], folder: Path) -> None:
    """Download wheels into `folder`.

    Args:
        place: what they are, for the error.
        pins: distribution -> its "version" and "sha256".

    Raises:
        LabError: one cannot be had, or its digest is not the pinned one.
    """
    requirements = folder / "requirements.txt"
    requirements.write_text(
        "".join(
            f"{name}=={pin['version']} --hash=sha256:{pin['sha256']}\n"
            for name, pin in pins.items()
        )
    )
    platforms = [item for name in WHEEL_PLATFORMS for item in ("--platform", name)]
    run(
        place,
        [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check",
         "--no-deps", "--only-binary=:all:", *platforms, "--require-hashes",
         "--dest", str(folder), "--requirement", str(requirements)],
    )  # fmt: skip


def run(place: str, command: list[str], cwd: Path | None = None) -> None:
    """Run a program that needs the network.

    Raises:
        LabError: it failed; the message names `place`.
    """
    done = subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    if done.returncode != 0:
        raise LabError(
            f"{place}: {command[0]} failed; check the network and the apt and pip settings, "
            "then run again",
            *(done.stderr or done.stdout).strip().splitlines()[-SHOWN_LINES:],
            exit_code=EXIT_NO_NETWORK,
        )
