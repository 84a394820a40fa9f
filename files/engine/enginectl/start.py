"""What the engine's unit does before and after `launch`, as root, at every start.

Before: wait out the delay after failed boots, pick the release, wait for its address, see that
port and cards are free, and write down what is started. After: wait until it answers, pay the
first request's price, judge the gates, and write the verdict. On an unattended start only "no
answer" is a failed boot; a failed gate means that it serves, and that this is said loudly.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from hostlib.errors import EXIT_FAILED, EXIT_OK, HostError

from enginectl import blockers, bootlog, gates, history, network, server, systemd, timing
from enginectl.choice import Choice, choose, failed_boots_limit, unattended, warn
from enginectl.launch import check_paths, invocation_of
from enginectl.paths import Places
from enginectl.release import Release, load_release
from enginectl.runfiles import (
    BLOCKED,
    DEGRADED,
    NO_ANSWER,
    SERVES,
    Start,
    Verdict,
    load_start,
    save,
)
from enginectl.state import State, startable_state, update_state


class NotOurs(HostError):
    """Something on the host, not the release, keeps the engine from starting."""


@dataclass
class Steps:
    """Names and durations of what a start went through."""

    done: list[dict[str, Any]] = field(default_factory=list)

    @contextlib.contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Time one step, also one that fails."""
        begun = time.monotonic()
        try:
            yield
        finally:
            self.done.append({"step": name, "seconds": round(time.monotonic() - begun, 3)})


def before_start(places: Places, environment: Mapping[str, str]) -> int:
    """Make a start possible and say what it starts; returns the exit code.

    Raises:
        HostError: nothing can be started now; systemd tries again.
    """
    invocation = invocation_of(environment)
    _wait_out_failures(places)
    chosen = choose(places)
    try:
        release = load_release(places, chosen.release)
        check_paths(release)
        _wait_for_host(places, release)
    except HostError as error:
        blocked = isinstance(error, NotOurs)
        outcome = BLOCKED if blocked else NO_ANSWER
        verdict = Verdict(chosen.release, invocation, chosen.trial, outcome, error.message)
        _conclude(places, verdict)
        raise
    try:
        [unit] = systemd.show(systemd.ENGINE_UNIT)
        save(places.start, Start(release.name, invocation, chosen.trial, unit.text_digest))
    except (HostError, OSError) as error:  # the launcher picks by itself then
        warn(f"{places.start}: not written: {error}")
    return EXIT_OK


def after_start(places: Places, environment: Mapping[str, str]) -> int:
    """Judge this start and write the verdict; a failed exit code has systemd start it again.

    Raises:
        HostError: the release cannot be read.
    """
    invocation = invocation_of(environment)
    main_pid = int(environment.get("MAINPID") or 0)
    start = load_start(places, invocation)
    chosen = Choice(start.release, start.trial) if start else choose(places)
    release = load_release(places, chosen.release)
    signal.signal(signal.SIGTERM, lambda *_: os._exit(EXIT_FAILED))  # stopped: no verdict
    verdict = judge_start(places, release, invocation, chosen.trial, main_pid)
    _conclude(places, verdict)
    print(f"<{5 if verdict.outcome == SERVES else 3}>enginectl: {_words(verdict)}", flush=True)
    return EXIT_OK if verdict.answers else EXIT_FAILED


def judge_start(
    places: Places, release: Release, invocation: str, trial: str, main_pid: int
) -> Verdict:
    """Wait for the engine with this main process, and judge it."""
    steps = Steps()
    results: list[gates.Gate] = []

    def verdict(outcome: str, detail: str = "") -> Verdict:
        found = [asdict(gate) for gate in results]
        return Verdict(release.name, invocation, trial, outcome, detail, found, steps.done)

    try:
        main = os.pidfd_open(main_pid)
    except OSError:
        return verdict(NO_ANSWER, "the engine ended before it was looked at")
    try:
        with steps.step("boot"):
            if detail := _wait_healthy(release, main):
                return verdict(NO_ANSWER, detail)
        with steps.step("warm request"):
            chat = server.chat(release.listen, release.served_names[0])
        with steps.step("gates"):
            names = server.served_names(release.listen)
            results = judge(places, release, invocation, chat)
        if systemd.ended(main, 0):
            return verdict(NO_ANSWER, "the engine ended while it was judged")
    finally:
        os.close(main)
    faults = [
        f"gate {gate.number} ({gate.name}): {gate.verdict}, {gate.reason}"
        for gate in results
        if gate.verdict != gates.PASS
    ]
    if names != release.served_names:
        shown = "no valid list of models" if names is None else " ".join(names)
        faults.append(f"serves {shown}, not {' '.join(release.served_names)}")
    return verdict(DEGRADED if faults else SERVES, "; ".join(faults))


