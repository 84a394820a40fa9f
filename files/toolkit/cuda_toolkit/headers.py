"""Stage 1: whose headers nvcc opens, and which versions they and the compiler have."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from cuda_toolkit.checks import Check
from cuda_toolkit.nvcc import SHOWN_LINES, Nvcc
from cuda_toolkit.spec import Expected

_CUDA_HEADER = re.compile(
    r"(cuda|cu[A-Z]|cublas|cufft|cupti|curand|cusolver|cusparse|nvrtc|nvJitLink|nvToolsExt)"
)
_ESCAPED = re.compile(r"\\([ #:])|\$\$")


@dataclass(frozen=True)
class Opened:
    """What one compilation opened: the toolkit's, the library's, CUDA's from elsewhere."""

    own: frozenset[Path]
    used: frozenset[Path]
    foreign: tuple[Path, ...]

    @property
    def places(self) -> str:
        """The folders that foreign headers came from, for a person."""
        folders = sorted({str(path.parent) for path in self.foreign})
        return ", ".join(folders[:3])


def opened(nvcc: Nvcc, rule: str, names: frozenset[str], users: tuple[Path, ...] = ()) -> Opened:
    """Whose the prerequisites of make's `rule` are.

    Args:
        names: of the toolkit's headers, as from `own_names`.
        users: folders of a library whose headers may be named as CUDA's are.
    """
    named = {nvcc.runner.work / item for item in parse_dependencies(rule)}
    found = {path.resolve() for path in named}
    own = frozenset(path for path in found if path.is_relative_to(nvcc.prefix))
    used = frozenset(path for path in found - own if any(map(path.is_relative_to, users)))
    # A link in the toolkit borrows what it leads to, whatever name that has.
    inside = {path for path in named if _plain(path).is_relative_to(nvcc.prefix)}
    borrowed = {path.resolve() for path in inside} - own
    foreign = {*foreign_headers(found - own - used, names), *borrowed}
    return Opened(own, used, tuple(sorted(foreign)))


def check_origin(
    nvcc: Nvcc, expected: Expected, names: frozenset[str]
) -> tuple[Check, frozenset[Path]]:
    """Stage 1: every CUDA header that is opened is the toolkit's; also returns those headers."""
    name = "header origin"
    source = nvcc.runner.work / "origin.cu"
    source.write_text(
        "".join(
            f"#if __has_include(<{header}>)\n#include <{header}>\n#endif\n"
            for header in expected.required_headers
        )
    )
    # -M, not -MM: that one leaves system headers out, and would show nothing foreign.
    output, errors = nvcc.run(source, "-M")
    if errors:
        return Check(name, False, "nvcc -M failed", errors), frozenset()
    found = opened(nvcc, output, names)
    if found.foreign:
        return foreign_check(name, nvcc, found), frozenset()
    absent = [item for item in expected.required_headers if not _holds(found.own, item)]
    if absent:
        return Check(name, False, f"{nvcc.prefix}: lacks {', '.join(absent)}"), frozenset()
    text = f"{len(found.own)} CUDA headers opened, all of them in the toolkit"
    return Check(name, True, text), found.own


def foreign_check(name: str, nvcc: Nvcc, found: Opened) -> Check:
    """The check `name` failed: a compilation opened CUDA headers that are not the toolkit's."""
    text = f"{len(found.foreign)} CUDA headers come from {found.places}, not from {nvcc.prefix}"
    return Check(name, False, text, (*map(str, found.foreign[:SHOWN_LINES]), *nvcc.variables()))


def check_versions(nvcc: Nvcc, expected: Expected) -> Check:
    """Whether headers and compiler have the versions that are expected."""
    name = "versions"
    source = nvcc.runner.work / "versions.cu"
    source.write_text(
        "#include <cuda.h>\n#include <cuda_runtime_api.h>\n"
        "toolkit_versions CUDA_VERSION CUDART_VERSION "
        "__CUDACC_VER_MAJOR__ __CUDACC_VER_MINOR__ __CUDACC_VER_BUILD__\n"
    )
    output, errors = nvcc.run(source, "-E")
    # gcc puts line markers between macros that come from a system folder.
    plain = re.sub(r"^#.*\n", "", output, flags=re.MULTILINE)
    found = re.search(r"^toolkit_versions\s+" + r"\s+".join([r"(\d+)"] * 5), plain, re.MULTILINE)
    if errors or found is None:
        return Check(name, False, "the headers' versions cannot be read", errors)
    compiler = ".".join(found.groups()[2:])
    wrong = [
        f"{what} is {got}, expected {wanted}"
        for what, got, wanted in (
            ("CUDA_VERSION", found[1], str(expected.cuda_version)),
            ("CUDART_VERSION", found[2], str(expected.cuda_version)),
            ("nvcc", compiler, expected.compiler_version),
        )
        if got != wanted
    ]
    if wrong:
        return Check(name, False, "; ".join(wrong), nvcc.variables())
    return Check(name, True, f"CUDA_VERSION and CUDART_VERSION {found[1]}, nvcc {compiler}")


def parse_dependencies(text: str) -> list[str]:
    """The prerequisites of the first rule in make's format, as `gcc -M` writes it."""
    joined = text.replace("\\\n", " ")
    _, _, rest = joined.partition(": ")
    words = re.findall(r"(?:\\.|[^\s\\])+", rest)
    return [_ESCAPED.sub(lambda found: found[1] or "$", word) for word in words]


def own_names(prefix: Path, expected: Expected) -> frozenset[str]:
    """Every header that the toolkit brings, and every one that it should, as in an `#include`."""
    names = set(expected.required_headers)
    for top in {path.resolve() for path in (prefix / "include", *prefix.glob("targets/*/include"))}:
        for folder, _, files in os.walk(top):
            inner = Path(folder).relative_to(top)
            names.update(str(inner / file) for file in files)
    return frozenset(names)


def foreign_headers(outside: Iterable[Path], own: frozenset[str]) -> list[Path]:
    """Which headers outside the toolkit are CUDA's: by the toolkit's own list, or by name."""
    return sorted(
        path
        for path in outside
        if _CUDA_HEADER.match(path.name)
        or any("/".join(path.parts[start:]) in own for start in range(1, len(path.parts)))
    )


def _plain(path: Path) -> Path:
    """`path` without `..` and without following links: nvcc names headers by `bin/../include`."""
    return Path(os.path.normpath(path))


def _holds(found: Iterable[Path], header: str) -> bool:
    return any(str(path).endswith(f"/{header}") for path in found)
