"""What is committed on this host, and which candidate a running switch tries."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from typing import Any

from hostlib.atomic import fsync_dir, write_file
from hostlib.errors import HostError

from enginectl import strict
from enginectl.paths import Places
from enginectl.release import check_name

FORMAT = 1

_NAME_OR_NONE = (str, type(None))
_STATE_KEYS: strict.Types = {"format": int, "committed": _NAME_OR_NONE, "previous": _NAME_OR_NONE}
_TRIAL_KEYS: strict.Types = {"format": int, "release": str, "invocation": str}


@dataclass(frozen=True)
class State:
    """The one persistent fact.

    Attributes:
        committed: name of the release that runs on every unattended start; none before the
            first switch.
        previous: the release committed before it, where a rollback leads.
    """

    committed: str | None = None
    previous: str | None = None

    def commit(self, name: str) -> State:
        """The state after a switch to `name`."""
        return self if name == self.committed else State(name, self.committed)


@dataclass(frozen=True)
class Trial:
    """The candidate of a running switch, valid while that switch's systemd invocation is active."""

    release: str
    invocation: str


def load_state(places: Places) -> State:
    """The state of this host; an absent file means that nothing was ever committed.

    Raises:
        HostError: the file is damaged or newer than this program; nothing is guessed.
        OSError: it cannot be read.
    """
    where = str(places.state)
    try:
        value = strict.read(places.state)
    except FileNotFoundError:
        return State()
    strict.check_format(value, FORMAT, where)
    strict.check_keys(value, _STATE_KEYS, where)
    names = {key: value[key] for key in ("committed", "previous")}
    for key, name in names.items():
        if name is not None:
            _checked(name, f"{where}: {key}")
    return State(**names)


def save_state(places: Places, state: State) -> None:
    """Replace the state in one step, durable before this returns.

    Raises:
        OSError: it could not be written.
    """
    places.state.parent.mkdir(parents=True, exist_ok=True)
    write_file(places.state, _encode({"format": FORMAT, **asdict(state)}))


def load_trial(places: Places) -> Trial | None:
    """The candidate that a switch has named, if any.

    Raises:
        HostError: the file is damaged.
        OSError: it cannot be read.
    """
    where = str(places.trial)
    try:
        value = strict.read(places.trial)
    except FileNotFoundError:
        return None
    strict.check_format(value, FORMAT, where)
    strict.check_keys(value, _TRIAL_KEYS, where)
    return Trial(_checked(value["release"], f"{where}: release"), value["invocation"])


def save_trial(places: Places, trial: Trial) -> None:
    """Name the candidate of this switch.

    Raises:
        OSError: it could not be written.
    """
    places.trial.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    write_file(places.trial, _encode({"format": FORMAT, **asdict(trial)}))


def remove_trial(places: Places) -> None:
    """Forget the candidate; the committed release is the one to run from here on."""
    if places.trial.exists():
        places.trial.unlink()
        fsync_dir(places.trial.parent)


def append_history(places: Places, record: dict[str, Any]) -> None:
    """Add one line to the history, durable before this returns.

    Raises:
        OSError: it could not be written.
    """
    with places.history.open("ab+") as stream:
        stream.seek(0, os.SEEK_END)
        if stream.tell():
            stream.seek(-1, os.SEEK_END)
            torn = stream.read(1) != b"\n"  # a power cut may have left half a line
        else:
            torn = False
        stream.write(b"\n" * torn + json.dumps(record).encode() + b"\n")
        stream.flush()
        os.fsync(stream.fileno())


def _checked(name: str, where: str) -> str:
    try:
        return check_name(name)
    except HostError as error:
        raise HostError(f"{where}: {error.message}") from None


def _encode(value: dict[str, Any]) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()
