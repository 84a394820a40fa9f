"""What runs, as one look shows it: at most one subprocess."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hostlib.errors import HostError

from enginectl import network, server, systemd
from enginectl.paths import Places
from enginectl.release import Release, load_release
from enginectl.runfiles import DEGRADED, load_hold, load_start, load_trial, load_verdict
from enginectl.state import startable_state

_FLAGS = {
    "--max-num-seqs": "max_num_seqs",
    "--gpu-memory-utilization": "gpu_memory_utilization",
    "--max-model-len": "max_model_len",
    "--max-num-batched-tokens": "max_num_batched_tokens",
}


def collect(places: Places) -> dict[str, Any]:
    """The state of the engine in plain JSON types.

    `running` holds what the process's own arguments say: mtp_depth (k), max_num_seqs (MNS),
    gpu_memory_utilization (GMU), max_model_len and max_num_batched_tokens, each null if absent.
    `degraded` says why a serving engine is not as it should be. What cannot be known is null, and
    `problems` says why.
    """
    problems: list[str] = []
    answer: dict[str, Any] = {
        "committed": None,
        "previous": None,
        "trial": None,
        "unit": None,
        "listen": None,
        "healthy": None,
        "served_names": None,
        "serving": False,
        "degraded": None,
        "running": None,
        "failed_boots": 0,
        "rejected": {},
        "held": None,
        "problems": problems,
    }
    engine: systemd.Unit | None = None
    try:
        engine, switch = systemd.show(systemd.ENGINE_UNIT, systemd.SWITCH_UNIT)
        answer["unit"] = {
            "active_state": engine.active,
            "sub_state": engine.sub,
            "restarts": engine.restarts,
            "main_pid": engine.main_pid,
            "invocation": engine.invocation,
        }
        if engine.main_pid:
            answer["running"] = settings_of(command_line(engine.main_pid))
        _look_at_run_files(places, engine, switch, answer)
    except HostError as error:
        problems.append(error.message)
    try:
        state, damage = startable_state(places)
        if damage is not None:
            problems.append(damage.message)
        answer["committed"], answer["previous"] = state.committed, state.previous
        answer["rejected"], answer["failed_boots"] = dict(state.rejected), state.failed_boots
        if state.failed_boots:
            problems.append(f"{state.failed_boots} boots in a row gave no answer; see the history")
        if state.committed is None:
            problems.append(f"{places.state}: no release is committed")
        else:
            _look_at_server(places, load_release(places, state.committed), engine, answer)
    except HostError as error:
        problems.append(error.message)
    return answer


def _look_at_run_files(
    places: Places, engine: systemd.Unit, switch: systemd.Unit, answer: dict[str, Any]
) -> None:
    hold = load_hold(places)
    if hold is not None:
        answer["held"] = asdict(hold)
    start, verdict = load_start(places, engine.invocation), load_verdict(places)
    if start is not None and start.unit_text != engine.text_digest:
        answer["problems"].append(
            f"{systemd.ENGINE_UNIT}: its text has changed; takes effect with the next start, "
            f"`systemctl restart {systemd.ENGINE_UNIT}`"
        )
    if verdict is not None and verdict.invocation == engine.invocation:
        if verdict.outcome == DEGRADED:
            answer["degraded"] = verdict.detail
    elif verdict is not None and not verdict.answers:
        answer["problems"].append(f"the latest start: {verdict.outcome}: {verdict.detail}")
    trial = load_trial(places)
    if trial is not None:
        active = switch.active == "active" and switch.invocation == trial.invocation
        answer["trial"] = {"release": trial.release, "active": active}


def _look_at_server(
    places: Places, release: Release, engine: systemd.Unit | None, answer: dict[str, Any]
) -> None:
    answer["listen"] = str(release.listen)
    answer["healthy"] = server.healthy(release.listen)
    answer["served_names"] = server.served_names(release.listen)
    if engine is None:
        return
    faults = unit_faults(places, release, engine)
    answer["problems"] += faults
    answer["serving"] = (
        runs(places, release, engine)
        and not faults
        and answer["healthy"]
        and answer["served_names"] == release.served_names
    )


def unit_faults(places: Places, release: Release, unit: systemd.Unit) -> list[str]:
    """Why the answer on the port may not be the unit's with this release."""
    faults = []
    if unit.running and not runs(places, release, unit):
        faults.append(
            f"the unit runs something else than {release.name}; `enginectl settle` starts that"
        )
    if network.taken_by_others(release.listen, systemd.all_processes(unit)):
        faults.append(f"{release.listen}: a process that is not the unit's listens there; end it")
    return faults


