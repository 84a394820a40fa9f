"""The switch: one transaction that ends with exactly one release committed and serving."""

from __future__ import annotations

import contextlib
import datetime
import os
import select
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from hostlib.atomic import locked
from hostlib.errors import HostError

from enginectl import bootlog, cards, exits, gates, network, server, systemd, toolkit
from enginectl.launch import check_paths, release_environment
from enginectl.paths import Places
from enginectl.release import Listen, Release, load_release
from enginectl.state import (
    Trial,
    append_history,
    load_state,
    remove_trial,
    save_state,
    save_trial,
)
from enginectl.status import runs

# How long the cards, the port and the control group may need to come free after the stop.
CLEAR_SECONDS = 90
POLL_SECONDS = 0.25
# The engine's lines travel through a pipe: judge again until the log has been quiet this long, so
# that the last ones have reached the file; but not longer than the second.
QUIET_SECONDS = 1.0
GATES_SECONDS = 10.0


@dataclass
class Record:
    """What a switch did: one line of the history, and the answer of `switch --json`."""

    by: str
    reason: str
    before: str | None
    to: str
    outcome: str = ""
    detail: str = ""
    time: str = field(
        default_factory=lambda: datetime.datetime.now(datetime.timezone.utc).isoformat(
            timespec="seconds"
        )
    )
    steps: list[dict[str, Any]] = field(default_factory=list)
    gates: list[gates.Gate] = field(default_factory=list)

    @contextlib.contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Time a step, also one that fails, and say that it begins."""
        say(f"{name} ...")
        start = time.monotonic()
        try:
            yield
        finally:
            self.steps.append({"step": name, "seconds": round(time.monotonic() - start, 3)})

    def as_dict(self) -> dict[str, Any]:
        """The record in plain JSON types."""
        return {"format": 1, **asdict(self)}


class Main:
    """The main process of the engine's unit in one start; `with` closes its handle."""

    def __init__(self, unit: systemd.Unit) -> None:
        self.unit = unit
        self._handle: int | None = None
        with contextlib.suppress(ProcessLookupError):
            if unit.running:
                self._handle = os.pidfd_open(unit.main_pid)

    def __enter__(self) -> Main:
        return self

    def __exit__(self, *_: object) -> None:
        if self._handle is not None:
            os.close(self._handle)

    def ended(self, seconds: float) -> bool:
        """Whether the process has ended; waits up to `seconds` for that."""
        return self._handle is None or bool(select.select([self._handle], [], [], seconds)[0])


def say(text: str) -> None:
    """One line of progress. The terminal may be gone: the switch goes on without it."""
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


def checked_release(places: Places, name: str) -> Release:
    """The release `name`, complete on this host.

    Raises:
        HostError: it is unknown, malformed or incomplete; nothing was touched.
    """
    try:
        release = load_release(places, name)
        check_paths(release)
    except HostError as error:
        raise HostError(error.message, *error.details, exit_code=exits.EXIT_REFUSED) from None
    return release


def serves(release: Release, unit: systemd.Unit) -> bool:
    """Whether the unit runs and answers as `release` must."""
    return (
        runs(release, unit)
        and server.healthy(release.listen)
        and server.served_names(release.listen) == release.served_names
    )


def comes_up(release: Release, unit: systemd.Unit) -> bool:
    """Whether the unit serves as `release` must, now or when the boot that is under way ends."""
    if runs(release, unit) and not server.healthy(release.listen):
        say(f"{release.name} is booting; waiting up to {release.boot_deadline_seconds} s")
        with Main(unit) as main, contextlib.suppress(HostError):
            _wait_healthy(release, main, time.monotonic() + release.boot_deadline_seconds)
    return serves(release, unit)


def is_committed_and_serving(places: Places, release: Release) -> bool:
    """Whether a switch to `release` has nothing to do."""
    if load_state(places).committed != release.name:
        return False
    [unit] = systemd.show(systemd.ENGINE_UNIT)
    return serves(release, unit)


