"""What must hold before a switch touches the running engine; everything here only looks."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from hostlib.errors import HostError
from hostlib.progress import size_text

from enginectl import blockers, exits, systemd, toolkit
from enginectl.launch import check_paths, release_environment
from enginectl.paths import Places
from enginectl.record import say
from enginectl.release import Release, load_release
from enginectl.state import load_state, save_state

# Compiled kernels and the engine's own caches of one boot; the state and the history need less.
LEAST_FREE_BYTES = 512 << 20
CACHES = ("TORCH_EXTENSIONS_DIR", "VLLM_CACHE_ROOT")
PARSER_SECONDS = 180
# vLLM's own parser, without starting anything; 77 where this engine has none at that place.
PARSER = """
import sys
try:
    from vllm.entrypoints.openai import cli_args
    try:
        from vllm.utils.argparse_utils import FlexibleArgumentParser
    except ImportError:
        from vllm.utils import FlexibleArgumentParser
except ImportError:
    sys.exit(77)
arguments = cli_args.make_arg_parser(FlexibleArgumentParser()).parse_args(sys.argv[1:])
cli_args.validate_parsed_serve_args(arguments)
"""
NO_PARSER = 77


def checked_release(places: Places, name: str) -> Release:
    """The release `name`, complete on this host.

    Raises:
        HostError: it is unknown, malformed or incomplete; nothing was touched.
    """
    try:
        release = load_release(places, name)
        check_paths(release)
    except HostError as error:
        raise _refused(error.message, *error.details) from None
    return release


def prepare(places: Places, release: Release, engine: systemd.Unit) -> None:
    """See that a switch to `release` can be tried at all.

    Raises:
        HostError: it cannot; nothing was touched.
    """
    if not engine.loaded:
        raise _refused(
            f"{systemd.ENGINE_UNIT}: is not installed or not valid; deploy it, or see "
            f"`systemctl status {systemd.ENGINE_UNIT}`"
        )
    check_memory(release)
    check_strangers(release, engine)
    check_space(release)
    toolkit.prove(release, release_environment(release), say)
    check_arguments(release)
    try:
        save_state(places, load_state(places))
    except OSError as error:
        raise _refused(
            f"{places.state.parent}: cannot be written ({error.strerror}); free space there, "
            "nothing was touched"
        ) from None


def check_memory(release: Release) -> None:
    """Refuse what is known not to fit; say where that is not known.

    Raises:
        HostError: the KV cache is too small for what may run at once.
    """
    memory = release.memory
    if memory.verdict == "short":
        raise _refused(
            f"{release.name}: {memory.reason}; raise gpu_memory_utilization, or lower "
            "max_num_seqs or max_model_len"
        )
    if memory.verdict != "fits":
        say(f"warning: {release.name}: {memory.reason}")


def check_strangers(release: Release, engine: systemd.Unit) -> None:
    """Refuse while processes that are not the unit's hold the port or the cards.

    Raises:
        HostError: names each of them.
    """
    found = blockers.strangers(release.listen, systemd.all_processes(engine))
    if found:
        first, *others = [str(one) for one in found]
        raise _refused(f"{first}, and is not {systemd.ENGINE_UNIT}; end it first", *others)


def check_space(release: Release) -> None:
    """Refuse where the engine's caches have no room to grow.

    Raises:
        HostError: names the folder.
    """
    for key in CACHES:
        if (value := release.env.get(key)) is None:
            continue
        there = next(path for path in (Path(value), *Path(value).parents) if path.exists())
        free = shutil.disk_usage(there).free
        if free < LEAST_FREE_BYTES:
            raise _refused(
                f"{value}: {size_text(free)} are free there, {size_text(LEAST_FREE_BYTES)} are "
                "needed; free some"
            )


def check_arguments(release: Release) -> None:
    """Have the engine's own parser read the arguments, as the service user.

    Raises:
        HostError: it does not accept them.
    """
    python = release.paths["venv"] / "bin" / "python"
    if str(python) not in release.argv or "-m" not in release.argv or not python.exists():
        say("arguments: not checked, this engine is not a Python module of its venv")
        return
    arguments = release.argv[release.argv.index("-m") + 2 :]
    try:
        done = subprocess.run(
            [*toolkit.as_user(release.user), "nice", str(python), "-c", PARSER, *arguments],
            cwd=release.working_directory,
            env=release_environment(release),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            timeout=PARSER_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        say(f"arguments: not checked ({error})")
        return
    if done.returncode == NO_PARSER:
        say("arguments: not checked, this engine has no parser at vLLM's place")
    elif done.returncode != 0:
        words = [line for line in done.stderr.splitlines() if line.strip()] or ["without a word"]
        last = toolkit.printable(words[-1])
        raise _refused(f"{release.name}: the engine does not take its arguments: {last}")


def _refused(message: str, *details: str) -> HostError:
    return HostError(message, *details, exit_code=exits.EXIT_REFUSED)
