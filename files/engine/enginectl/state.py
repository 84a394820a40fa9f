"""The one persistent fact: which release is committed, and what became of the others.

Every key keeps its meaning in all formats, so that a program older than the file can at least
start the committed release.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from hostlib.atomic import fsync_dir, locked, write_file
from hostlib.errors import HostError

from enginectl import exits, strict
from enginectl.paths import Places
from enginectl.release import NAME

FORMAT = 1
KEPT_REJECTIONS = 50
_LOCK_WAIT_SECONDS = 10.0

_NAME_OR_NONE = (str, type(None))
_KEYS: strict.Types = {
    "format": int,
    "committed": _NAME_OR_NONE,
    "previous": _NAME_OR_NONE,
    "rejected": dict,
    "failed_boots": int,
}


class DamagedState(HostError):
    """The state file cannot be read as what it is."""


class NewerState(HostError):
    """The state file was written by a newer version of this program."""


@dataclass(frozen=True)
class State:
    """What stands in the state file.

    Attributes:
        committed: name of the release that runs on every unattended start; none before the
            first switch.
        previous: the release committed before it, where a rollback leads.
        rejected: releases that failed or were left by a rollback, each with when and why.
        failed_boots: unattended boots in a row that gave no answer.
    """

    committed: str | None = None
    previous: str | None = None
    rejected: Mapping[str, str] = field(default_factory=dict)
    failed_boots: int = 0

    def commit(self, name: str) -> State:
        """The state after a switch to `name`."""
        previous = self.previous if name == self.committed else self.committed
        rejected = {key: why for key, why in self.rejected.items() if key != name}
        return State(name, previous, rejected)

    def reject(self, name: str, why: str) -> State:
        """The state after `name` has failed; the oldest beyond KEPT_REJECTIONS are forgotten."""
        rejected = {key: words for key, words in self.rejected.items() if key != name}
        kept = list(rejected.items())[-(KEPT_REJECTIONS - 1) :]
        return replace(self, rejected={**dict(kept), name: why})


def load_state(places: Places) -> State:
    """The state of this host; an absent file means that nothing was ever committed.

    Raises:
        DamagedState, NewerState: nothing is guessed; the message has the way out.
        OSError: it cannot be read.
    """
    try:
        return parse_state(places.state.read_bytes(), str(places.state))
    except FileNotFoundError:
        return State()


def parse_state(content: bytes, where: str) -> State:
    """The state in `content`, read from `where`.

    Raises:
        DamagedState, NewerState: it is not valid.
    """
    try:
        value = strict.loads(content, where)
        if type(value.get("format")) is int and value["format"] > FORMAT:
            raise NewerState(
                f"{where}: written by a newer version (format {value['format']}, this one knows "
                f"{FORMAT}): deploy that version again, or give its other entries up with "
                "`enginectl settle --restore`",
                exit_code=exits.EXIT_REFUSED,
            )
        strict.check_format(value, FORMAT, where)
        strict.check_keys(value, _KEYS, where)
        names = [value["committed"], value["previous"], *value["rejected"]]
        for name in names:
            if name is not None and not NAME.fullmatch(name):
                raise HostError(f"{where}: {name!r} is not a release name")
        if not all(isinstance(why, str) for why in value["rejected"].values()):
            raise HostError(f"{where}: rejected: every reason must be a string")
        if value["failed_boots"] < 0:
            raise HostError(f"{where}: failed_boots is below 0")
    except NewerState:
        raise
    except HostError as error:
        cause = error.message.removeprefix(f"{where}: ").removesuffix(f"; {strict.WAY_OUT}")
        raise DamagedState(
            f"{where}: is damaged ({cause}): `enginectl settle --restore` brings its copy back",
            exit_code=exits.EXIT_REFUSED,
        ) from None
    del value["format"]
    return State(**value)


def startable_state(places: Places) -> tuple[State, HostError | None]:
    """The state by which an engine can be started, and what is wrong with the file, if anything.

    A damaged file is replaced by its copy here, in memory alone. Of a newer one, and of one whose
    copy is damaged too, only the names are taken, where it has them.

    Raises:
        OSError: it cannot be read.
    """
    try:
        return load_state(places), None
    except DamagedState as error:
        with contextlib.suppress(HostError, FileNotFoundError):
            copy = places.state_copy
            return parse_state(copy.read_bytes(), str(copy)), error
        return _names_of(places.state.read_bytes()), error
    except NewerState as error:
        return _names_of(places.state.read_bytes()), error


def save_state(places: Places, state: State) -> None:
    """Replace the state in one step, durable before this returns; then its copy.

    Raises:
        OSError: it could not be written.
    """
    places.state.parent.mkdir(parents=True, exist_ok=True)
    content = (json.dumps({"format": FORMAT, **asdict(state)}, indent=2) + "\n").encode()
    write_file(places.state, content)
    with contextlib.suppress(OSError):  # the state itself is safe
        write_file(places.state_copy, content)


def update_state(places: Places, change: Callable[[State], State]) -> State:
    """Replace the state by `change` of it, unless that is the same; returns what stands then.

    Raises:
        HostError: it is damaged or newer, or another process changes it without end.
        OSError: it could not be written.
    """
    with locked(places.state_lock, "enginectl", _LOCK_WAIT_SECONDS):
        before = load_state(places)
        after = change(before)
        if after != before:
            save_state(places, after)
        return after


def restore_state(places: Places, *, give_up_newer: bool = False) -> str | None:
    """Set a damaged state file right by its copy; what was done in one line, None if nothing.

    The damaged file stays beside it. A newer one is only replaced with `give_up_newer`.

    Raises:
        NewerState: it is newer, and must not be given up.
        OSError: it could not be written.
    """
    with locked(places.state_lock, "enginectl", _LOCK_WAIT_SECONDS):
        state, error = startable_state(places)
        if error is None:
            return None
        if isinstance(error, NewerState) and not give_up_newer:
            raise error
        aside = places.state.with_name("state.replaced.json")
        write_file(aside, places.state.read_bytes())
        save_state(places, state)
        fsync_dir(places.state.parent)
    return (
        f"{places.state}: set right, {state.committed or 'nothing'} is committed; "
        f"what stood there is in {aside}"
    )


def _names_of(content: bytes) -> State:
    """Committed and previous of a file in another format, as far as it has them."""
    found: dict[str, Any] = {}
    with contextlib.suppress(HostError):
        found = strict.loads(content, "state")
    committed, previous = (
        name if isinstance(name, str) and NAME.fullmatch(name) else None
        for name in (found.get("committed"), found.get("previous"))
    )
    return State(committed, previous)
