"""The file with everybody's keys: name → sha256 and limits. Checked, watched, rewritten whole."""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Iterable
from pathlib import Path

from fable_gateway import checked
from fable_gateway.checked import Wrong
from fable_gateway.keys import MOST_IN_FLIGHT, MOST_PER_MINUTE, NAME, SHA256, Key, KeyRing

DEFAULT = Path("/etc/fable-gateway/keys.json")
# Newer Pythons take more than this for a date.
DAY = re.compile(r"\d{4}-\d\d-\d\d", re.ASCII)

Mark = tuple[int, int, int] | None


def load(path: Path) -> KeyRing:
    """Read `path`.

    Raises:
        GatewayError: it cannot be read (exit code 2) or is wrong (exit code 1).
    """
    return parse(checked.read_file(path), str(path))


def parse(content: bytes, place: str) -> KeyRing:
    """Check the text of a key file; `place` names it in errors.

    Raises:
        GatewayError: the first thing that is wrong, by the key's name.
    """
    return checked.parsed(content, place, _ring)


def text(keys: Iterable[Key]) -> str:
    """The file that holds `keys`."""
    return json.dumps({key.name: key.settings() for key in keys}, indent=1) + "\n"


def mark(path: Path) -> Mark:
    """What changes whenever the file is replaced or written; None while it is not there."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


def day(value: str) -> datetime.date:
    """A date as YYYY-MM-DD.

    Raises:
        Wrong: it is none.
    """
    try:
        return datetime.date.fromisoformat(value if DAY.fullmatch(value) else "")
    except ValueError:
        raise Wrong(f"{value!r} is no date like 2027-01-31") from None


def _ring(value: object) -> KeyRing:
    owners: dict[str, str] = {}
    found: list[Key] = []
    for name, entry in checked.mapping(value, "the keys").items():
        if not NAME.fullmatch(name):
            raise Wrong(f"{name!r} is no name for a key (letters, digits, '.', '_', '-')")
        key = _key(name, entry)
        if key.sha256 in owners:
            raise Wrong(f"{name}.sha256: {owners[key.sha256]} has the same key")
        owners[key.sha256] = name
        found.append(key)
    return KeyRing(tuple(found))


def _key(name: str, entry: object) -> Key:
    limits = "expires models max_in_flight requests_per_minute"
    fields = checked.fields(entry, name, "sha256", limits)
    digest = fields["sha256"]
    if not isinstance(digest, str) or not SHA256.fullmatch(digest):
        raise Wrong(f"{name}.sha256: must be 64 lower-case hex digits")
    expires, in_flight = fields.get("expires"), fields.get("max_in_flight")
    models, rate = fields.get("models"), fields.get("requests_per_minute")
    where = f"{name}.requests_per_minute"
    try:
        until = None if expires is None else day(checked.text(expires, "it"))
    except Wrong as wrong:
        raise Wrong(f"{name}.expires: {wrong}") from None
    return Key(
        name=name,
        sha256=digest,
        expires=until,
        models=() if models is None else checked.names(models, f"{name}.models"),
        max_in_flight=None
        if in_flight is None
        else checked.integer(in_flight, f"{name}.max_in_flight", 1, MOST_IN_FLIGHT),
        requests_per_minute=None
        if rate is None
        else checked.integer(rate, where, 1, MOST_PER_MINUTE),
    )
