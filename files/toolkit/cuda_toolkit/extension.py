"""Stage 3: the engine's own kernel extension, built once in the engine's environment."""

from __future__ import annotations

import contextlib
import json
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hostlib.errors import EXIT_UNABLE, HostError

from cuda_toolkit.checks import Check, not_applicable
from cuda_toolkit.nvcc import SHOWN_LINES
from cuda_toolkit.probing import PROBES, site_with
from cuda_toolkit.runner import Runner

EXTENSIONS = Path(__file__).with_name("extensions.json")
NAME = "torch extension"
BUILD_DEADLINE_S = 1200.0
_KEYS = {"module": str, "function": str, "entry_points": list, "source_variable": str}


@dataclass(frozen=True)
class Extension:
    """How an engine builds its kernels.

    Attributes:
        module, function: the loader; a call without arguments builds and returns the extension.
        entry_points: what it must export.
        source_variable: environment variable that names the source, for the stamp.
    """

    module: str
    function: str
    entry_points: tuple[str, ...]
    source_variable: str


@dataclass(frozen=True)
class Built:
    """A check, and the files that its truth hangs on."""

    check: Check
    files: frozenset[Path] = frozenset()


def load_extension(path: Path, engine: str) -> Extension | None:
    """How `engine` builds its kernels, from the table in `path`; None when it builds none.

    Raises:
        HostError: the file is unreadable or its entry has another form.
    """
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise HostError(f"{path}: is no JSON ({error})", exit_code=EXIT_UNABLE) from None
    entry = table.get(engine) if isinstance(table, dict) else None
    if entry is None:
        return None
    found = {key: type(value) for key, value in entry.items()} if isinstance(entry, dict) else {}
    if found != _KEYS:
        raise HostError(
            f"{path}: {engine}: must have the keys {', '.join(_KEYS)}; correct it",
            exit_code=EXIT_UNABLE,
        )
    return Extension(**{**entry, "entry_points": tuple(entry["entry_points"])})


def check_extension(runner: Runner, venv: Path | None, extension: Extension | None) -> Built:
    """Build the extension (or load the one that stands) and check its entry points."""
    if venv is None:
        return Built(not_applicable(NAME, "not there: no venv was named (--venv)"))
    site = site_with(venv, "torch")
    if site is None:
        return Built(not_applicable(NAME, f"not there: {venv} has no torch"))
    if extension is None:
        return Built(not_applicable(NAME, "not there: the engine named (--engine) builds none"))
    removed = remove_stale_locks(runner.environment)
    answer = runner.work / "extension.json"
    loader = f"{extension.module}.{extension.function}"
    done = runner.run(
        [
            venv / "bin/python", PROBES / "build_extension.py", extension.module,
            extension.function, answer, *extension.entry_points,
        ],
        BUILD_DEADLINE_S,
    )  # fmt: skip
    if done.code is None:
        text = f"{loader} did not end within {BUILD_DEADLINE_S:.0f} s"
        return Built(Check(NAME, False, text, removed))
    if done.code != 0 or not answer.is_file():
        last = [line for line in done.errors.splitlines() if line.strip()][-SHOWN_LINES:]
        return Built(Check(NAME, False, f"{loader} failed", (*removed, *last)))
    found = json.loads(answer.read_text(encoding="utf-8"))
    if found["missing"]:
        text = f"{found['extension']}: lacks {', '.join(found['missing'])}"
        return Built(Check(NAME, False, text, removed))
    text = f"{found['extension']} exports {', '.join(extension.entry_points)}"
    return Built(Check(NAME, True, text, removed), _files(found, site, extension, runner))


def remove_stale_locks(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Remove the lock of every extension's build that nobody holds; says which.

    torch waits without end for a file `lock` beside the extension, which a killed build leaves
    behind. A build that lives keeps it open.
    """
    folder = environment.get("TORCH_EXTENSIONS_DIR")
    locks = sorted(Path(folder).glob("*/lock")) if folder else []
    removed = []
    held = _open_files() if locks else set()
    for lock in locks:
        with contextlib.suppress(FileNotFoundError):
            status = lock.lstat()
            if stat.S_ISREG(status.st_mode) and (status.st_dev, status.st_ino) not in held:
                lock.unlink()
                removed.append(f"removed {lock}, left by a build that was killed")
    return tuple(removed)


def _open_files() -> set[tuple[int, int]]:
    """(device, inode) of every file that a process of this user holds open."""
    found = set()
    for descriptor in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            status = os.stat(descriptor)  # noqa: PTH116 - follows the link, as it must
            found.add((status.st_dev, status.st_ino))
    return found


def _files(
    found: Mapping[str, Any], site: Path, extension: Extension, runner: Runner
) -> frozenset[Path]:
    source = runner.environment.get(extension.source_variable)
    names = [found["extension"], found["loader"], source, site / "torch/version.py"]
    return frozenset(Path(name) for name in names if name)