def run(places: Places, name: str, reason: str, by: str) -> Record:
    """The whole transaction; must run as the main process of fable-switch.service.

    Any failure after the first change ends with the committed release being started again.

    Raises:
        HostError: refused before anything was touched, or another switch holds the lock.
    """
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, _interrupt)
    owner = f"{by}: {reason}"
    with locked(places.lock, owner, wait_seconds=0, busy_exit_code=exits.EXIT_LOCKED):
        release = checked_release(places, name)
        engine, switch = systemd.show(systemd.ENGINE_UNIT, systemd.SWITCH_UNIT)
        committed = load_state(places).committed
        record = Record(by, reason, committed, name)
        if committed == name and comes_up(release, engine):
            record.outcome = exits.UNCHANGED
            return record
        _check_unit(engine, release)
        with record.step("prepare"):
            toolkit.prove(release, release_environment(release), say)
            _prepare(places, Trial(name, switch.invocation))
        try:
            _try(places, release, engine, record)
            with record.step("commit"):
                _ignore_signals()
                save_state(places, load_state(places).commit(name))
            record.outcome = exits.SWITCHED
        except KeyboardInterrupt:
            _ignore_signals()
            _leave(places, record)
        except (HostError, OSError) as error:
            _ignore_signals()
            record.detail = error.message if isinstance(error, HostError) else str(error)
            say(f"failed: {record.detail}")
            _go_back(places, record)
        _finish(places, record)
        return record


def _prepare(places: Places, trial: Trial) -> None:
    """Show that the state can be written, and name the candidate.

    Raises:
        HostError: it cannot; nothing was touched.
    """
    try:
        save_state(places, load_state(places))
        save_trial(places, trial)
    except OSError as error:
        raise HostError(
            f"{places.state.parent} or {places.trial.parent}: cannot be written "
            f"({error.strerror}); free space there, nothing was touched",
            exit_code=exits.EXIT_REFUSED,
        ) from None


def _try(places: Places, release: Release, engine: systemd.Unit, record: Record) -> None:
    """Stop what runs, start the candidate, judge it.

    Raises:
        HostError: it does not come up, does not answer right, or does not pass every gate.
    """
    with record.step("drain and stop"):
        systemd.job("stop", systemd.ENGINE_UNIT)
        _wait_clear(release.listen, engine.control_group)
    with record.step("boot"):
        main = _start(release)
    with main:
        with record.step("warm request"):
            chat = server.chat(release.listen, release.served_names[0])
        with record.step("gates"):
            names = server.served_names(release.listen)
            if names != release.served_names:
                raise HostError(
                    f"{release.listen}: serves {_listed(names)}, not "
                    f"{_listed(release.served_names)}"
                )
            record.gates = judge(places, release, main.unit.invocation, chat)
            bad = [gate for gate in record.gates if gate.verdict != gates.PASS]
            if bad:
                raise HostError(
                    "; ".join(
                        f"gate {gate.number} ({gate.name}): {gate.verdict}, {gate.reason}"
                        for gate in bad
                    )
                )
            [now] = systemd.show(systemd.ENGINE_UNIT)
            if main.ended(0) or now.invocation != main.unit.invocation:
                raise HostError(f"{release.name}: the engine ended while it was judged")


def judge(places: Places, release: Release, invocation: str, chat: server.Chat) -> list[gates.Gate]:
    """The gates of the running start, judged again while they do not pass and lines still come.

    Raises:
        HostError: the start has no log.
    """
    path = places.boot_log(invocation)
    begun = changed = time.monotonic()
    seen = gates.Seen()
    while True:
        lines = seen.lines
        seen = gates.observe(bootlog.read_lines(path), release.gates)
        results = gates.evaluate(seen, release.gates, chat)
        now = time.monotonic()
        if seen.lines != lines:
            changed = now
        settled = now - changed >= QUIET_SECONDS or now - begun >= GATES_SECONDS
        passed = all(gate.verdict == gates.PASS for gate in results)
        if passed or settled or not chat.succeeded:
            return results
        time.sleep(POLL_SECONDS)


def _start(release: Release) -> Main:
    """Start the unit and wait until it is healthy.

    Raises:
        HostError: the engine ended, or was not healthy by its boot deadline.
    """
    deadline = time.monotonic() + release.boot_deadline_seconds
    systemd.job("start", systemd.ENGINE_UNIT)
    [unit] = systemd.show(systemd.ENGINE_UNIT)
    main = Main(unit)
    _wait_healthy(release, main, deadline)
    return main