def judge(places: Places, release: Release, invocation: str, chat: server.Chat) -> list[gates.Gate]:
    """The gates of the running start, judged again while they do not pass and lines still come."""
    path = places.boot_log(invocation)
    begun = changed = time.monotonic()
    seen = gates.Seen()
    while True:
        lines = seen.lines
        try:
            seen = gates.observe(bootlog.read_lines(path), release.gates)
        except (HostError, OSError) as error:
            warn(str(error))
            return gates.evaluate(gates.Seen(), release.gates, chat)
        results = gates.evaluate(seen, release.gates, chat)
        now = time.monotonic()
        if seen.lines != lines:
            changed = now
        quiet = now - changed >= timing.QUIET_SECONDS or now - begun >= timing.GATES_SECONDS
        if quiet or not chat.succeeded or all(gate.verdict == gates.PASS for gate in results):
            return results
        time.sleep(timing.POLL_SECONDS)


def after_verdict(state: State, verdict: Verdict, limit: int) -> State:
    """The state after an unattended start was judged.

    A boot without an answer is counted. When the release before the committed one was tried for
    too many of them and answers, it is committed, and the other one rejected.
    """
    if verdict.outcome == BLOCKED:
        return state
    if not verdict.answers:
        return State(state.committed, state.previous, state.rejected, state.failed_boots + 1)
    if verdict.release == state.previous and unattended(state, limit) == state.previous:
        why = f"{history.now()}: {state.failed_boots} boots in a row gave no answer"
        return state.reject(state.committed or "", why).commit(verdict.release)
    return State(state.committed, state.previous, state.rejected, 0)


def _wait_out_failures(places: Places) -> None:
    """The growing delay, but not while a switch is active: it has its own deadlines."""
    state, _ = startable_state(places)
    delay = timing.boot_delay(state.failed_boots)
    if delay == 0:
        return
    [switch] = systemd.show(systemd.SWITCH_UNIT)
    if switch.active != "active":
        print(
            f"enginectl: {state.failed_boots} boots in a row gave no answer; the next one in "
            f"{delay} s",
            flush=True,
        )
        time.sleep(delay)


def _wait_for_host(places: Places, release: Release) -> None:
    try:
        network.wait_for_address(release.listen.host, release.address_wait_seconds)
        for words in blockers.wait_clear(places, release):
            warn(f"ended, left behind by an earlier start: {words}")
    except HostError as error:
        raise NotOurs(error.message, *error.details, exit_code=error.exit_code) from None


def _wait_healthy(release: Release, main: int) -> str:
    """Wait for /health; why it does not come, empty when it does."""
    seconds = release.boot_seconds
    deadline = time.monotonic() + seconds
    while not server.healthy(release.listen):
        if systemd.ended(main, timing.POLL_SECONDS):
            return f"the engine ended while it booted; see `journalctl -u {systemd.ENGINE_UNIT}`"
        if time.monotonic() >= deadline:
            return f"not healthy after {seconds} s; see `journalctl -u {systemd.ENGINE_UNIT}`"
    return ""


def _conclude(places: Places, verdict: Verdict) -> None:
    """Count an unattended start, write its line in the history, and the verdict last of all."""
    detail = verdict.detail
    if not verdict.trial:
        try:
            state, _ = startable_state(places)
            limit = failed_boots_limit(places, state)
            update_state(places, lambda before: after_verdict(before, verdict, limit))
            after = startable_state(places)[0]
            if after.committed != state.committed:
                detail = f"now committed in place of {state.committed}; {detail}".rstrip("; ")
        except (HostError, OSError) as error:
            warn(f"the state was not changed: {error}")
        with contextlib.suppress(OSError):
            history.append(
                places,
                history.BOOT,
                release=verdict.release,
                outcome=verdict.outcome,
                detail=detail,
                steps=verdict.steps,
            )
    try:
        save(places.verdict, verdict)
    except OSError as error:
        warn(f"{places.verdict}: {error.strerror}")


def _words(verdict: Verdict) -> str:
    return f"{verdict.release}: {verdict.outcome}" + (
        f": {verdict.detail}" if verdict.detail else ""
    )
