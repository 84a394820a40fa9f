"""`switch` and `rollback`: asked from a terminal, done by a systemd unit of their own."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from pathlib import Path

from hostlib.errors import EXIT_FAILED, EXIT_UNABLE, HostError

from enginectl import exits, switch, systemd
from enginectl.commands import one_line, who
from enginectl.lock import holder
from enginectl.paths import Places
from enginectl.prepare import checked_release
from enginectl.record import Record, gate_text, say
from enginectl.state import DamagedState, load_state

PROGRAM = Path(__file__).resolve().parent.parent / "bin" / "enginectl"


def run_switch(arguments: argparse.Namespace) -> int:
    """`switch NAME`."""
    return _switch(arguments, arguments.name, back=False)


def run_rollback(arguments: argparse.Namespace) -> int:
    """`rollback`: a switch to the release before the committed one, which is rejected."""
    places = Places()
    previous = load_state(places).previous
    if previous is None:
        raise HostError(
            f"{places.state}: there is no release before the committed one; name one with "
            "`enginectl switch`, `enginectl releases` lists them",
            exit_code=exits.EXIT_REFUSED,
        )
    return _switch(arguments, previous, back=True)


def _switch(arguments: argparse.Namespace, name: str, *, back: bool) -> int:
    places = Places()
    if os.geteuid() != 0:
        raise HostError("a switch needs root; run it with sudo", exit_code=EXIT_UNABLE)
    reason, by = one_line(arguments.reason), who()
    if not arguments.retry:
        with contextlib.suppress(DamagedState):  # the switch itself sets it right
            switch.refuse_rejected(load_state(places), name)
    [unit] = systemd.show(systemd.SWITCH_UNIT)
    if unit.main_pid == os.getpid():
        record = switch.run(places, name, reason, by, retry=arguments.retry, back=back)
        return _answer(record, arguments.json)
    if unit.active in ("active", "activating", "deactivating"):
        raise _busy(places)
    release = checked_release(places, name)
    with contextlib.suppress(DamagedState):
        if switch.is_committed_and_serving(places, release):
            record = Record(by, reason, name, name, outcome=exits.UNCHANGED)
            return _answer(record, arguments.json)
    command = [str(PROGRAM), "rollback" if back else "switch", *([] if back else [name])]
    command += [f"--reason={reason}", *["--retry"] * arguments.retry, *["--json"] * arguments.json]
    return _under_systemd(places, command, by)


def _under_systemd(places: Places, command: list[str], by: str) -> int:
    """Run the same command as a service: a broken session or Ctrl-C cannot cut it."""
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
            f"{systemd.SWITCH_UNIT}: was killed; the committed release is being started, "
            "`enginectl status` shows it",
            exit_code=exits.EXIT_SWITCH_INTERRUPTED,
        )
    if code == EXIT_FAILED:  # systemd-run's own: the unit exists already, or systemd refused
        [unit] = systemd.show(systemd.SWITCH_UNIT)
        if unit.active == "active":
            raise _busy(places)
        raise HostError("systemd-run: could not start the switch", exit_code=EXIT_UNABLE)
    return code


def _busy(places: Places) -> HostError:
    return HostError(
        f"a switch is running ({holder(places)}); wait for it, `enginectl status` shows it",
        exit_code=exits.EXIT_LOCKED,
    )


def _answer(record: Record, as_json: bool) -> int:
    detail = f": {record.detail}" if record.detail else ""
    for gate in record.gates:
        say(gate_text(gate))
    try:
        if as_json:
            print(json.dumps(record.as_dict()), flush=True)
        else:
            print(f"{record.to}: {record.outcome}{detail}", flush=True)
    except OSError:  # the one who asked is gone; the history has it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return exits.EXIT_OF_OUTCOME[record.outcome]
