"""NVIDIA's self-installing file, run without root into a staged tree.

It writes its log to one fixed place and dies in it when another user owns that; it needs a library
that bare hosts lack; it takes its surroundings for a desktop's. All of that is looked at first.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import stat
import subprocess
import sys
import time
from pathlib import Path

from hostlib.download import check_file, fetch, is_local, sha256_file
from hostlib.errors import EXIT_UNABLE, HostError
from hostlib.parallel import StoppableProgress

from cuda_toolkit import census
from cuda_toolkit.spec import Runfile

LOG = Path("/tmp/cuda-installer.log")  # noqa: S108 - the runfile's own, not to be changed
LIBRARY = "libxml2.so.2"
DEADLINE_S = 3600.0
TOLD_EVERY_S = 10.0
SHOWN_LINES = 8
UNWANTED = ("DISPLAY", "SUDO_USER")  # it would ask for a desktop, or write as another user


def make_tree(source: Runfile, archives: Path, staging: Path, lock: int) -> Path:
    """Check the runfile, and let it fill `staging`/tree; with a census.

    Args:
        archives: where a runfile from a URL is kept; one on this host stays where it is.
        lock: descriptor of the installer's lock: the runfile inherits it, so that no other
            installer begins while it still runs.

    Raises:
        HostError: another digest, a host it cannot run on, or a failure of it.
    """
    check_host()
    file = _checked(source, archives)
    tree, scratch = staging / "tree", staging / ".scratch"
    scratch.mkdir()
    _run(arguments(file, tree, scratch), staging / "output", lock)
    if not tree.is_dir():
        raise HostError(f"{file}: ended well but made no {tree.name}; this is no CUDA runfile")
    _make_links_relative(tree)
    items = census.take(tree, "runfile")
    census.check_links(tree, items, "take the redistributable archives instead")
    (tree / census.CENSUS_FILE).write_bytes(census.to_bytes(items))
    return tree


def arguments(file: Path, tree: Path, scratch: Path) -> list[str]:
    """The command that installs the toolkit alone, into `tree`, without root and questions."""
    return [
        "sh", str(file), "--silent", "--toolkit", f"--toolkitpath={tree}", f"--defaultroot={tree}",
        "--override", "--no-man-page", "--no-drm", f"--tmpdir={scratch}",
    ]  # fmt: skip


def environment() -> dict[str, str]:
    """The caller's environment, without what leads the runfile astray."""
    kept = {name: value for name, value in os.environ.items() if name not in UNWANTED}
    return {**kept, "LANG": "C", "LC_ALL": "C"}


def check_host() -> None:
    """Refuse a host on which the runfile is known to crash.

    Raises:
        HostError: another user's log stands in its way, or its library is missing (exit code 2).
    """
    with contextlib.suppress(FileNotFoundError):
        log = LOG.lstat()
        if log.st_uid != os.getuid() or not stat.S_ISREG(log.st_mode):
            raise HostError(
                f"{LOG}: belongs to another user (uid {log.st_uid}) or is no file, and the runfile "
                "crashes on it; have it removed, then run again",
                exit_code=EXIT_UNABLE,
            )
    try:
        ctypes.CDLL(LIBRARY)
    except OSError as error:
        raise HostError(
            f"{LIBRARY}: the runfile needs it and it cannot be loaded; install libxml2",
            str(error),
            exit_code=EXIT_UNABLE,
        ) from None


def _make_links_relative(tree: Path) -> None:
    """Links that name the staged tree by its whole path would lead nowhere once it is renamed."""
    for folder, *names in os.walk(tree):
        for link in (Path(folder, name) for kind in names for name in kind):
            if link.is_symlink() and link.readlink().is_relative_to(tree):
                target = os.path.relpath(link.readlink(), folder)
                link.unlink()
                link.symlink_to(target)


def _checked(source: Runfile, archives: Path) -> Path:
    archives.mkdir(exist_ok=True)
    progress = StoppableProgress("fetching the runfile", source.size)
    if not is_local(source.location):
        file = archives / source.location.rpartition("/")[2]
        if not file.exists() or sha256_file(file, progress) != source.sha256:
            file.unlink(missing_ok=True)
            fetch(source.location, file, source.sha256, source.size, progress, durable=False)
    else:
        file = Path(source.location).absolute()
        check_file(file, source.size, source.sha256, progress)
    progress.close()
    return file


def _run(command: list[str], output: Path, lock: int) -> None:
    began = time.monotonic()
    with (
        output.open("wb") as stream,
        subprocess.Popen(
            command, env=environment(), stdin=subprocess.DEVNULL, stdout=stream,
            stderr=subprocess.STDOUT, pass_fds=(lock,), start_new_session=True,
        ) as process,
    ):  # fmt: skip
        try:
            while process.poll() is None:
                elapsed = time.monotonic() - began
                if elapsed > DEADLINE_S:
                    raise HostError(f"{command[1]}: did not end within {DEADLINE_S:.0f} s")
                try:
                    process.wait(TOLD_EVERY_S)
                except subprocess.TimeoutExpired:
                    print(f"runfile: at work for {elapsed:.0f} s", file=sys.stderr, flush=True)
        except BaseException:
            os.killpg(process.pid, 9)
            raise
    told = _last_lines(output)
    if process.returncode != 0:
        raise HostError(
            f"{command[1]}: failed with {process.returncode}; its own words are below, more may be "
            f"in {LOG}",
            *told,
        )
    LOG.unlink(missing_ok=True)  # it would stand in another user's way


def _last_lines(output: Path) -> list[str]:
    text = output.read_text(errors="replace")
    return [line for line in text.splitlines() if line.strip()][-SHOWN_LINES:]
