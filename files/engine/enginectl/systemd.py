"""The only module that talks to systemd."""

from __future__ import annotations

import contextlib
import hashlib
import select
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hostlib.errors import EXIT_UNABLE, HostError

from enginectl.timing import SWITCH_STOP_SECONDS

SYSTEMCTL = "/usr/bin/systemctl"
ENGINE_UNIT = "fable-engine.service"
SWITCH_UNIT = "fable-switch.service"
SETTLE_UNIT = "fable-settle.service"

QUERY_SECONDS = 30

_PROPERTIES = (
    "LoadState,ActiveState,SubState,NRestarts,MainPID,InvocationID,ControlGroup,UnitFileState,"
    "FragmentPath,DropInPaths"
)
_CGROUP_ROOTS = (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/systemd"))


@dataclass(frozen=True)
class Unit:
    """What systemd knows of a unit; `main_pid` is 0 and `invocation` empty while it has none."""

    loaded: bool
    active: str
    sub: str
    restarts: int
    main_pid: int
    invocation: str
    control_group: str
    enabled: bool
    texts: tuple[Path, ...]

    @property
    def running(self) -> bool:
        """It has been started and its main process lives, as far as systemd knows."""
        return self.active in ("active", "activating") and self.main_pid > 0

    @property
    def text_digest(self) -> str:
        """Digest of the unit's file and drop-ins as they lie there now."""
        digest = hashlib.sha256()
        for path in self.texts:
            with contextlib.suppress(OSError):
                digest.update(path.read_bytes() + b"\0")
        return digest.hexdigest()[:16]


def show(*units: str) -> list[Unit]:
    """The state of each of `units`, in order, by one call.

    Raises:
        HostError: systemd does not answer.
    """
    answer = _systemctl(["show", "--property", _PROPERTIES, *units], QUERY_SECONDS)
    found = [parse_properties(block) for block in answer.split("\n\n") if block.strip()]
    if len(found) != len(units):
        raise HostError(
            f"systemctl show {' '.join(units)}: answered for {len(found)} of {len(units)} units",
            exit_code=EXIT_UNABLE,
        )
    return found


def parse_properties(block: str) -> Unit:
    """One unit's `KEY=value` lines as `systemctl show` prints them."""
    values = dict(line.split("=", 1) for line in block.splitlines() if "=" in line)
    return Unit(
        loaded=values.get("LoadState") == "loaded",
        active=values.get("ActiveState", ""),
        sub=values.get("SubState", ""),
        restarts=int(values.get("NRestarts") or 0),
        main_pid=int(values.get("MainPID") or 0),
        invocation=values.get("InvocationID", ""),
        control_group=values.get("ControlGroup", ""),
        enabled=values.get("UnitFileState", "") in ("enabled", "enabled-runtime"),
        texts=tuple(
            Path(word)
            for key in ("FragmentPath", "DropInPaths")
            for word in values.get(key, "").split()
        ),
    )


def ended(handle: int, seconds: float) -> bool:
    """Whether the process behind a pidfd has ended; waits up to `seconds` for that."""
    return bool(select.select([handle], [], [], seconds)[0])


def queue(verb: str, unit: str) -> None:
    """Ask for a job and wait for nothing: what follows holds even if this program is killed.

    Raises:
        HostError: systemd refused it, as it does during a shutdown.
    """
    _systemctl(["--no-block", verb, unit], QUERY_SECONDS)


def processes(control_group: str) -> list[int]:
    """Process ids in the control group (as `systemctl show` names it) and all below it."""
    found: list[int] = []
    for root in _CGROUP_ROOTS if control_group else ():
        for file in (root / control_group.lstrip("/")).rglob("cgroup.procs"):
            try:
                found += [int(line) for line in file.read_text().split()]
            except OSError:
                continue  # the group went away while it was read: empty
    return sorted(set(found))


def all_processes(unit: Unit) -> list[int]:
    """Every process of `unit`: its main process and whatever else its control group holds."""
    return sorted({*processes(unit.control_group), *([unit.main_pid] if unit.main_pid else [])})


def run_as_switch(argv: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run `argv` as the service fable-switch.service, apart from this terminal and session.

    Its output comes here; its exit code is returned (255 if a signal ended it, 1 if systemd
    could not start it).

    Raises:
        HostError: systemd-run is missing.
    """
    command = [
        "systemd-run",
        f"--unit={SWITCH_UNIT}",
        "--description=Switch of the engine's release",
        "--wait",
        "--collect",
        "--pipe",
        "--quiet",
        "--property=Type=exec",
        f"--property=TimeoutStopSec={SWITCH_STOP_SECONDS}",
        # However it ends, SIGKILL included: see that the committed release serves.
        f"--property=ExecStopPost={SYSTEMCTL} --no-block start {SETTLE_UNIT}",
        *(f"--setenv={key}={value}" for key, value in environment.items()),
        "--",
        # systemd expands $ in a command line; a doubled one stands for itself
        *(word.replace("$", "$$") for word in argv),
    ]
    try:
        return subprocess.run(command, stdin=subprocess.DEVNULL, check=False).returncode
    except FileNotFoundError:
        raise HostError(
            "systemd-run: not found; a switch needs systemd on this host", exit_code=EXIT_UNABLE
        ) from None


def _systemctl(arguments: Sequence[str], seconds: float) -> str:
    shown = f"systemctl {' '.join(arguments)}"
    try:
        done = subprocess.run(
            ["systemctl", *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
    except FileNotFoundError:
        raise HostError(
            "systemctl: not found; this host has no systemd", exit_code=EXIT_UNABLE
        ) from None
    except subprocess.TimeoutExpired:
        raise HostError(
            f"{shown}: not done after {seconds:.0f} s; see `systemctl list-jobs`",
            exit_code=EXIT_UNABLE,
        ) from None
    if done.returncode != 0:
        first, *rest = done.stderr.strip().splitlines() or ["failed without a word"]
        raise HostError(f"systemctl {arguments[0]}: {first}", *rest, exit_code=EXIT_UNABLE)
    return done.stdout
