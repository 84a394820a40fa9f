"""Settle: see that the committed release, and nothing else, is what the unit runs.

Runs after every switch however that ended, when the unit has failed for good, and every half
minute. It waits for nothing and may be killed anywhere: the next one finds the same and does the
same.
"""

from __future__ import annotations

from dataclasses import dataclass

from hostlib.errors import HostError

from enginectl import exits, history, systemd
from enginectl.choice import failed_boots_limit, unattended, warn
from enginectl.lock import SETTLE, one_at_a_time
from enginectl.paths import Places
from enginectl.runfiles import Hold, Start, load_hold, load_start, remove
from enginectl.state import State, load_state, restore_state

NOTHING = ""


@dataclass(frozen=True)
class Settled:
    """What was done, empty if nothing; and why in words."""

    done: str
    why: str

    def __str__(self) -> str:
        return self.done or self.why


def decide(
    state: State, limit: int, unit: systemd.Unit, start: Start | None, hold: Hold | None
) -> tuple[str, str]:
    """What to ask of systemd (`start`, `restart`, `stop` or NOTHING), and why in words.

    Args:
        state: as on disk; no switch is running.
        limit: `failed_boots` of the committed release.
        unit: the engine's.
        start: what the unit's present start runs, where that was written down.
        hold: who wants the engine to stay down.
    """
    wanted = {state.committed, unattended(state, limit)} - {None}
    down = unit.active in ("inactive", "failed")
    if not unit.loaded:
        return NOTHING, "the unit is not installed or not valid: deploy it"
    if unit.active == "deactivating":
        return NOTHING, "the unit is being stopped"
    if not wanted:
        if down:
            return NOTHING, "no release is committed"
        return "stop", "no release is committed, so none may serve"
    if hold is not None and down:
        return NOTHING, f"held down by {hold.by}: {hold.reason}"
    if down and not unit.enabled:
        return NOTHING, "the unit is stopped and not enabled"
    if down:
        return "start", f"the unit is {unit.active}"
    if start is not None and start.release not in wanted:
        return "restart", f"{start.release} runs and is not committed"
    return NOTHING, "the unit runs what is committed"


def settle(places: Places, *, by: str, unattended_run: bool, give_up_newer: bool) -> Settled:
    """Set right what a killed switch, a stray stop or a damaged file left.

    Args:
        by: who asked.
        unattended_run: leave a hold alone.
        give_up_newer: also replace a state file of a newer version.

    Raises:
        HostError: a switch is running, or the state cannot be set right.
        OSError: a file could not be written.
    """
    with one_at_a_time(places, SETTLE):
        done = []
        if restored := restore_state(places, give_up_newer=give_up_newer):
            done.append(restored)
        remove(places.trial)  # its switch holds no lock: it is dead
        if not unattended_run and load_hold(places):
            remove(places.hold)
            done.append("the hold is over")
        state = load_state(places)
        limit = failed_boots_limit(places, state)
        [unit] = systemd.show(systemd.ENGINE_UNIT)
        start = load_start(places, unit.invocation) if unit.invocation else None
        verb, why = decide(state, limit, unit, start, load_hold(places))
        if verb:
            systemd.queue(verb, systemd.ENGINE_UNIT)
            done.append(f"{verb} {systemd.ENGINE_UNIT}: {why}")
        if done:
            try:
                history.append(places, history.SETTLED, by=by, action="; ".join(done))
            except OSError as error:
                warn(f"{places.history}: {error.strerror}")
        return Settled("; ".join(done), why)


def settle_beside_a_switch(places: Places, *, by: str) -> Settled:
    """Settle unattended; a running switch sees to everything itself.

    Raises:
        HostError: the state cannot be set right.
        OSError: a file could not be written.
    """
    try:
        return settle(places, by=by, unattended_run=True, give_up_newer=False)
    except HostError as error:
        if error.exit_code != exits.EXIT_LOCKED:
            raise
        return Settled("", "a switch is running")
