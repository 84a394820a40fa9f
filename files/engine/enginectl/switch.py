"""The switch: one transaction that ends with exactly one release committed and serving."""

from __future__ import annotations

import signal

from hostlib.errors import HostError

from enginectl import exits, history, systemd
from enginectl.engine import boot, clear, comes_up, drain_and_stop, serves, shown
from enginectl.lock import one_at_a_time
from enginectl.paths import Places
from enginectl.prepare import checked_release, prepare
from enginectl.record import Record, say
from enginectl.release import Release, load_release
from enginectl.runfiles import DEGRADED, NO_ANSWER, SERVES, Trial, load_start, remove, save
from enginectl.state import State, load_state, restore_state, update_state


class Unfit(HostError):
    """The candidate itself failed: it is not tried again unless somebody insists."""


def refuse_rejected(state: State, name: str) -> None:
    """Refuse a release that has failed before, at once and without a trace.

    Raises:
        HostError: it is on the list.
    """
    if name in state.rejected and name != state.committed:
        raise HostError(
            f"{name}: was rejected ({state.rejected[name]}); change the settings, or try it "
            f"again on the host with `enginectl switch {name} --retry --reason TEXT`",
            exit_code=exits.EXIT_REJECTED,
        )


def is_committed_and_serving(places: Places, release: Release) -> bool:
    """Whether a switch to `release` has nothing to do."""
    if load_state(places).committed != release.name:
        return False
    [unit] = systemd.show(systemd.ENGINE_UNIT)
    return serves(places, release, unit)


def run(
    places: Places, name: str, reason: str, by: str, *, retry: bool = False, back: bool = False
) -> Record:
    """The whole transaction; must run as the main process of fable-switch.service.

    Any failure after the first change ends with the committed release being started again.

    Args:
        places: of this host.
        name: the release to switch to.
        reason: for the history.
        by: who wants it, for the history.
        retry: try it although it was rejected.
        back: this is a rollback: what is left is rejected.

    Raises:
        HostError: refused before anything was touched, or another switch holds the lock.
    """
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, _interrupt)
    with one_at_a_time(places, f"{by}: {reason}"):
        if restored := restore_state(places):
            say(f"warning: {restored}")
        release = checked_release(places, name)
        state = load_state(places)
        if not retry:
            refuse_rejected(state, name)
        engine, switch = systemd.show(systemd.ENGINE_UNIT, systemd.SWITCH_UNIT)
        record = Record(by, reason, state.committed, name, switch.invocation)
        if state.committed == name and comes_up(places, release, engine):
            record.outcome = exits.UNCHANGED
            return record
        with record.step("prepare"):
            prepare(places, release, engine)
        _note(places, history.BEGUN, record)
        try:
            remove(places.hold)
            if state.committed == name:
                _restart(places, release, engine, record)
            else:
                save(places.trial, Trial(name, switch.invocation))
                _try(places, release, engine, record)
                _commit(places, record, back)
        except KeyboardInterrupt:
            _ignore_signals()
            _leave(places, record)
        except (HostError, OSError) as error:
            _ignore_signals()
            record.detail = _words(error)
            say(f"failed: {record.detail}")
            _go_back(places, record, unfit=isinstance(error, Unfit))
        _finish(places, record)
        return record


def _try(places: Places, release: Release, engine: systemd.Unit, record: Record) -> None:
    """Stop what runs, start the candidate, see that it passes every gate.

    Raises:
        Unfit: it does not come up, does not answer right, or does not pass every gate.
        HostError: something else is in the way.
    """
    _stop(places, release, engine, record)
    verdict = boot(places, release, record, record.id)
    if verdict.outcome in (DEGRADED, NO_ANSWER):
        raise Unfit(shown(verdict))
    if verdict.outcome != SERVES:
        raise HostError(shown(verdict))
    [now] = systemd.show(systemd.ENGINE_UNIT)
    if not now.running or now.invocation != verdict.invocation:
        raise Unfit(f"{release.name}: the engine ended after it was judged")


