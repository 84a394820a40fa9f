"""The releases of this host: what there is, what changes from one to another, what may go."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Mapping, Sequence
from typing import Any

from hostlib.atomic import fsync_dir
from hostlib.errors import HostError

from enginectl import strict
from enginectl.paths import Places
from enginectl.release import NAME, check_name, load_release
from enginectl.runfiles import load_trial
from enginectl.state import State, load_state, startable_state

# As operators say them.
WORDS = {
    "--speculative-config.num_speculative_tokens": "k",
    "--max-num-seqs": "MNS",
    "--gpu-memory-utilization": "GMU",
}
KEPT = 5


def listed(places: Places) -> list[dict[str, Any]]:
    """Every release, oldest first: its name, engine, what it is to the state, and if it is valid.

    Raises:
        OSError: a folder cannot be read.
    """
    state, _ = startable_state(places)
    found = []
    for name in _by_age(places):
        problem = None
        try:
            load_release(places, name)
        except (HostError, OSError) as error:
            problem = str(error)
        found.append(
            {
                "name": name,
                "engine": name.rpartition("-")[0],
                "committed": name == state.committed,
                "previous": name == state.previous,
                "rejected": state.rejected.get(name),
                "problem": problem,
            }
        )
    return found


def diff(places: Places, one: str, other: str) -> list[str]:
    """What changes from release `one` to `other`, one change a line; empty if nothing does.

    Raises:
        HostError: there is no such release.
        OSError: a file cannot be read.
    """
    before, after = (_flat(places, name) for name in (one, other))
    lines = []
    for key in [*before, *(key for key in after if key not in before)]:
        old, new = before.get(key), after.get(key)
        if old == new:
            continue
        word = WORDS.get(key, key)
        if old is None:
            lines.append(f"{word}: new, {new}")
        elif new is None:
            lines.append(f"{word}: gone, was {old}")
        else:
            lines.append(f"{word} {old} → {new}")
    return lines


def removable(names: Sequence[str], state: State, trial: str | None, kept: int) -> list[str]:
    """Which of `names` (oldest first) nobody needs any more.

    Kept are the committed release and the one before it, a candidate, the latest `kept`, and
    whatever belongs to another engine than the committed one: the old stack is never collected.
    """
    engine = (state.committed or "").rpartition("-")[0]
    needed = {state.committed, state.previous, trial, *names[max(0, len(names) - kept) :]}
    return [name for name in names if name not in needed and name.rpartition("-")[0] == engine]


def collect(places: Places, kept: int = KEPT) -> list[str]:
    """Remove what is `removable`; returns the names.

    Raises:
        HostError: the state cannot be read, so nothing is removed.
        OSError: a folder could not be removed.
    """
    trial = load_trial(places)
    names = removable(_by_age(places), load_state(places), trial.release if trial else None, kept)
    for name in names:
        gone = places.releases / f".gone.{name}"
        (places.releases / name).rename(gone)
        fsync_dir(places.releases)
    for gone in places.releases.glob(".gone.*"):
        shutil.rmtree(gone)
    return names


def _by_age(places: Places) -> list[str]:
    folders = [entry for entry in places.releases.glob("*") if NAME.fullmatch(entry.name)]
    return [entry.name for entry in sorted(folders, key=lambda path: path.stat().st_mtime_ns)]


def _flat(places: Places, name: str) -> dict[str, str]:
    """A release as `setting: value`, the command line by flags."""
    load_release(places, check_name(name))  # its errors name the way out
    content = strict.read(places.release(name))
    flat: dict[str, str] = {}
    argv = content.pop("argv")
    content.pop("name")
    first = next((at for at, word in enumerate(argv) if word.startswith("--")), len(argv))
    flag = "command"
    # a prefix such as numactl has flags of its own: the engine's follow the module's name
    if "-m" in argv:
        first = argv.index("-m") + 2
    values: dict[str, list[str]] = {flag: argv[:first]}
    for word in argv[first:]:
        name_part, equals, value = word.partition("=")
        if word.startswith("--"):
            flag = name_part
            values[flag] = [value] if equals else []
        else:
            values[flag].append(word)
    for flag, words in values.items():
        _add(flat, flag, " ".join(words) or "set")
    for key, value in content.items():
        _add(flat, key, value)
    return flat


def _add(flat: dict[str, str], key: str, value: object) -> None:
    if isinstance(value, str) and value.startswith("{"):
        with contextlib.suppress(ValueError):
            value = json.loads(value)
    if isinstance(value, Mapping):
        for part, entry in value.items():
            _add(flat, f"{key}.{part}", entry)
    else:
        flat[key] = value if isinstance(value, str) else json.dumps(value)
