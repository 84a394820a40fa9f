"""Stopping and starting the engine's unit, and waiting for what comes of it."""

from __future__ import annotations

import time

from hostlib.errors import HostError

from enginectl import blockers, server, systemd, timing
from enginectl.paths import Places
from enginectl.record import Record, say
from enginectl.release import Release
from enginectl.runfiles import NO_ANSWER, Verdict, load_verdict
from enginectl.status import runs

SAY_SECONDS = 15.0
# The unit is asked less often than the verdict: a question is a process.
UNIT_SECONDS = 1.0
# After this long without having been started it will not be: a program before it fails.
UNSTARTED_SECONDS = 10.0


def serves(places: Places, release: Release, unit: systemd.Unit) -> bool:
    """Whether the unit runs and answers as `release` must."""
    return (
        runs(places, release, unit)
        and server.healthy(release.listen)
        and server.served_names(release.listen) == release.served_names
    )


def drain_and_stop(running: Release, record: Record) -> None:
    """Stop the unit: the engine takes nothing new and finishes what runs, up to its deadline.

    How many requests ran, and how many of them were cut off at the deadline, goes into the
    record; None where the engine does not tell.

    Raises:
        HostError: it has not stopped by STOPPED_SECONDS.
    """
    left = server.requests(running.listen)
    record.drain = {"running": left, "cut_off": 0 if left is not None else None}
    systemd.queue("stop", systemd.ENGINE_UNIT)
    begun = said = time.monotonic()
    while True:
        [unit] = systemd.show(systemd.ENGINE_UNIT)
        now = time.monotonic()
        if unit.active in ("inactive", "failed"):
            break
        if now - begun >= timing.STOPPED_SECONDS:
            raise HostError(
                f"{systemd.ENGINE_UNIT}: has not stopped in {timing.STOPPED_SECONDS} s; see "
                f"`systemctl status {systemd.ENGINE_UNIT}`"
            )
        if unit.main_pid:
            left = server.requests(running.listen)
        if left and now - said >= SAY_SECONDS:
            said = now
            rest = max(0, running.drain_seconds - (now - begun))
            say(f"{left} requests are running or waiting; {rest:.0f} s until they are cut off")
        time.sleep(timing.POLL_SECONDS)
    if left and now - begun >= running.drain_seconds:
        record.drain["cut_off"] = left
        say(f"{left} requests were cut off after {running.drain_seconds} s")


def wait_verdict(places: Places, release: Release, trial: str, last: str) -> Verdict:
    """Wait for the verdict on the start that was just asked for.

    Args:
        places: of this host.
        release: what is started.
        trial: the invocation of the switch that tries it, or empty.
        last: the invocation that the latest verdict before this start is on.

    Raises:
        HostError: there is none: the unit did not start, or nothing judged it in time.
    """
    begun = said = asked = time.monotonic()
    seconds = (
        timing.CLEAR_SECONDS
        + release.address_wait_seconds
        + release.boot_seconds
        + timing.CHAT_SECONDS
        + timing.GATES_SECONDS
        + 60
    )
    while True:
        verdict = load_verdict(places)
        fresh = verdict is not None and verdict.invocation != last
        if verdict and fresh and (verdict.trial, verdict.release) == (trial, release.name):
            return verdict
        now = time.monotonic()
        if now - said >= SAY_SECONDS:
            said = now
            say(f"{release.name} is booting: {now - begun:.0f} s of at most {seconds:.0f} s")
        if now - begun >= seconds:
            raise HostError(f"{release.name}: no verdict after {seconds:.0f} s; {_journal()}")
        if now - asked >= UNIT_SECONDS:
            asked = now
            [unit] = systemd.show(systemd.ENGINE_UNIT)
            down = unit.active in ("inactive", "failed") or unit.sub == "auto-restart"
            if down and not fresh and now - begun >= UNSTARTED_SECONDS:
                raise HostError(f"{systemd.ENGINE_UNIT}: does not start; {_journal()}")
        time.sleep(timing.POLL_SECONDS / 2)


def latest_verdict(places: Places) -> str:
    """The invocation that the latest verdict is on; empty if there is none."""
    verdict = load_verdict(places)
    return verdict.invocation if verdict else ""


def boot(places: Places, release: Release, record: Record, trial: str) -> Verdict:
    """Start (or start anew) the unit, and wait for the verdict; its steps go into the record.

    Raises:
        HostError: see `wait_verdict`.
    """
    say("boot, warm request, gates ...")
    last = latest_verdict(places)
    systemd.queue("restart", systemd.ENGINE_UNIT)
    verdict = wait_verdict(places, release, trial, last)
    record.steps += verdict.steps
    record.gates = verdict.gates
    return verdict


def comes_up(places: Places, release: Release, unit: systemd.Unit) -> bool:
    """Whether the unit serves as `release` must, now or when the boot that is under way ends."""
    if runs(places, release, unit) and not server.healthy(release.listen):
        say(f"{release.name} is booting; waiting up to {release.boot_seconds} s")
        deadline = time.monotonic() + release.boot_seconds
        while time.monotonic() < deadline and not server.healthy(release.listen):
            [now] = systemd.show(systemd.ENGINE_UNIT)
            if now.invocation != unit.invocation or not now.running:
                return False
            time.sleep(UNIT_SECONDS)
    return serves(places, release, unit)


def clear(places: Places, release: Release, control_group: str) -> None:
    """Wait until nothing of a stopped engine is left.

    Raises:
        HostError: names what is still there.
    """
    for words in blockers.wait_clear(places, release, control_group):
        say(f"ended, left behind by the stopped engine: {words}")


def shown(verdict: Verdict) -> str:
    """What is wrong with a start, in words."""
    if verdict.outcome == NO_ANSWER:
        return f"{verdict.release}: {verdict.detail}"
    return verdict.detail


def _journal() -> str:
    return f"see `journalctl -u {systemd.ENGINE_UNIT}`"
