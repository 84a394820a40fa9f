"""The stamp of a toolkit: which proofs it passed, with which digests, and whether they still stand.

One file holds the latest proofs: a toolkit is proved by itself when it is installed, and again for
each engine that is built with it.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cuda_toolkit import environment as variables
from cuda_toolkit.nvcc import TOOLS
from cuda_toolkit.spec import Expected, canonical

STAMP_FILE = ".proof.json"
STEERING = variables.STEERING
FORMAT = 2
KEPT_PROOFS = 4
PROGRAM = (
    "checks.py", "environment.py", "extension.py", "headers.py", "nvcc.py", "probing.py",
    "proof.py", "runner.py", "probes/build_extension.py", "probes/hmax_nan.cu",
    "probes/tilelang_reduce.cu", "probes/tma_enum.cu",
)  # fmt: skip
_KEYS = {"proof_sha256", "question", "files", "checks"}


def question(expected: Expected, environment: Mapping[str, str]) -> dict[str, Any]:
    """What every proof depends on besides files: expectations, steering variables, compilers."""
    compiler = variables.host_compiler(environment)
    return {
        "expected": json.loads(canonical(asdict(expected))),
        "variables": variables.steering(environment),
        "nvcc_on_path": str(variables.nvcc_on_path(environment)),
        "host_compiler": [str(compiler), file_mark(compiler)] if compiler else None,
    }


def file_mark(path: Path | str) -> list[int] | None:
    """Size in bytes, modification time in ns, symlink or not: shows that a file was exchanged."""
    try:
        status = os.lstat(path)  # not Path's: there are a thousand files
        is_link = stat.S_ISLNK(status.st_mode)
        if is_link:
            status = os.stat(path)  # noqa: PTH116
    except OSError:
        return None
    return [status.st_size, status.st_mtime_ns, int(is_link)]


def program_digest() -> str:
    """Digest of the proof itself: its modules and its probes."""
    digest = hashlib.sha256()
    for name in PROGRAM:
        digest.update((Path(__file__).parent / name).read_bytes())
    return digest.hexdigest()


def make(
    prefix: Path,
    asked: Mapping[str, Any],
    files: Iterable[Path],
    checks: list[dict[str, Any]],
) -> bytes:
    """The stamp of `prefix` after a passed proof that `files` were read in; the latest proof first.

    Args:
        asked: as from `question`, and what else the proof depends on.
        files: the toolkit's and others'; the truth of `checks` hangs on them.
    """
    read_files = sorted(
        str(path.relative_to(prefix)) if path.is_relative_to(prefix) else str(path)
        for path in files
    )
    digest = hashlib.sha256()
    for name in read_files:
        digest.update(f"{name}\0{_sha256(prefix / name)}\n".encode())
    proof = {
        "proof_sha256": program_digest(),
        "question": dict(asked),
        "compiler_sha256": {name: _sha256(prefix / name) for name in TOOLS},
        "files_sha256": digest.hexdigest(),
        "files": {name: file_mark(prefix / name) for name in (*TOOLS, *read_files)},
        "checks": checks,
    }
    others = [other for other in read(prefix) if other["question"] != proof["question"]]
    content = {"format": FORMAT, "proofs": [proof, *others][:KEPT_PROOFS]}
    return json.dumps(content, separators=(",", ":")).encode()


def read(prefix: Path) -> list[dict[str, Any]]:
    """The proofs in the stamp of `prefix`, the latest first; empty when there is no usable one."""
    try:
        found = json.loads((prefix / STAMP_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        return []
    proofs = found.get("proofs")
    if not isinstance(proofs, list):
        return []
    return [proof for proof in proofs if isinstance(proof, dict) and proof.keys() >= _KEYS]


def answer(prefix: Path, asked: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """The checks of the proof that answered `asked`, None when none stands."""
    for proof in read(prefix):
        if proof["question"] == asked and _stale_reason(prefix, proof) is None:
            checks: list[dict[str, Any]] = proof["checks"]
            return checks
    return None


def stale_reason(prefix: Path, expected: Expected) -> str | None:
    """Why no proof in the stamp of `prefix` speaks for its files any more; None when one does."""
    proofs = read(prefix)
    if not proofs:
        return "never proved"
    wanted = json.loads(canonical(asdict(expected)))
    proofs = [proof for proof in proofs if proof["question"].get("expected") == wanted]
    if not proofs:
        return "proved against other expectations"
    reasons = [_stale_reason(prefix, proof) for proof in proofs]
    return None if None in reasons else reasons[0]


def _stale_reason(prefix: Path, proof: Mapping[str, Any]) -> str | None:
    if proof["proof_sha256"] != program_digest():
        return "proved by another proof"
    for name, mark in proof["files"].items():
        place = os.path.join(prefix, name)  # noqa: PTH118 - see file_mark
        if file_mark(place) != mark:
            state = "changed" if os.path.lexists(place) else "removed"
            return f"{name} was {state} since the proof"
    return None


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        digest = hashlib.sha256()
        while chunk := stream.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
