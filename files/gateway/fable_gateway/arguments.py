"""A call's arguments: JSON as models write it, and plain text typed by the declared schema."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

Json = dict[str, Any]

ESCAPE = re.compile(r'\\(?:(["\\/bfnrt]|u[0-9a-fA-F]{4})|)')
INTEGER = re.compile(r"[+-]?\d{1,400}(?:\.0{1,400})?")
CANONICAL_INTEGER = re.compile(r"-?(?:0|[1-9]\d{0,400})")
NUMBER = re.compile(r"[+-]?\d{1,400}(?:\.\d{1,400})?(?:[eE][+-]?\d{1,4})?")
# Tried in this order; a string is what is left.
KINDS = ("null", "boolean", "integer", "number", "object", "array")
SCHEMA_DEPTH = 16
ENCODED_TWICE_DEPTH = 3


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


_STRICT = json.JSONDecoder(parse_constant=_refuse)
_LENIENT = json.JSONDecoder(strict=False, parse_constant=_refuse)
_COMPACT = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
_ASCII = json.JSONEncoder(allow_nan=False, separators=(",", ":"))


def to_json(value: object) -> str:
    """JSON that can be sent as UTF-8.

    Raises:
        ValueError: an infinite number stands in it.
        RecursionError: it is nested too deeply.
    """
    text = _COMPACT.encode(value)
    try:
        text.encode()
    except UnicodeEncodeError:
        # Half of a surrogate pair, which only an escape can carry.
        return _ASCII.encode(value)
    return text


def to_bytes(value: object) -> bytes:
    """JSON as UTF-8 of a value that came as JSON, whatever stands in it."""
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError:
        return json.dumps(value, separators=(",", ":")).encode()


def from_json(text: str) -> Any:
    """The value of JSON in which strings may hold line ends, tabs and invalid escapes as they are.

    Raises:
        ValueError: it is no JSON even so.
    """
    text = text.strip()
    try:
        try:
            return _LENIENT.decode(text)
        except json.JSONDecodeError:
            return _LENIENT.decode(ESCAPE.sub(_valid_escape, text))
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _valid_escape(found: re.Match[str]) -> str:
    return found[0] if found[1] else "\\\\"


def is_strict_object(text: str) -> bool:
    """Whether any JSON parser reads `text` as an object."""
    try:
        return isinstance(_STRICT.decode(text), dict)
    except (ValueError, RecursionError):
        return False


def as_object(value: object) -> Json | None:
    """The arguments in `value`: an object, its JSON, that encoded again, or nothing at all.

    Returns:
        The object; None if it cannot be understood.
    """
    for _ in range(ENCODED_TWICE_DEPTH):
        if value is None:
            return {}
        if isinstance(value, dict):
            return value
        if not isinstance(value, str):
            return None
        if not value.strip():
            return {}
        try:
            value = from_json(value)
        except ValueError:
            return None
    return value if isinstance(value, dict) else None


def typed(text: str, schema: object, root: Mapping[str, Any]) -> Any:
    """The value that `text` stands for as a parameter with `schema`; `root` holds its references.

    A string stays what it is. What does not fit its schema stays text: the client refuses it, and
    can tell the model why.
    """
    kinds = _kinds(schema, root, set(), SCHEMA_DEPTH)
    plain = "string" in kinds
    for kind in KINDS:
        if kind in kinds:
            value = _as_kind(kind, text.strip(), plain)
            if value is not _OTHER:
                return value
    return text


_OTHER = object()


def _as_kind(kind: str, text: str, plain: bool) -> Any:
    """`text` as `kind`, or `_OTHER`; where a plain string is allowed too, only the exact form."""
    if kind == "null":
        return None if text == "null" or (text == "None" and not plain) else _OTHER
    if kind == "boolean":
        word = text if plain else text.lower()
        return {"true": True, "false": False}.get(word, _OTHER)
    if kind == "integer":
        fits = (CANONICAL_INTEGER if plain else INTEGER).fullmatch(text)
        return int(text.partition(".")[0]) if fits else _OTHER
    if kind == "number":
        return _number(text, plain)
    try:
        value = from_json(text)
    except ValueError:
        return _OTHER
    return value if isinstance(value, dict if kind == "object" else list) else _OTHER


def _number(text: str, plain: bool) -> Any:
    if CANONICAL_INTEGER.fullmatch(text):
        return int(text)
    if plain or not NUMBER.fullmatch(text):
        return _OTHER
    value = float(text)
    return value if math.isfinite(value) else _OTHER


def _kinds(schema: object, root: Mapping[str, Any], seen: set[str], depth: int) -> set[str]:
    """The JSON types that `schema` allows; empty if it does not say.

    A reference is followed once, and `depth` is bounded: the client wrote the schema.
    """
    if not isinstance(schema, Mapping) or not depth:
        return set()
    kinds = {name for name in _listed(schema.get("type")) if isinstance(name, str)}
    if schema.get("nullable") is True:
        kinds.add("null")
    for key in ("anyOf", "oneOf", "allOf"):
        for branch in _listed(schema.get(key)):
            kinds |= _kinds(branch, root, seen, depth - 1)
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/") and reference not in seen:
        seen.add(reference)
        kinds |= _kinds(_referred(reference, root), root, seen, depth - 1)
    if not kinds:
        allowed = [schema["const"]] if "const" in schema else _listed(schema.get("enum"))
        kinds = {_kind_of(value) for value in allowed if allowed != [None]}
    if not kinds and "properties" in schema:
        kinds = {"object"}
    return kinds


def _listed(value: object) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _referred(reference: str, root: Mapping[str, Any]) -> object:
    found: Any = root
    for part in reference[2:].split("/"):
        key = part.replace("~1", "/").replace("~0", "~")
        found = found.get(key) if isinstance(found, Mapping) else None
    return found


def _kind_of(value: object) -> str:
    if isinstance(value, bool):
        return "boolean"
    names = {str: "string", int: "integer", float: "number", dict: "object", list: "array"}
    return names.get(type(value), "null")
