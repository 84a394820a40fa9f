"""Stage 2: probes that only complete headers of CUDA 12.8 compile for sm_70."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from cuda_toolkit.checks import Check, not_applicable
from cuda_toolkit.headers import foreign_check, opened
from cuda_toolkit.nvcc import ARCHITECTURE, Nvcc, cubin_target

PROBES = Path(__file__).with_name("probes")
OWN_PROBES = ("hmax_nan", "tma_enum")
TILELANG_PROBE = "tilelang_reduce"
TILELANG = "tilelang reduce.h"
# Below a venv's site-packages, as tilelang's wheel lays them out.
TILELANG_HEADER = Path("tilelang/src/tl_templates/cuda/reduce.h")
TILELANG_INCLUDES = (Path("tilelang/src"), Path("tilelang/3rdparty/cutlass/include"))


@dataclass(frozen=True)
class Compiled:
    """A check, and the headers that its compilation opened: the toolkit's and the library's."""

    check: Check
    headers: frozenset[Path] = frozenset()


def check_probe(nvcc: Nvcc, probe: str, cuda_version: int, names: frozenset[str]) -> Compiled:
    """Compile one of OWN_PROBES; `names` as from `own_names`."""
    return _compile(nvcc, f"probe {probe}", PROBES / f"{probe}.cu", cuda_version, names)


def check_tilelang(
    nvcc: Nvcc, venv: Path | None, cuda_version: int, names: frozenset[str]
) -> Compiled:
    """Compile tilelang's reduce.h with the CUTLASS that its wheel ships, where the venv has it."""
    if venv is None:
        return Compiled(not_applicable(TILELANG, "not there: no venv was named (--venv)"))
    site = site_with(venv, "tilelang")
    if site is None:
        return Compiled(not_applicable(TILELANG, f"not there: {venv} has no tilelang"))
    if not (site / TILELANG_HEADER).is_file():
        text = f"{site / TILELANG_HEADER}: is missing; build the venv anew"
        return Compiled(Check(TILELANG, False, text))
    includes = tuple((site / folder).resolve() for folder in TILELANG_INCLUDES)
    source = PROBES / f"{TILELANG_PROBE}.cu"
    name = f"{TILELANG} {_version(site)}".strip()
    return _compile(nvcc, name, source, cuda_version, names, includes=includes, standard="c++20")


def site_with(venv: Path, package: str) -> Path | None:
    """The site-packages of `venv` that hold the folder `package`; nothing is imported."""
    found = (site for site in sorted(venv.glob("lib/python3*/site-packages")))
    return next((site for site in found if (site / package).is_dir()), None)


def _version(site: Path) -> str:
    names = [path.name for path in site.glob("tilelang-*.dist-info")]
    return names[0].removeprefix("tilelang-").removesuffix(".dist-info") if names else ""


def _compile(
    nvcc: Nvcc,
    name: str,
    source: Path,
    cuda_version: int,
    names: frozenset[str],
    *,
    includes: Iterable[Path] = (),
    standard: str = "c++17",
) -> Compiled:
    cubin, rule = (nvcc.runner.work / f"{source.stem}.{kind}" for kind in ("cubin", "d"))
    folders = tuple(includes)
    arguments = ["-cubin", "-MD", "-MF", rule, "-o", cubin, *(f"-I{path}" for path in folders)]
    _, errors = nvcc.run(source, *map(str, arguments), standard=standard)
    # gcc writes the rule while it preprocesses: a compilation that fails later has one too.
    text = rule.read_text(errors="replace") if rule.is_file() else ""
    found = opened(nvcc, text, names, folders)
    if errors or not cubin.is_file():
        origin = f"; its CUDA headers come from {found.places}" if found.foreign else ""
        check = Check(name, False, f"does not compile for sm_{ARCHITECTURE}{origin}", errors)
        return Compiled(check)
    if found.foreign:
        return Compiled(foreign_check(name, nvcc, found))
    release = cuda_version // 1000 * 10 + cuda_version % 1000 // 10
    target = cubin_target(cubin.read_bytes())
    if target != (ARCHITECTURE, release):
        text = f"gave code for {target}, expected sm_{ARCHITECTURE} of CUDA {release / 10}"
        return Compiled(Check(name, False, text))
    text = f"compiles for sm_{ARCHITECTURE}, assembled by CUDA {release / 10}"
    return Compiled(Check(name, True, text), found.own | found.used)
