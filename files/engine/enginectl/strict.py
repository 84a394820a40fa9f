"""JSON files read strictly: no unknown, missing, doubled or wrongly typed keys."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hostlib import strict_json
from hostlib.errors import HostError

WAY_OUT = "deploy it again"
LIMIT_BYTES = 1 << 20

Types = Mapping[str, type | tuple[type, ...]]


def loads(text: str | bytes, where: str) -> dict[str, Any]:
    """The JSON object in `text`.

    Raises:
        HostError: not JSON, not an object, or a key stands twice.
    """
    return strict_json.parse_object(text, where, WAY_OUT)


def read(path: Path) -> dict[str, Any]:
    """The JSON object in the file `path`.

    Raises:
        HostError: as in `loads`, or the file is larger than 1 MiB.
        OSError: the file cannot be read.
    """
    return loads(strict_json.read_limited(path, LIMIT_BYTES), str(path))


def check_keys(value: object, types: Types, where: str) -> dict[str, Any]:
    """`value` as an object with exactly the keys and value types (one or a choice) of `types`.

    Raises:
        HostError: names the first key that is unknown, missing or of another type.
    """
    if not isinstance(value, dict):
        raise HostError(f"{where}: must be an object")
    for key in value:
        if key not in types:
            raise HostError(f"{where}: unknown key {key!r}; known are {', '.join(types)}")
    for key, choice in types.items():
        if key not in value:
            raise HostError(f"{where}: key {key!r} is missing")
        kinds = choice if isinstance(choice, tuple) else (choice,)
        if type(value[key]) not in kinds:
            words = " or ".join(_WORDS[kind] for kind in kinds)
            raise HostError(f"{where}: {key!r} must be {words}")
    return value


def check_format(value: Mapping[str, Any], newest: int, where: str) -> None:
    """Refuse a file whose `format` is not the one that this program writes.

    Raises:
        HostError: the format is missing or another one; a newer one is said to be newer.
    """
    found = value.get("format")
    if type(found) is int and found > newest:
        raise HostError(
            f"{where}: written by a newer version (format {found}, this program knows {newest}); "
            "deploy the newer enginectl"
        )
    if type(found) is not int or found != newest:
        raise HostError(f"{where}: format must be {newest}, not {found!r}")


def texts(value: list[Any], where: str) -> tuple[str, ...]:
    """A list of non-empty strings without NUL bytes.

    Raises:
        HostError: an entry is something else.
    """
    for entry in value:
        if not isinstance(entry, str) or not entry or "\0" in entry:
            raise HostError(f"{where}: every entry must be a non-empty string")
    return tuple(value)


def text(value: str, where: str) -> str:
    """A non-empty string without NUL bytes.

    Raises:
        HostError: it is empty or holds one.
    """
    return texts([value], where)[0]


def absolute(value: str, where: str) -> Path:
    """An absolute path without `..`.

    Raises:
        HostError: it is relative or climbs.
    """
    path = Path(text(value, where))
    if not path.is_absolute() or ".." in path.parts:
        raise HostError(f"{where}: {value!r} must be an absolute path without '..'")
    return path


def at_least(least: int, value: Mapping[str, Any], key: str, where: str) -> int:
    """The whole number `value[key]`, `least` or more.

    Raises:
        HostError: it is less.
    """
    number: int = value[key]
    if number < least:
        raise HostError(f"{where}: {key} must be {least} or more, not {number}")
    return number


def within(least: int, most: int, value: Mapping[str, Any], key: str, where: str) -> int:
    """The whole number `value[key]`, from `least` to `most`.

    Raises:
        HostError: it is outside.
    """
    number = at_least(least, value, key, where)
    if number > most:
        raise HostError(f"{where}: {key} must be {most} or less, not {number}")
    return number


_WORDS = {
    str: "a string",
    int: "a whole number",
    list: "a list",
    dict: "an object",
    type(None): "null",
}
