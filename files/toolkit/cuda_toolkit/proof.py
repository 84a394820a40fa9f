"""The offline proof: does this compiler use this toolkit's own, complete headers?

Stage 1 asks nvcc which headers it opens and which versions they carry; stage 2 compiles probes for
sm_70 that only CUDA 12.8 headers satisfy, tilelang's own header among them; stage 3 builds the
engine's kernel extension. All of it in the environment that the engine has, so that a stray
variable is caught.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from hostlib.adoption import check_owner
from hostlib.atomic import write_file
from hostlib.errors import (
    EXIT_FAILED,
    EXIT_OK,
    EXIT_UNABLE,
    HostError,
    interrupt_on_sigterm,
    run_main,
)
from hostlib.strict_json import parse_object

from cuda_toolkit import environment as variables
from cuda_toolkit import stamp
from cuda_toolkit.checks import Check, Report, not_applicable, show
from cuda_toolkit.extension import EXTENSIONS, NAME, Extension, check_extension, load_extension
from cuda_toolkit.headers import check_origin, check_versions, own_names
from cuda_toolkit.nvcc import HostCompilerTooNew, Nvcc, check_compiler, too_new, usable
from cuda_toolkit.probing import OWN_PROBES, check_probe, check_tilelang, site_with
from cuda_toolkit.runner import Runner
from cuda_toolkit.spec import Expected, expected_of, load_expected

Tell = Callable[[Check], None]


@dataclass(frozen=True)
class Subject:
    """What is to be proved.

    Attributes:
        prefix: folder of the toolkit.
        environment: the variables that everything is compiled with.
        engines: `environment` is an engine's own, not that of somebody's shell.
        venv: the engine's; its tilelang is compiled, and its torch builds the extension.
        extension: how the engine builds its kernels; None when it builds none.
    """

    prefix: Path
    expected: Expected
    environment: Mapping[str, str]
    engines: bool = False
    venv: Path | None = None
    extension: Extension | None = None

    @property
    def question(self) -> dict[str, Any]:
        """What a stamp must answer: the same question of the same files has the same answer."""
        packages = ("tilelang", "torch") if self.venv else ()
        return {
            **stamp.question(self.expected, self.environment),
            "engines": self.engines,
            "venv": str(self.venv),
            "packages": [name for name in packages if self.venv and site_with(self.venv, name)],
            "extension": repr(self.extension),
            # An extension's loader may read any variable.
            "variables_sha256": variables.digest(self.environment) if self.extension else None,
        }


def prove(
    prefix: Path, expected: Expected, environment: Mapping[str, str], deep: bool = False
) -> Report:
    """Prove the toolkit at `prefix` by itself; see `prove_subject`."""
    return prove_subject(Subject(prefix, expected, environment), deep)


def prove_subject(subject: Subject, deep: bool = False, tell: Tell | None = None) -> Report:
    """Prove the subject, or read its stamp when nothing changed since.

    A passed proof leaves its stamp in the toolkit; a failed one changes nothing there.

    Args:
        deep: prove anew even when the stamp is good.
        tell: is given each check when it is known.

    Raises:
        HostError: no host compiler, or prefix or venv is no folder (exit code 2).
    """
    _check_folder(subject.prefix, "the toolkit")
    if subject.venv is not None:
        _check_folder(subject.venv, "the venv")
    subject = replace(subject, prefix=subject.prefix.resolve())
    prefix, asked = subject.prefix, subject.question
    known = None if deep else stamp.answer(prefix, asked)
    if known is not None:
        found = (Check(**{**check, "details": ()}) for check in known)
        return Report(str(prefix), from_stamp=True, checks=tuple(found))
    variables.check_host_compiler(subject.environment)
    checks: list[Check] = []
    files: set[Path] = set()
    with tempfile.TemporaryDirectory(prefix="cuda-proof.") as folder:
        runner = Runner(subject.environment, Path(folder).resolve())
        try:
            for check, read_files in _checks(subject, runner):
                checks.append(check)
                files |= read_files
                if tell:
                    tell(check)
        finally:
            runner.stop()
    report = Report(str(prefix), from_stamp=False, checks=tuple(checks))
    if report.ok:
        # What was done on the way, such as a removed lock, is said once.
        stamped = [asdict(replace(check, details=())) for check in checks]
        content = stamp.make(prefix, asked, files, stamped)
        with contextlib.suppress(OSError):  # what cannot be noted down was proved all the same
            write_file(prefix / stamp.STAMP_FILE, content)
    return report


def _checks(subject: Subject, runner: Runner) -> Iterator[tuple[Check, frozenset[Path]]]:
    """Every check in order, and the files that its truth hangs on."""
    none: frozenset[Path] = frozenset()
    passed = True
    first = (
        variables.check_environment(subject.prefix, subject.environment, subject.engines),
        check_compiler(subject.prefix),
    )
    for check in first:
        passed &= check.ok
        yield check, none
    if not usable(subject.prefix):
        return
    for check, files in _compiled(subject, runner):
        passed &= check.ok
        yield check, files
    if passed:
        built = check_extension(runner, subject.venv, subject.extension)
        yield built.check, built.files
    else:
        yield not_applicable(NAME, "not built: a check above failed"), none


def _compiled(subject: Subject, runner: Runner) -> Iterator[tuple[Check, frozenset[Path]]]:
    """Stages 1 and 2: compilations that do not wait for each other."""
    nvcc = Nvcc(subject.prefix, runner)
    expected = subject.expected
    names = own_names(subject.prefix, expected)
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        try:
            # The longest first: the others run beside it.
            tilelang = pool.submit(check_tilelang, nvcc, subject.venv, expected.cuda_version, names)
            origin = pool.submit(check_origin, nvcc, expected, names)
            versions = pool.submit(check_versions, nvcc, expected)
            probes = [
                pool.submit(check_probe, nvcc, probe, expected.cuda_version, names)
                for probe in OWN_PROBES
            ]
            yield origin.result()
            yield versions.result(), frozenset()
            for probe in (*probes, tilelang):
                yield probe.result().check, probe.result().headers
        except HostCompilerTooNew as error:
            pool.shutdown(cancel_futures=True)
            yield too_new(nvcc, error.newest), frozenset()
        except BaseException:
            runner.stop()
            raise


def run(argv: list[str] | None = None) -> int:
    """`cuda-proof`: exit code 0 proved, 1 a check failed, 2 could not run."""
    options = _parser().parse_args(argv)
    subject = _subject(options)
    for folder in (subject.prefix, subject.venv):
        if folder is not None and folder.exists():
            check_owner(folder)
    stream = sys.stderr if options.json else sys.stdout
    report = prove_subject(subject, options.deep, lambda check: show(check, stream))
    if report.from_stamp:
        for check in report.checks:
            show(check, stream, from_stamp=True)
    if options.json:
        print(json.dumps(report.as_json()))
    return EXIT_OK if report.ok else EXIT_FAILED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="cuda-proof",
        description="Prove that a CUDA toolkit is whole and its compiler uses its own headers.",
        epilog="exit codes: 0 proved, 1 a check failed, 2 could not run",
        allow_abbrev=False,
    )
    what = parser.add_argument_group("what is proved")
    what.add_argument("prefix", type=Path, nargs="?", help="folder of the toolkit")
    what.add_argument(
        "--release", type=Path, metavar="FILE",
        help="toolkit, venv, engine and environment of this release.json",
    )  # fmt: skip
    what.add_argument("--venv", type=Path, help="venv whose tilelang and torch are tried too")
    what.add_argument("--engine", metavar="NAME", help="engine whose kernel extension is built")
    what.add_argument(
        "--environment", metavar="FILE",
        help="the engine's variables, a JSON object; - is standard input (default: this shell's)",
    )  # fmt: skip
    what.add_argument("--spec", type=Path, help="expectations (default: the toolkit's own)")
    what.add_argument(
        "--extensions", type=Path, metavar="FILE", default=EXTENSIONS,
        help="how each engine builds its kernels (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--deep", action="store_true", help="prove anew, whatever the stamp says")
    parser.add_argument(
        "--json", action="store_true", help="one JSON object on standard output, lines on error"
    )
    return parser


def _subject(options: argparse.Namespace) -> Subject:
    prefix, venv, engine = options.prefix, options.venv, options.engine
    environment: Mapping[str, str] = os.environ
    if options.release:
        if prefix or venv or engine or options.environment:
            raise HostError(
                "--release: says all of it; leave out PREFIX, --venv, --engine and --environment",
                exit_code=EXIT_UNABLE,
            )
        release = _object(options.release.read_bytes(), str(options.release))
        environment = _texts(release.get("env"), f"{options.release}: env")
        paths = _texts(release.get("paths"), f"{options.release}: paths")
        try:
            prefix, venv = Path(paths["toolkit"]), Path(paths["venv"])
        except KeyError as error:
            raise HostError(
                f"{options.release}: paths: {error} is missing", exit_code=EXIT_UNABLE
            ) from None
        engine = str(release.get("engine"))
    elif options.environment == "-":
        environment = _texts(_object(sys.stdin.buffer.read(), "standard input"), "standard input")
    elif options.environment:
        content = Path(options.environment).read_bytes()
        environment = _texts(_object(content, options.environment), options.environment)
    if prefix is None:
        raise HostError("name the folder of a toolkit, or --release FILE", exit_code=EXIT_UNABLE)
    _check_folder(prefix, "the toolkit")
    return Subject(
        prefix=prefix,
        expected=load_expected(options.spec) if options.spec else expected_of(prefix),
        environment=environment,
        engines=environment is not os.environ,
        venv=venv.resolve() if venv else None,
        extension=load_extension(options.extensions, engine) if engine else None,
    )


def _check_folder(place: Path, what: str) -> None:
    if not place.is_dir():
        raise HostError(f"{place}: is no folder; install {what} first", exit_code=EXIT_UNABLE)


def _object(text: bytes, place: str) -> dict[str, Any]:
    try:
        return parse_object(text, place, "write it anew")
    except HostError as error:
        raise HostError(error.message, exit_code=EXIT_UNABLE) from None


def _texts(found: object, place: str) -> dict[str, str]:
    if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
        raise HostError(f"{place}: must be an object of texts", exit_code=EXIT_UNABLE)
    return found


def main() -> int:
    """The program, with errors as one line."""
    interrupt_on_sigterm()
    return run_main("cuda-proof", run)
