"""The environment that the engine compiles in: which variables lead it away from its toolkit."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from hostlib.errors import EXIT_UNABLE, HostError

from cuda_toolkit.checks import Check

# Where torch and tilelang look for the toolkit, before they look for nvcc on PATH.
HOMES = ("CUDA_HOME", "CUDA_PATH")
# nvcc.profile only adds to these, so nvcc takes what the environment says as well; libraries that
# are named there come before the toolkit's. Shown by `nvcc --dryrun`.
PROFILE = (
    "INCLUDES",
    "SYSTEM_INCLUDES",
    "LIBRARIES",
    "CUDAFE_FLAGS",
    "NVVM_FLAGS",
    "OCG_FLAGS",
    "PTXAS_FLAGS",
    "NVLINK_FLAGS",
)
# Variables that change what nvcc, gcc or tilelang read and write, or which nvcc torch runs. No
# engine needs them.
STRAY = (
    "NVCC_PREPEND_FLAGS",
    "NVCC_APPEND_FLAGS",
    *PROFILE,
    "CPATH",
    "C_INCLUDE_PATH",
    "CPLUS_INCLUDE_PATH",
    "GCC_EXEC_PREFIX",
    "COMPILER_PATH",
    "LIBRARY_PATH",
    "DEPENDENCIES_OUTPUT",
    "SUNPRO_DEPENDENCIES",
    "PYTORCH_NVCC",
    "TL_CUTLASS_PATH",
    "TL_TEMPLATE_PATH",
)
CHOSEN_COMPILER = "NVCC_CCBIN"
# All that can change the outcome of a compilation.
STEERING = (*STRAY, *HOMES, CHOSEN_COMPILER, "LD_LIBRARY_PATH", "LD_PRELOAD")


def steering(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables of `environment` that can change the outcome of a compilation."""
    return {name: environment[name] for name in STEERING if environment.get(name)}


def digest(environment: Mapping[str, str]) -> str:
    """One digest of all variables and their values."""
    text = "\0".join(f"{name}={environment[name]}" for name in sorted(environment))
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()


def clean(environment: Mapping[str, str]) -> dict[str, str]:
    """`environment` without what leads away from a toolkit; the choice of a host compiler stays."""
    dropped = set(STEERING) - {CHOSEN_COMPILER}
    return {name: value for name, value in environment.items() if name not in dropped}


def check_host_compiler(environment: Mapping[str, str]) -> None:
    """Refuse an environment in which nvcc cannot work at all.

    Raises:
        HostError: it has no gcc (exit code 2).
    """
    if host_compiler(environment) is None:
        named = environment.get(CHOSEN_COMPILER)
        place = f"{CHOSEN_COMPILER}={named}: is no compiler" if named else "gcc: is not on PATH"
        raise HostError(
            f"{place}, and nvcc cannot work without one; install g++, or set {CHOSEN_COMPILER}",
            exit_code=EXIT_UNABLE,
        )


def host_compiler(environment: Mapping[str, str]) -> Path | None:
    """The gcc that nvcc would call, None when there is none. NVCC_CCBIN is a file or a folder."""
    named = environment.get(CHOSEN_COMPILER) or "gcc"
    # A plain name is not looked for where the caller stands: a login's home is closed to others.
    is_folder = Path(named).is_absolute() and Path(named).is_dir()
    name = f"{named}/gcc" if is_folder else named
    found = _which(name, environment)
    return found.resolve() if found else None


def nvcc_on_path(environment: Mapping[str, str]) -> Path | None:
    """The nvcc that a plain `nvcc` runs, as PATH names it; None when there is none."""
    return _which("nvcc", environment)


def check_environment(prefix: Path, environment: Mapping[str, str], engines: bool) -> Check:
    """Whether `environment` leads every compilation to the toolkit at `prefix`.

    Args:
        engines: it is an engine's own, not that of somebody's shell, so it must lead there; a
            shell's is only refused when it was made for CUDA and leads elsewhere.
    """
    homes = {name: environment[name] for name in HOMES if environment.get(name)}
    wrong = [
        f"{name}={value} is not {prefix}"
        for name, value in homes.items()
        if Path(value).resolve() != prefix
    ]
    if engines and not homes:
        wrong.append(f"{HOMES[0]} is not set; set it to {prefix}")
    if engines or homes:
        wrong += _wrong_path(prefix, nvcc_on_path(environment))
    wrong += [
        f"{name}={environment[name]} changes what is compiled with; unset it"
        for name in STRAY
        if environment.get(name)
    ]
    if wrong:
        return Check("environment", False, "; ".join(wrong))
    whose = "the engine's" if engines else "this shell's"
    return Check("environment", True, f"nothing in {whose} variables leads to another toolkit")


def _wrong_path(prefix: Path, found: Path | None) -> list[str]:
    if found is None:
        return [f"PATH has no nvcc; put {prefix / 'bin'} first"]
    # The folder may be a link, the file may not: nvcc looks for its profile beside its own name.
    if found.parent.resolve() == prefix / "bin" and not found.is_symlink():
        return []
    if found.resolve().is_relative_to(prefix):
        return [f"PATH leads to {found}, a symlink to the file: nvcc reads no nvcc.profile then"]
    return [f"PATH leads to {found}; put {prefix / 'bin'} first"]


def _which(name: str, environment: Mapping[str, str]) -> Path | None:
    found = shutil.which(name, path=environment.get("PATH", os.defpath))
    return Path(found) if found else None
