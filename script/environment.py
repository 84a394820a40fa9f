"""What every script does first: right Python, distribution packages, the hash-locked .venv.

Standard library only, for it runs before there is a .venv.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import io
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import TracebackType

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

from stack.exits import (  # noqa: E402
    EXIT_APT_LOCKED,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_NO_NETWORK,
    EXIT_NO_ROOT,
    EXIT_NO_SPACE,
    EXIT_USAGE,
)

VENV = REPOSITORY / ".venv"
PYTHON = VENV / "bin" / "python"
LOCKS = REPOSITORY / "requirements"
OLDEST_PYTHON = (3, 11)

APT_LOCK_SECONDS = 120
APT_DEADLINE_SECONDS = 1800
EXIT_TIMED_OUT = 124  # of timeout(1)
VENV_BYTES = 64 << 20  # less free than this explains why a venv cannot be made

# program that must be there: the distribution package that brings it
CONTROL_PROGRAMS = {"ssh": "openssh-client"}
LAB_PROGRAMS = {
    "mmdebstrap": "mmdebstrap",
    "systemd-nspawn": "systemd-container",
    "slirp4netns": "slirp4netns",
    "nft": "nftables",
    "ip": "iproute2",
    "ps": "procps",
    "xz": "xz-utils",
    "ssh": "openssh-client",
    "curl": "curl",  # the line to try that a deploy prints
}
# what the tests themselves call
DEV_PROGRAMS = {"git": "git", "g++": "g++", "curl": "curl"}
# what root must know of the caller's environment: sudo forgets it
KEPT_VARIABLES = re.compile(
    r"FABLE_LAB(_CACHE)?|SSL_CERT_(FILE|DIR)|REQUESTS_CA_BUNDLE|PIP_[A-Z_]+"
    r"|(https?|no|all|ftp)_proxy",
    re.IGNORECASE,
)
# Debian gives ordinary users a PATH without the system's own programs.
SEARCH_PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
LAB_ROOT_VERBS = ("up", "down")
DEBIAN_KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")


class ScriptError(Exception):
    """One line that names the thing, the place and the way out, and an exit code."""

    def __init__(self, message: str, exit_code: int = EXIT_FAILED) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def prepare(*, lab: bool = False, dev: bool = False) -> None:
    """Install what is missing, make `.venv`, and go on in it: replaces this process.

    Args:
        lab: also the programs that the lab needs; needs root.
        dev: also the checkers and test libraries.

    Raises:
        ScriptError: with the exit code of its kind.
    """
    owner = REPOSITORY.stat().st_uid
    if os.geteuid() == 0 and owner != 0 and os.environ.get("SUDO_UID") == str(owner):
        raise ScriptError(
            "run this as yourself, without sudo: it calls sudo where it needs root, and leaves "
            f"nothing of root's in {REPOSITORY}",
            EXIT_USAGE,
        )
    if sys.version_info < OLDEST_PYTHON:
        raise ScriptError(f"Python {sys.version.split()[0]} is too old: 3.11 or newer is needed")
    programs = {
        **(LAB_PROGRAMS if lab else CONTROL_PROGRAMS),
        **(DEV_PROGRAMS if lab and dev else {}),
    }
    packages = [
        name
        for program, name in programs.items()
        if shutil.which(program, path=SEARCH_PATH) is None
    ]
    if lab and not DEBIAN_KEYRING.exists():
        packages.append("debian-archive-keyring")
    if not PYTHON.exists() and not _can_make_venv():
        packages.append("python3-venv")
    install_packages(sorted(set(packages)))
    _make_venv(dev)
    if Path(sys.prefix) != VENV:
        sys.stdout.flush()
        os.execv(PYTHON, [str(PYTHON), *sys.argv])


def enter(script: str, *, lab: bool = False, dev: bool = False) -> None:
    """`prepare`, with its errors as one line on standard error and their exit code."""
    for descriptor in (0, 1, 2):  # closed ones would be taken by the next file that is opened
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # in order with what children print
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `script/… | head` ends quietly
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _end)
    sys.excepthook = functools.partial(_last_words, script)
    prepare(lab=lab, dev=dev)
    os.chdir(REPOSITORY)


def _end(_number: int, _frame: object) -> None:
    """End as Ctrl-C does: `subprocess.run` takes the child down with it."""
    raise KeyboardInterrupt


def _last_words(
    script: str, kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """One line for what a person can cause, with its exit code; a traceback for our own faults."""
    if issubclass(kind, KeyboardInterrupt):
        print(
            f"script/{script}: interrupted; a step that runs on a host goes on there, run this "
            "again to finish",
            file=sys.stderr,
            flush=True,
        )
        os._exit(EXIT_INTERRUPTED)
    if isinstance(error, ScriptError):
        print(f"script/{script}: {error}", file=sys.stderr, flush=True)
        os._exit(error.exit_code)
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EACCES):
        code = EXIT_NO_SPACE if error.errno == errno.ENOSPC else EXIT_FAILED
        print(f"script/{script}: {error.filename or 'disk'}: {error.strerror}", file=sys.stderr)
        os._exit(code)
    sys.__excepthook__(kind, error, trace)


def inside(path: str) -> str:
    """`path` of a file of the project as seen from its root, wherever the caller stands."""
    absolute = REPOSITORY / path if (REPOSITORY / path).exists() else Path(path).resolve()
    if absolute.is_relative_to(REPOSITORY):
        return str(absolute.relative_to(REPOSITORY))
    return str(absolute)


def lab_command(*arguments: str) -> list[str]:
    """`script/lab` with `arguments`; as root where its namespaces need that.

    Raises:
        ScriptError: root is needed and cannot be had.
    """
    verb = next((argument for argument in arguments if not argument.startswith("-")), "")
    command = [str(PYTHON), "-m", "lab", *arguments]
    if verb not in LAB_ROOT_VERBS:
        return command
    # root's bytecode would be in the way of the clone's owner
    return as_root(
        ["env", "PYTHONDONTWRITEBYTECODE=1", *command], "the lab needs root for its namespaces"
    )


def as_root(command: list[str], purpose: str) -> list[str]:
    """`command` as root, with the variables that it must know.

    Args:
        purpose: why; begins the error.

    Raises:
        ScriptError: neither root nor a sudo that lets this user in.
    """
    kept = {name: value for name, value in os.environ.items() if KEPT_VARIABLES.fullmatch(name)}
    assignments = [f"{name}={value}" for name, value in sorted(kept.items())]
    command = ["env", *assignments, *command]
    if os.geteuid() == 0:
        return command
    if shutil.which("sudo") is None:
        raise ScriptError(f"{purpose}: run this as root, or install sudo", EXIT_NO_ROOT)
    # without a question first: `sudo -v` asks even those who need no password for commands
    for probe in (["sudo", "-n", "true"], ["sudo", "-v"]):
        asking = "-n" not in probe
        if asking and not os.isatty(0):
            break
        done = subprocess.run(
            probe, stderr=None if asking else subprocess.PIPE, text=True, check=False
        )
        if done.returncode == 0:
            return ["sudo", *command]
        if not asking:
            said = done.stderr.strip().removeprefix("sudo: ").splitlines() or ["no reason given"]
    raise ScriptError(
        f"{purpose}, and sudo refuses ({said[-1]}); run this as root, or as a user whom sudo "
        "lets in",
        EXIT_NO_ROOT,
    )


def install_packages(packages: list[str]) -> None:
    """Install distribution packages, and say which.

    Raises:
        ScriptError: no root, apt locked, or no network.
    """
    if not packages:
        return
    if shutil.which("apt-get") is None:
        raise ScriptError(f"missing: {', '.join(packages)}; install them with your package manager")
    apt = as_root(
        [
            "timeout", str(APT_DEADLINE_SECONDS),  # apt can wait for a fetcher that is idle
            "env", "DEBIAN_FRONTEND=noninteractive", "LC_ALL=C",
            "apt-get", "-qq", "-o", f"DPkg::Lock::Timeout={APT_LOCK_SECONDS}",
        ],
        f"missing: {', '.join(packages)}",
    )  # fmt: skip
    print(f"installing distribution packages: {', '.join(packages)}")
    for arguments in (
        ["update"],
        ["install", "--yes", "--no-install-recommends", *packages],
    ):
        done = subprocess.run(
            [*apt, *arguments],
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            check=False,
        )
        if done.returncode == EXIT_TIMED_OUT:
            raise ScriptError(
                f"apt-get {arguments[0]}: no end within {APT_DEADLINE_SECONDS // 60} minutes; look "
                "for a full disk and at apt's sources, then run again"
            )
        if done.returncode != 0:
            raise _apt_failure(done.stderr, packages)


def _apt_failure(text: str, packages: list[str]) -> ScriptError:
    last = ([line for line in text.splitlines() if line.startswith("E:")] or ["no message"])[0]
    if "No space left" in text or "enough free space" in text:
        return ScriptError(
            f"apt: the disk is full ({last}); free some, then run again", EXIT_NO_SPACE
        )
    if any(said in text for said in ("Could not get lock", "Unable to lock", "Unable to acquire")):
        return ScriptError(
            f"apt is locked by another program ({last}); wait for it to end, then run again",
            EXIT_APT_LOCKED,
        )
    return ScriptError(
        f"{', '.join(packages)}: apt cannot install them ({last}); check the network and apt's "
        "sources, then run again",
        EXIT_NO_NETWORK,
    )


def _can_make_venv() -> bool:
    probe = [sys.executable, "-c", "import ensurepip, venv"]
    return subprocess.run(probe, capture_output=True, check=False).returncode == 0


def _make_venv(dev: bool) -> None:
    """Make `.venv` match its locks; a stamp of their digests makes a second run instant."""
    names = ["control.lock", "dev.lock"] if dev else ["control.lock"]
    stamp = VENV / "locks"
    installed = set(stamp.read_text().split()) if stamp.exists() else set()
    if _place() not in installed:  # none yet, cut off, copied from elsewhere, or its Python is gone
        installed = set()
    wanted = {hashlib.sha256((LOCKS / name).read_bytes()).hexdigest(): name for name in names}
    missing = [name for digest, name in wanted.items() if digest not in installed]
    if not missing:
        return
    if not installed:
        shutil.rmtree(VENV, ignore_errors=True)
    print(f"making .venv from {', '.join(missing)}")
    if not PYTHON.exists():
        made = subprocess.run(
            [sys.executable, "-m", "venv", str(VENV)], capture_output=True, text=True, check=False
        )
        if made.returncode != 0:
            raise _venv_failure("venv", made.stdout + made.stderr)
    requirements = [part for name in missing for part in ("--requirement", str(LOCKS / name))]
    done = subprocess.run(
        [
            str(PYTHON), "-m", "pip", "install", "--quiet", "--disable-pip-version-check",
            "--require-hashes", *requirements,
        ],
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )  # fmt: skip
    if done.returncode != 0:
        raise _venv_failure("pip", done.stderr)
    stamp.write_text("\n".join(sorted({*installed, *wanted, _place()})) + "\n")


def _place() -> str:
    """Digest of where `.venv` lies and which Python it has: what its locks alone do not say."""
    return hashlib.sha256(f"{VENV} {_version_of(PYTHON)}".encode()).hexdigest()


def _version_of(python: Path) -> str:
    """What an interpreter says of itself; empty when it does not run."""
    try:
        done = subprocess.run(
            [str(python), "-V"], capture_output=True, text=True, timeout=30, check=False
        )
    except OSError:
        return ""
    return done.stdout.strip()


def _venv_failure(program: str, text: str) -> ScriptError:
    """The error for a .venv that cannot be made, by what `program` printed."""
    said = text.splitlines()
    lines = [line for line in said if line.lower().startswith("error")] or [*said, "no message"]
    last = lines[0].strip()[:200]
    if "No space left" in text or shutil.disk_usage(VENV.parent).free < VENV_BYTES:
        return ScriptError(f"{VENV}: the disk is full; free some, then run again", EXIT_NO_SPACE)
    if "Permission denied" in text:
        return ScriptError(f"{VENV}: cannot be written; remove it or give it to this user")
    return ScriptError(
        f"{VENV}: {program} fails ({last}); check the network, then run again", EXIT_NO_NETWORK
    )