def runs(places: Places, release: Release, unit: systemd.Unit) -> bool:
    """Whether the unit's main process was started as `release` and has its arguments.

    A prefix that replaces itself by the engine, such as numactl, is gone from the process.
    """
    start = load_start(places, unit.invocation)
    if start is not None and start.release != release.name:
        return False
    found = command_line(unit.main_pid) if unit.running else []
    return bool(found) and list(release.argv[-len(found) :]) == found


def command_line(pid: int) -> list[str]:
    """The arguments of process `pid`; empty if it has ended."""
    try:
        content = (Path("/proc") / str(pid) / "cmdline").read_bytes()
    except OSError:
        return []
    return [word.decode("utf-8", "replace") for word in content.split(b"\0")[:-1]]


def settings_of(argv: Sequence[str]) -> dict[str, Any]:
    """The settings that people ask for, read from the engine's arguments."""
    values: dict[str, str] = {}
    for word, following in zip(argv, [*argv[1:], ""]):  # noqa: B905
        flag, equals, value = word.partition("=")
        if flag.startswith("--"):
            values[flag] = value if equals else following
    found: dict[str, Any] = {"mtp_depth": _depth(values.get("--speculative-config"))}
    for flag, key in _FLAGS.items():
        found[key] = _number(values.get(flag))
    return found


def as_text(answer: dict[str, Any]) -> str:
    """`collect`'s answer for people."""
    unit, running = answer["unit"] or {}, answer["running"] or {}
    trial = answer["trial"]
    health = {True: "healthy", False: "no answer", None: "unknown"}[answer["healthy"]]
    lines = [
        f"release   {answer['committed'] or 'none committed'}"
        + (f" (before it: {answer['previous']})" if answer["previous"] else ""),
        f"unit      {unit.get('active_state', '?')} ({unit.get('sub_state', '?')}), "
        f"main process {unit.get('main_pid', '?')}, {unit.get('restarts', '?')} restarts",
        f"serves    {answer['listen'] or '?'}: {health}, as "
        + (" ".join(answer["served_names"] or []) or "?"),
        f"settings  k={_shown(running, 'mtp_depth')} MNS={_shown(running, 'max_num_seqs')} "
        f"GMU={_shown(running, 'gpu_memory_utilization')} "
        f"max_model_len={_shown(running, 'max_model_len')} "
        f"batched_tokens={_shown(running, 'max_num_batched_tokens')}",
    ]
    if trial:
        words = "a switch tries" if trial["active"] else "left by an ended switch:"
        lines.append(f"trial     {words} {trial['release']}")
    if answer["held"]:
        lines.append(f"held down by {answer['held']['by']}: {answer['held']['reason']}")
    if answer["degraded"]:
        lines.append(f"DEGRADED  {answer['degraded']}")
    return "\n".join(lines + [f"problem   {text}" for text in answer["problems"]])


def _shown(running: dict[str, Any], key: str) -> str:
    value = running.get(key)
    return "?" if value is None else str(value)


def _depth(config: str | None) -> int | None:
    if config is None:
        return None
    try:
        depth = json.loads(config)["num_speculative_tokens"]
    except (ValueError, KeyError, TypeError):
        return None
    return depth if type(depth) is int else None


def _number(text: str | None) -> int | float | None:
    for kind in (int, float):
        try:
            return kind(text or "")
        except ValueError:
            continue
    return None
