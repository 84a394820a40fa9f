"""Which release a start of the unit runs. Pure but for `choose`, which reads state and trial."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from hostlib.errors import HostError

from enginectl import systemd
from enginectl.paths import Places
from enginectl.release import load_release
from enginectl.runfiles import load_trial
from enginectl.state import State, startable_state


@dataclass(frozen=True)
class Choice:
    """The release to start; `trial` is the invocation of the switch that tries it, or empty."""

    release: str
    trial: str = ""


def unattended(state: State, limit: int) -> str | None:
    """The release that an unattended start runs.

    After `limit` boots of the committed release in a row that gave no answer the previous one
    gets as many, then the committed one again, and so on: neither is ever given up.

    Args:
        state: as on disk.
        limit: `failed_boots` of the committed release.
    """
    if state.previous is None:
        return state.committed
    return state.previous if state.failed_boots // limit % 2 else state.committed


def choose(places: Places) -> Choice:
    """The candidate of an active switch, else the committed release or the one before it.

    Raises:
        HostError: nothing is committed and no switch is active.
    """
    try:
        trial = load_trial(places)
        if trial is not None:
            [switch] = systemd.show(systemd.SWITCH_UNIT)
            if switch.active == "active" and switch.invocation == trial.invocation:
                return Choice(trial.release, trial.invocation)
            warn(f"{places.trial}: left by a switch that is no longer active; ignored")
    except HostError as error:  # whatever is wrong with a trial, the committed release can run
        warn(f"{error.message}; the trial is ignored")
    except OSError as error:
        warn(f"{places.trial}: {error.strerror}; the trial is ignored")
    state, damage = startable_state(places)
    if damage is not None:
        warn(damage.message)
    name = unattended(state, failed_boots_limit(places, state))
    if name is None:
        raise HostError(
            f"{places.state}: no release is committed; run `enginectl switch NAME --reason TEXT`"
        )
    return Choice(name)


def failed_boots_limit(places: Places, state: State) -> int:
    """`failed_boots` of the committed release; 1 where that cannot be read."""
    try:
        return load_release(places, state.committed or "").failed_boots
    except (HostError, OSError):
        return 1


def warn(text: str) -> None:
    """One line for the journal."""
    print(f"enginectl: warning: {text}", file=sys.stderr, flush=True)