def _stop(places: Places, release: Release, engine: systemd.Unit, record: Record) -> None:
    with record.step("drain and stop"):
        drain_and_stop(_running(places, engine) or release, record)
        clear(places, release, engine.control_group)


def _running(places: Places, engine: systemd.Unit) -> Release | None:
    """The release that the unit runs, where that can be told."""
    start = load_start(places, engine.invocation) if engine.invocation else None
    try:
        return load_release(places, start.release) if start else None
    except HostError:
        return None


def _commit(places: Places, record: Record, back: bool) -> None:
    def change(state: State) -> State:
        after = state.commit(record.to)
        if back and state.committed:
            return after.reject(state.committed, f"{history.now()}: rolled back: {record.reason}")
        return after

    with record.step("commit"):
        _ignore_signals()
        update_state(places, change)
    record.outcome = exits.SWITCHED


def _restart(places: Places, release: Release, engine: systemd.Unit, record: Record) -> None:
    """Stop and start what is committed already: there is nothing to roll back to.

    Raises:
        HostError: see `boot`.
    """
    _stop(places, release, engine, record)
    verdict = boot(places, release, record, "")
    record.detail = shown(verdict)
    if verdict.outcome == SERVES:
        record.outcome = exits.RESTARTED
    elif verdict.outcome == DEGRADED:
        record.outcome = exits.SERVES_DEGRADED
    else:
        record.outcome = exits.FAILED
        record.detail += "; it is being started again and again"


def _go_back(places: Places, record: Record, *, unfit: bool) -> None:
    """Start the committed release again and see that it serves; fill in the outcome."""
    try:
        with record.step("roll back"):
            remove(places.trial)
            state = load_state(places)
            if state.committed == record.to != record.before:  # an error after the commit
                record.outcome = exits.SWITCHED
                return
            if unfit:
                _reject(places, record)
            if state.committed is None:
                systemd.queue("stop", systemd.ENGINE_UNIT)
                record.outcome = exits.FAILED
                return
            if state.committed == record.to:  # a restart that could not even begin
                systemd.queue("restart", systemd.ENGINE_UNIT)
                record.outcome = exits.FAILED
                return
            tried = record.gates
            release = load_release(places, state.committed)
            verdict = boot(places, release, record, "")
            record.gates = tried
            record.outcome = exits.ROLLED_BACK if verdict.answers else exits.ROLLBACK_FAILED
            if verdict.outcome != SERVES:
                record.detail += f"; rolling back: {verdict.outcome}: {shown(verdict)}"
    except (HostError, OSError) as error:
        record.detail += f"; rolling back: {_words(error)}"
        record.outcome = exits.ROLLBACK_FAILED


def _reject(places: Places, record: Record) -> None:
    why = f"{history.now()}: {record.detail}"
    try:
        update_state(places, lambda before: before.reject(record.to, why))
    except (HostError, OSError) as error:  # going back is what counts
        say(f"warning: {record.to} could not be noted as rejected: {_words(error)}")


def _leave(places: Places, record: Record) -> None:
    """The switch was told to end: queue the committed release, wait for nothing."""
    record.outcome = exits.INTERRUPTED
    record.detail = "ended by a signal"
    try:
        remove(places.trial)
        committed = load_state(places).committed
        systemd.queue("stop" if committed is None else "restart", systemd.ENGINE_UNIT)
    except (HostError, OSError) as error:
        record.detail += f"; {_words(error)}"


def _finish(places: Places, record: Record) -> None:
    """Forget the trial and write the history; neither changes the outcome any more."""
    try:
        remove(places.trial)
    except OSError as error:
        say(f"warning: {places.trial}: {error.strerror}")
    _note(places, history.ENDED, record)


def _note(places: Places, event: str, record: Record) -> None:
    try:
        history.append(places, event, **record.as_dict())
    except OSError as error:
        say(f"warning: {places.history}: {error.strerror}")


def _words(error: HostError | OSError) -> str:
    return error.message if isinstance(error, HostError) else str(error)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _ignore_signals() -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
