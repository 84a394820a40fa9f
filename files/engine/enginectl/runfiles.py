"""What a reboot may forget: the candidate of a switch, the latest start and its verdict, a hold."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hostlib.atomic import fsync_dir, write_file
from hostlib.errors import HostError

from enginectl import strict
from enginectl.paths import Places
from enginectl.release import check_name

FORMAT = 1

SERVES = "serves"
DEGRADED = "degraded"
NO_ANSWER = "no answer"
BLOCKED = "blocked"

_TRIAL: strict.Types = {"format": int, "release": str, "invocation": str}
_START: strict.Types = {
    "format": int,
    "release": str,
    "invocation": str,
    "trial": str,
    "unit_text": str,
}
_VERDICT: strict.Types = {
    "format": int,
    "release": str,
    "invocation": str,
    "trial": str,
    "outcome": str,
    "detail": str,
    "gates": list,
    "steps": list,
}
_HOLD: strict.Types = {"format": int, "by": str, "reason": str}


@dataclass(frozen=True)
class Trial:
    """The candidate of a running switch, valid while that switch's systemd invocation is active."""

    release: str
    invocation: str


@dataclass(frozen=True)
class Start:
    """What one start of the unit runs.

    Attributes:
        release: its name.
        invocation: systemd's id of this start.
        trial: the invocation of the switch that tries it; empty on an unattended start.
        unit_text: digest of the unit's text, as `systemd.text_digest` makes it.
    """

    release: str
    invocation: str
    trial: str
    unit_text: str


@dataclass(frozen=True)
class Verdict:
    """How one start of the unit was judged: `outcome` is one of the four above.

    `gates` and `steps` are as in the history.
    """

    release: str
    invocation: str
    trial: str
    outcome: str
    detail: str
    gates: list[dict[str, Any]] = field(default_factory=list)
    steps: list[dict[str, Any]] = field(default_factory=list)

    @property
    def answers(self) -> bool:
        """Whether this start serves, with all gates passed or without."""
        return self.outcome in (SERVES, DEGRADED)


@dataclass(frozen=True)
class Hold:
    """Who wants the engine to stay down, and why."""

    by: str
    reason: str


def load_trial(places: Places) -> Trial | None:
    """The candidate that a switch has named, if any.

    Raises:
        HostError: the file is damaged.
        OSError: it cannot be read.
    """
    value = _load(places.trial, _TRIAL)
    if value is None:
        return None
    try:
        check_name(value["release"])
    except HostError as error:
        raise HostError(f"{places.trial}: release: {error.message}") from None
    return Trial(**value)


def load_start(places: Places, invocation: str) -> Start | None:
    """What the start with this invocation runs; None if it was not written down.

    Raises:
        OSError: the file cannot be read.
    """
    found = _loose(places.start, _START)
    return Start(**found) if found and found["invocation"] == invocation else None


def load_verdict(places: Places) -> Verdict | None:
    """The latest verdict on a start since the host came up, if there is one.

    Raises:
        OSError: the file cannot be read.
    """
    found = _loose(places.verdict, _VERDICT)
    return Verdict(**found) if found else None


def load_hold(places: Places) -> Hold | None:
    """Who wants the engine to stay down, if anybody.

    Raises:
        OSError: the file cannot be read.
    """
    found = _loose(places.hold, _HOLD)
    return Hold(**found) if found else None


def save(path: Path, value: Trial | Start | Verdict | Hold) -> None:
    """Write one of these files.

    Raises:
        OSError: it could not be written.
    """
    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    write_file(path, (json.dumps({"format": FORMAT, **asdict(value)}, indent=2) + "\n").encode())


def remove(path: Path) -> None:
    """Remove one of these files, if it is there.

    Raises:
        OSError: it could not be removed.
    """
    if path.exists():
        path.unlink()
        fsync_dir(path.parent)


def _load(path: Path, keys: strict.Types) -> dict[str, Any] | None:
    try:
        value = strict.read(path)
    except FileNotFoundError:
        return None
    strict.check_format(value, FORMAT, str(path))
    strict.check_keys(value, keys, str(path))
    return {key: entry for key, entry in value.items() if key != "format"}


def _loose(path: Path, keys: strict.Types) -> dict[str, Any] | None:
    """As `_load`; a file that this program did not write counts as none."""
    try:
        return _load(path, keys)
    except HostError:
        return None
