"""The command line of `enginectl`."""

from __future__ import annotations

import argparse
import json
import os
import pwd
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hostlib.errors import EXIT_FAILED, EXIT_OK, EXIT_UNABLE, HostError, run_main

from enginectl import bootlog, exits, gates, server, status, switch, systemd
from enginectl.launch import launch
from enginectl.paths import Places
from enginectl.release import load_release
from enginectl.state import load_state

PROGRAM = Path(__file__).resolve().parent.parent / "bin" / "enginectl"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code (see `exits`)."""
    arguments = _parser().parse_args(argv)
    return run_main("enginectl", lambda: int(arguments.command(arguments)))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="enginectl",
        description="Starts, switches and inspects the engine of this host.",
        epilog=exits.HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, run: Any, words: str, *, rooted: bool) -> argparse.ArgumentParser:
        one = commands.add_parser(name, help=words, description=words, allow_abbrev=False)
        one.set_defaults(command=run, root=Path("/"))
        one.add_argument("--json", action="store_true", help="answer in JSON on standard output")
        # A switch runs as root on behalf of others: it takes no other folder.
        if rooted:
            one.add_argument("--root", type=Path, metavar="DIR", help="files below DIR, not /")
        return one

    add("launch", _launch, "become the engine (for the unit's ExecStart)", rooted=True)
    add("status", _status, "show what is committed, what runs and how", rooted=True)
    one = add("gates", _gates, "judge the running start by the 11 gates", rooted=True)
    one.add_argument("--log", type=Path, metavar="FILE", help="judge this log; ask no server")
    one = add("switch", _switch, "make NAME the running, committed release", rooted=False)
    one.add_argument("name", metavar="NAME", help="a release of this host")
    one.add_argument("--reason", required=True, metavar="TEXT", help="why, for the history")
    return parser


def _launch(arguments: argparse.Namespace) -> int:
    launch(Places(arguments.root), os.environ)
    return EXIT_FAILED


def _status(arguments: argparse.Namespace) -> int:
    answer = status.collect(Places(arguments.root))
    print(json.dumps(answer) if arguments.json else status.as_text(answer))
    return EXIT_OK if answer["serving"] else EXIT_FAILED


def _gates(arguments: argparse.Namespace) -> int:
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
        results = switch.judge(places, release, unit.invocation, chat)
    if arguments.json:
        print(json.dumps([asdict(gate) for gate in results]))
    else:
        print("\n".join(_gate_text(gate) for gate in results))
    return EXIT_OK if all(gate.verdict == gates.PASS for gate in results) else EXIT_FAILED


def _switch(arguments: argparse.Namespace) -> int:
    places = Places()
    if os.geteuid() != 0:
        raise HostError("switch: needs root; run it with sudo", exit_code=EXIT_UNABLE)
    if not arguments.reason.strip() or not arguments.reason.isprintable():
        raise HostError("--reason: must be one line of text", exit_code=exits.EXIT_REFUSED)
    by = os.environ.get("SUDO_USER") or pwd.getpwuid(os.getuid()).pw_name
    release = switch.checked_release(places, arguments.name)
    [unit] = systemd.show(systemd.SWITCH_UNIT)
    if unit.main_pid == os.getpid():
        record = switch.run(places, release.name, arguments.reason, by)
        return _answer(record, arguments.json)
    if unit.active in ("active", "activating", "deactivating"):
        raise _busy(places)
    if switch.is_committed_and_serving(places, release):
        record = switch.Record(by, arguments.reason, release.name, release.name, exits.UNCHANGED)
        return _answer(record, arguments.json)
    return _switch_under_systemd(places, arguments, by)


def _switch_under_systemd(places: Places, arguments: argparse.Namespace, by: str) -> int:
    """Run the same command as a service: a broken session or Ctrl-C cannot cut it."""
    command = [str(PROGRAM), "switch", arguments.name, f"--reason={arguments.reason}"]
    command += ["--json"] * arguments.json
    try:
        code = systemd.run_as_switch(command, {"SUDO_USER": by})
    except KeyboardInterrupt:
        print(
            "enginectl: the switch goes on under systemd; `enginectl status` shows it, "
            f"`systemctl stop {systemd.SWITCH_UNIT}` ends it",
            file=sys.stderr,
        )
        raise
    if code < 0 or code == 255:
        raise HostError(
            f"{systemd.SWITCH_UNIT}: was killed; see `enginectl status`, and start the committed "
            f"release with `systemctl start {systemd.ENGINE_UNIT}`",
            exit_code=exits.EXIT_SWITCH_INTERRUPTED,
        )
    if code == EXIT_FAILED:  # systemd-run's own: the unit exists already, or systemd refused
        [unit] = systemd.show(systemd.SWITCH_UNIT)
        if unit.active == "active":
            raise _busy(places)
        raise HostError("systemd-run: could not start the switch", exit_code=EXIT_UNABLE)
    return code


def _busy(places: Places) -> HostError:
    try:
        owner = places.lock.read_text(encoding="utf-8").strip()
    except OSError:
        owner = "another process"
    return HostError(
        f"a switch is running ({owner}); wait for it, `enginectl status` shows it",
        exit_code=exits.EXIT_LOCKED,
    )


def _answer(record: switch.Record, as_json: bool) -> int:
    detail = f": {record.detail}" if record.detail else ""
    for gate in record.gates:
        switch.say(_gate_text(gate))
    try:
        if as_json:
            print(json.dumps(record.as_dict()), flush=True)
        else:
            print(f"{record.to}: {record.outcome}{detail}", flush=True)
    except OSError:  # the one who asked is gone; the history has it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return exits.EXIT_OF_OUTCOME[record.outcome]


def _gate_text(gate: gates.Gate) -> str:
    place = f" [line {gate.evidence.line}: {gate.evidence.text}]" if gate.evidence else ""
    return f"{gate.number:>2} {gate.verdict:<11} {gate.name}: {gate.reason}{place}"
