"""JSON from a file, checked piece by piece; what is wrong is one line that begins with its key."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from fable_gateway.errors import EXIT_UNABLE, GatewayError

MAX_FILE_BYTES = 1 << 20
Result = TypeVar("Result")


class Wrong(ValueError):
    """What is wrong, with the key first."""


def read_file(path: Path) -> bytes:
    """The content of `path`.

    Raises:
        GatewayError: it cannot be read (exit code 2) or is far too large (exit code 1).
    """
    try:
        with path.open("rb") as stream:
            content = stream.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise GatewayError(
            f"{path}: cannot be read ({error.strerror}); the deploy writes it", EXIT_UNABLE
        ) from None
    if len(content) > MAX_FILE_BYTES:
        raise GatewayError(f"{path}: larger than {MAX_FILE_BYTES} bytes; the deploy writes it anew")
    return content


def parsed(content: bytes, place: str, check: Callable[[object], Result]) -> Result:
    """What `check` makes of the JSON in `content`; `place` names it in errors.

    Raises:
        GatewayError: it is not JSON, or the first thing that `check` finds `Wrong`.
    """
    try:
        return check(json.loads(content.decode(), object_pairs_hook=distinct))
    except json.JSONDecodeError as error:
        raise GatewayError(
            f"{place}: line {error.lineno}: not JSON ({error.msg}); deploy it again"
        ) from None
    except (UnicodeDecodeError, RecursionError):
        raise GatewayError(f"{place}: not JSON; deploy it again") from None
    except Wrong as wrong:
        raise GatewayError(f"{place}: {wrong}; correct the settings and deploy again") from None


def distinct(pairs: Sequence[tuple[str, object]]) -> dict[str, object]:
    """An `object_pairs_hook` that refuses a key that stands twice."""
    result: dict[str, object] = {}
    for key, value in pairs:
        if key in result:
            raise Wrong(f"{key!r}: stands twice")
        result[key] = value
    return result


def mapping(value: object, where: str) -> dict[str, object]:
    """`value`, an object."""
    if not isinstance(value, dict):
        raise Wrong(f"{where}: must be an object")
    return value


def fields(value: object, where: str, names: str, optional: str = "") -> dict[str, object]:
    """`value`, an object with all of `names` and any of `optional`, both divided by blanks."""
    found = mapping(value, where)
    needed, known = names.split(), f"{names} {optional}".split()
    for name in found:
        if name not in known:
            raise Wrong(f"{where}: unknown key {name!r}, known are {', '.join(known)}")
    for name in needed:
        if name not in found:
            raise Wrong(f"{where}: {name} is missing")
    return found


def text(value: object, where: str) -> str:
    """`value`, a text that is not empty."""
    if not isinstance(value, str) or not value:
        raise Wrong(f"{where}: must be a text that is not empty")
    return value


def integer(value: object, where: str, low: int, high: int) -> int:
    """`value`, a whole number in [low, high]."""
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise Wrong(f"{where}: must be a whole number from {low} to {high}")
    return value


def seconds(value: object, where: str, low: float) -> float:
    """`value`, seconds from `low` to a day."""
    high = 86_400
    if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value <= high:
        raise Wrong(f"{where}: must be seconds from {low:g} to {high}")
    return float(value)


def names(value: object, where: str) -> tuple[str, ...]:
    """`value`, a list of names, at least one, none twice."""
    if not isinstance(value, list) or not value:
        raise Wrong(f"{where}: must be a list of names")
    found = tuple(text(name, f"{where}[{place}]") for place, name in enumerate(value))
    if len(set(found)) < len(found):
        raise Wrong(f"{where}: a name stands twice")
    return found
