"""What each command of `enginectl` does, its answer for people and in JSON."""

from __future__ import annotations

import argparse
import json
import os
import pwd
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from hostlib.errors import EXIT_FAILED, EXIT_OK, EXIT_UNABLE, HostError

from enginectl import (
    bootlog,
    engine,
    exits,
    gates,
    history,
    releases,
    server,
    settle,
    start,
    status,
    systemd,
)
from enginectl.launch import launch
from enginectl.lock import one_at_a_time
from enginectl.paths import Places
from enginectl.prepare import checked_release, prepare
from enginectl.record import Record, gate_text
from enginectl.release import load_release
from enginectl.runfiles import Hold, load_start, remove, save
from enginectl.state import load_state


def run_launch(arguments: argparse.Namespace) -> int:
    """`launch`: never returns but by raising."""
    launch(Places(arguments.root), os.environ)
    return EXIT_FAILED


def run_before_start(arguments: argparse.Namespace) -> int:
    """`before-start`."""
    return start.before_start(Places(arguments.root), os.environ)


def run_after_start(arguments: argparse.Namespace) -> int:
    """`after-start`."""
    return start.after_start(Places(arguments.root), os.environ)


def run_status(arguments: argparse.Namespace) -> int:
    """`status`."""
    answer = status.collect(Places(arguments.root))
    _print(arguments, answer, lambda: status.as_text(answer))
    if not answer["serving"]:
        return EXIT_FAILED
    return exits.EXIT_DEGRADED if answer["degraded"] else EXIT_OK


def run_gates(arguments: argparse.Namespace) -> int:
    """`gates`: judge the running start anew, or a log."""
    places = Places(arguments.root)
    name = load_state(places).committed
    if name is None:
        raise HostError(f"{places.state}: no release is committed, so no gates are known")
    release = load_release(places, name)
    if arguments.log:
        lines = bootlog.read_lines(arguments.log)
        results = gates.evaluate(gates.observe(lines, release.gates), release.gates, None)
    else:
        [unit] = systemd.show(systemd.ENGINE_UNIT)
        if not unit.running:
            raise HostError(
                f"{systemd.ENGINE_UNIT}: is {unit.active}; start it, or name a log with --log"
            )
        chat = server.chat(release.listen, release.served_names[0])
        results = start.judge(places, release, unit.invocation, chat)
    found = [asdict(gate) for gate in results]
    _print(arguments, found, lambda: "\n".join(map(gate_text, found)))
    return EXIT_OK if all(gate.verdict == gates.PASS for gate in results) else EXIT_FAILED


def run_prepare(arguments: argparse.Namespace) -> int:
    """`prepare`: whether a switch to a release could be tried now; only looks."""
    places = Places()
    _need_root("prepare")
    release = checked_release(places, arguments.name)
    [unit] = systemd.show(systemd.ENGINE_UNIT)
    prepare(places, release, unit)
    answer = {"release": release.name, "ready": True}
    _print(arguments, answer, lambda: f"{release.name}: ready to be switched to")
    return EXIT_OK


def run_settle(arguments: argparse.Namespace) -> int:
    """`settle`: see that the committed release is what the unit runs."""
    places = Places()
    _need_root("settle")
    if arguments.unattended:
        settled = settle.settle_beside_a_switch(places, by="timer")
        # systemd reads the level in front: what was done is kept, the rest is not
        print(f"<{4 if settled.done else 6}>{settled}")
        return EXIT_OK
    settled = settle.settle(places, by=who(), unattended_run=False, give_up_newer=arguments.restore)
    _print(arguments, asdict(settled), lambda: str(settled))
    return EXIT_OK


def run_drain(arguments: argparse.Namespace) -> int:
    """`drain`: let running requests finish, stop the engine, and keep it stopped."""
    places = Places()
    _need_root("drain")
    record = Record(who(), one_line(arguments.reason), None, "")
    with one_at_a_time(places, f"drain by {record.by}: {record.reason}"):
        [unit] = systemd.show(systemd.ENGINE_UNIT)
        begun = load_start(places, unit.invocation) if unit.invocation else None
        name = begun.release if begun else load_state(places).committed
        if name is None:
            raise HostError(f"{places.state}: no release is committed, so nothing runs")
        save(places.hold, Hold(record.by, record.reason))
        try:
            with record.step("drain and stop"):
                engine.drain_and_stop(load_release(places, name), record)
        except KeyboardInterrupt:
            remove(places.hold)
            raise
        history.append(
            places, history.DRAINED, by=record.by, reason=record.reason, steps=record.steps,
            drain=record.drain,
        )  # fmt: skip
    cut = record.drain["cut_off"]
    words = f"stopped, {cut or 'no'} requests were cut off; `enginectl settle` starts it again"
    _print(arguments, {"release": name, **record.drain}, lambda: words)
    return EXIT_OK


def run_releases(arguments: argparse.Namespace) -> int:
    """`releases`."""
    found = releases.listed(Places(arguments.root))

    def text() -> str:
        lines = []
        for one in found:
            marks = [mark for mark in ("committed", "previous") if one[mark]]
            if one["rejected"]:
                marks.append(f"rejected ({one['rejected']})")
            if one["problem"]:
                marks.append(f"not valid ({one['problem']})")
            lines.append(f"{one['name']}  {', '.join(marks)}".rstrip())
        return "\n".join(lines) or "no release was laid down yet"

    _print(arguments, found, text)
    return EXIT_OK


def run_diff(arguments: argparse.Namespace) -> int:
    """`diff`."""
    lines = releases.diff(Places(arguments.root), arguments.one, arguments.other)
    _print(arguments, lines, lambda: "\n".join(lines) or "the same")
    return EXIT_OK


def run_history(arguments: argparse.Namespace) -> int:
    """`history`: the latest events, oldest first."""
    places = Places(arguments.root)
    events, damaged = history.read(places)
    shown = events[-arguments.number :]

    def text() -> str:
        lines = [history.as_text(event) for event in shown]
        if damaged:
            lines.append(f"{places.history}: {damaged} lines cannot be read and are left out")
        return "\n".join(lines) or "nothing has happened yet"

    _print(arguments, {"events": shown, "damaged_lines": damaged}, text)
    return EXIT_OK


def run_collect(arguments: argparse.Namespace) -> int:
    """`collect`: remove releases that nobody needs."""
    _need_root("collect")
    places = Places()
    with one_at_a_time(places, "collect"):
        names = releases.collect(places, arguments.keep)
    _print(arguments, {"removed": names}, lambda: "\n".join(names) or "nothing to remove")
    return EXIT_OK


def who() -> str:
    """The person behind this command."""
    return os.environ.get("SUDO_USER") or pwd.getpwuid(os.getuid()).pw_name


def one_line(reason: str) -> str:
    """`reason`, if it is one line of text.

    Raises:
        HostError: it is not.
    """
    if not reason.strip() or not reason.isprintable():
        raise HostError("--reason: must be one line of text", exit_code=exits.EXIT_REFUSED)
    return reason


def _need_root(command: str) -> None:
    if os.geteuid() != 0:
        raise HostError(f"{command}: needs root; run it with sudo", exit_code=EXIT_UNABLE)


def _print(arguments: argparse.Namespace, answer: Any, text: Callable[[], str]) -> None:
    print(json.dumps(answer) if arguments.json else text())