def _wait_healthy(release: Release, main: Main, deadline: float) -> None:
    while not server.healthy(release.listen):
        if main.ended(POLL_SECONDS):
            raise HostError(
                f"{release.name}: the engine ended while it booted; see "
                f"`journalctl -u {systemd.ENGINE_UNIT}`"
            )
        if time.monotonic() >= deadline:
            raise HostError(
                f"{release.name}: not healthy after {release.boot_deadline_seconds} s; see "
                f"`journalctl -u {systemd.ENGINE_UNIT}`"
            )


def _wait_clear(listen: Listen, control_group: str) -> None:
    """Wait until nothing of the stopped engine is left.

    Raises:
        HostError: names what is still there after CLEAR_SECONDS.
    """
    deadline = time.monotonic() + CLEAR_SECONDS
    while found := _left_behind(listen, control_group):
        if time.monotonic() >= deadline:
            raise HostError(f"not clear {CLEAR_SECONDS} s after the stop: {'; '.join(found)}")
        time.sleep(POLL_SECONDS)


def _left_behind(listen: Listen, control_group: str) -> list[str]:
    found = [f"process {pid} of the unit" for pid in systemd.processes(control_group)]
    found += [f"card {card} holds {mib} MiB" for card, mib in cards.occupied().items()]
    if network.taken(listen):
        found.append(f"a process listens on {listen}")
    return found


def _check_unit(engine: systemd.Unit, release: Release) -> None:
    if not engine.loaded:
        raise HostError(
            f"{systemd.ENGINE_UNIT}: is not installed or not valid; deploy it, or see "
            f"`systemctl status {systemd.ENGINE_UNIT}`",
            exit_code=exits.EXIT_REFUSED,
        )
    if network.taken_by_others(release.listen, systemd.all_processes(engine)):
        raise HostError(
            f"{release.listen}: a process that is not {systemd.ENGINE_UNIT} listens there; find "
            f"it with `ss -ltnp sport = :{release.listen.port}` and end it",
            exit_code=exits.EXIT_REFUSED,
        )


def _go_back(places: Places, record: Record) -> None:
    """Start the committed release again and see that it serves; fill in the outcome."""
    try:
        with record.step("roll back"):
            remove_trial(places)
            committed = load_state(places).committed
            if committed is None:
                systemd.job("stop", systemd.ENGINE_UNIT)
                record.outcome = exits.FAILED
                return
            if committed == record.to != record.before:  # renamed, then an error was reported
                record.outcome = exits.SWITCHED
                return
            release = load_release(places, committed)
            deadline = time.monotonic() + release.boot_deadline_seconds
            systemd.job("restart", systemd.ENGINE_UNIT)
            [unit] = systemd.show(systemd.ENGINE_UNIT)
            with Main(unit) as main:
                _wait_healthy(release, main, deadline)
            record.outcome = exits.FAILED if committed == record.to else exits.ROLLED_BACK
    except (HostError, OSError) as error:
        text = error.message if isinstance(error, HostError) else str(error)
        record.detail += f"; rolling back: {text}"
        record.outcome = exits.ROLLBACK_FAILED


def _leave(places: Places, record: Record) -> None:
    """The switch was told to end: queue the committed release, wait for nothing."""
    record.outcome = exits.INTERRUPTED
    record.detail = "ended by a signal"
    try:
        remove_trial(places)
        committed = load_state(places).committed
        systemd.queue("stop" if committed is None else "restart", systemd.ENGINE_UNIT)
    except (HostError, OSError) as error:
        text = error.message if isinstance(error, HostError) else str(error)
        record.detail += f"; {text}"


def _finish(places: Places, record: Record) -> None:
    """Forget the trial and write the history; neither changes the outcome any more."""
    try:
        remove_trial(places)
    except OSError as error:
        say(f"warning: {places.trial}: {error.strerror}")
    try:
        append_history(places, record.as_dict())
    except OSError as error:
        say(f"warning: {places.history}: {error.strerror}")


def _listed(names: tuple[str, ...] | None) -> str:
    return "no valid list of models" if names is None else " ".join(names)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _ignore_signals() -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
