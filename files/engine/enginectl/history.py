"""The history: one line of JSON an event, for people. The state outranks it.

A switch writes a line when it begins to touch the engine and one when it ends, with the same
`id`: one that begins and never ends was killed, or the power was cut.
"""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Iterable
from typing import Any

from hostlib.atomic import fsync_dir

from enginectl.paths import Places

FORMAT = 1
# Then the file becomes the older half, and the older half before it is forgotten.
LIMIT_BYTES = 8 << 20

BEGUN = "switch begun"
ENDED = "switch ended"
BOOT = "boot"
SETTLED = "settled"
DRAINED = "drained"

Event = dict[str, Any]


def now() -> str:
    """This moment in UTC, to the second."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def append(places: Places, event: str, **content: Any) -> None:
    """Add one event, durable before this returns.

    Raises:
        OSError: it could not be written.
    """
    line = json.dumps({"format": FORMAT, "time": now(), "event": event, **content}).encode()
    file = places.history
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.exists() and file.stat().st_size > LIMIT_BYTES:
        file.replace(file.with_name("history.1.jsonl"))
    with file.open("ab+") as stream:
        torn = False
        if stream.seek(0, os.SEEK_END):
            stream.seek(-1, os.SEEK_END)
            torn = stream.read(1) != b"\n"  # a power cut may have left half a line
        stream.write(b"\n" * torn + line + b"\n")
        stream.flush()
        os.fsync(stream.fileno())
    fsync_dir(file.parent)


def read(places: Places) -> tuple[list[Event], int]:
    """All events, oldest first, and the number of lines that cannot be read.

    A switch is one event: its end, or where that is missing its beginning with the outcome
    `interrupted`, unless it is the one that runs now.

    Raises:
        OSError: a file cannot be read.
    """
    events: list[Event] = []
    damaged = 0
    for file in (places.history.with_name("history.1.jsonl"), places.history):
        try:
            lines = file.read_bytes().splitlines()
        except FileNotFoundError:
            continue
        for line in lines:
            event = _parse(line)
            if event is None:
                damaged += bool(line.strip())
            else:
                events.append(event)
    return _paired(events), damaged


def as_text(event: Event) -> str:
    """One event in one line, its steps and failed gates below it."""
    head = f"{event.get('time', '?')}  {event['event']}: "
    if event["event"] == ENDED:
        head += f"{event.get('before') or 'nothing'} -> {event.get('to')}: {event.get('outcome')}"
        head += f", by {event.get('by')}: {event.get('reason')}"
    else:
        head += ", ".join(
            str(event[key])
            for key in ("release", "outcome", "by", "reason", "action")
            if event.get(key)
        )
    lines = [head]
    if event.get("detail"):
        lines.append(f"    {event['detail']}")
    steps = [f"{step['step']} {step['seconds']} s" for step in event.get("steps", [])]
    if steps:
        lines.append(f"    {', '.join(steps)}")
    return "\n".join(lines)


def _parse(line: bytes) -> Event | None:
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) and isinstance(found.get("event"), str) else None


def _paired(events: Iterable[Event]) -> list[Event]:
    found = list(events)
    ended = {event.get("id") for event in found if event["event"] == ENDED}
    paired: list[Event] = []
    for event in found:
        if event["event"] != BEGUN:
            paired.append(event)
        elif event.get("id") not in ended:
            detail = "killed, or the power was cut; or it is still running"
            paired.append({**event, "event": ENDED, "outcome": "interrupted", "detail": detail})
    return paired
