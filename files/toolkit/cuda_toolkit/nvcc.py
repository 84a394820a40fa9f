"""The compiler under proof: its parts, its runs, what its failures mean."""

from __future__ import annotations

import os
import re
import struct
from dataclasses import dataclass
from pathlib import Path

from cuda_toolkit.checks import Check
from cuda_toolkit.environment import host_compiler, steering
from cuda_toolkit.runner import Runner

ARCHITECTURE = 70
COMPILE_DEADLINE_S = 300.0
SHOWN_LINES = 8
EM_CUDA = 190  # ELF machine number of a cubin
TOOLS = (
    "bin/nvcc",
    "bin/nvcc.profile",
    "bin/cudafe++",
    "bin/fatbinary",
    "bin/ptxas",
    "nvvm/bin/cicc",
    "nvvm/libdevice/libdevice.10.bc",
)
_TOO_NEW = re.compile(r"unsupported GNU version.*?later than (\d+)", re.DOTALL)


class HostCompilerTooNew(Exception):
    """nvcc refuses its gcc; `newest` is the newest major version that it takes."""

    def __init__(self, newest: str) -> None:
        super().__init__(newest)
        self.newest = newest


@dataclass(frozen=True)
class Nvcc:
    """The compiler of the toolkit at `prefix`, run by `runner`."""

    prefix: Path
    runner: Runner

    def run(
        self, source: Path, *arguments: str, standard: str = "c++17"
    ) -> tuple[str, tuple[str, ...]]:
        """Run it on `source`; standard output, and the reasons of a failure (else none).

        Raises:
            HostCompilerTooNew: nvcc's own header crt/host_config.h refuses the gcc.
        """
        command: list[str | Path] = [
            self.prefix / "bin/nvcc", f"-arch=sm_{ARCHITECTURE}", f"-std={standard}",
            *arguments, source,
        ]  # fmt: skip
        done = self.runner.run(command, COMPILE_DEADLINE_S)
        if done.code is None:
            return "", (f"nvcc did not end within {COMPILE_DEADLINE_S:.0f} s",)
        refused = _TOO_NEW.search(done.errors) if done.code else None
        if refused:
            raise HostCompilerTooNew(refused[1])
        return done.output, self.explain(done.errors) if done.code else ()

    def explain(self, errors: str) -> tuple[str, ...]:
        """The lines of a failure that a person needs, and the variables that may be behind it."""
        lines = [line for line in errors.splitlines() if line.strip()]
        telling = [line for line in lines if re.search(r"\b(errors?|fatal)\b", line)] or lines
        shown = telling[:SHOWN_LINES] or ["nvcc failed without a word"]
        if len(telling) > SHOWN_LINES:
            shown[-1] = telling[-1]  # the last line counts the errors
        return (*shown, *self.variables())

    def variables(self) -> tuple[str, ...]:
        """The steering variables that are set, as `NAME=value`."""
        return tuple(f"{name}={value}" for name, value in steering(self.runner.environment).items())


def check_compiler(prefix: Path) -> Check:
    """Whether the parts of the compiler are there and nvcc will find its profile."""
    nvcc = prefix / "bin/nvcc"
    if nvcc.is_symlink():
        return Check(
            "compiler", False,
            f"{nvcc}: is a symlink to a file, so nvcc reads no nvcc.profile and has no include "
            "path; link the folder instead",
            (f"it points to {nvcc.readlink()}",),
        )  # fmt: skip
    missing = [name for name in TOOLS if not (prefix / name).is_file()]
    if missing:
        return Check("compiler", False, f"{prefix}: lacks {', '.join(missing)}")
    return Check("compiler", True, f"{len(TOOLS)} parts of the compiler are there")


def usable(prefix: Path) -> bool:
    """Whether the compiler can at least be asked."""
    nvcc = prefix / "bin/nvcc"
    return os.access(nvcc, os.X_OK) and nvcc.is_file() and not nvcc.is_symlink()


def too_new(nvcc: Nvcc, newest: str) -> Check:
    """The one finding that matters when nvcc refuses the gcc that it finds."""
    program = nvcc.prefix / "bin/nvcc"
    variables = dict(nvcc.runner.environment)
    way_out = f"set NVCC_CCBIN=/usr/bin/g++-{newest} in the engine's environment"
    if b"NVCC_CCBIN" not in program.read_bytes():  # as in 12.4
        variables.pop("NVCC_CCBIN", None)
        way_out = "make it the first gcc on the engine's PATH"
    compiler = host_compiler(variables)
    asked = nvcc.runner.run(
        [compiler or "gcc", "-dumpfullversion", "-dumpversion"], COMPILE_DEADLINE_S
    )
    version = asked.output.strip() or "of unknown version"
    return Check(
        "host compiler", False,
        f"{compiler} is GCC {version}, and {program} takes none newer than {newest}; "
        f"install g++-{newest} and {way_out}",
    )  # fmt: skip


def cubin_target(content: bytes) -> tuple[int, int] | None:
    """(architecture, ten times the CUDA release) in a cubin's ELF header; None for other files.

    ptxas writes the release to e_version and the architecture to the low byte of e_flags.
    """
    if len(content) < 64 or content[:5] != b"\x7fELF\x02":
        return None
    machine, release = struct.unpack_from("<HI", content, 18)
    (flags,) = struct.unpack_from("<I", content, 48)
    return (flags & 0xFF, release) if machine == EM_CUDA else None
