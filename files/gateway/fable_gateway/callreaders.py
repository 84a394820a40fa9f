"""The readers of one tool call each: an XML function, and JSON.

A reader is made for a position in a text that only grows, and asked again whenever it has grown; it
goes on where it stopped.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fable_gateway.arguments import Json, as_object, from_json, typed
from fable_gateway.scan import JsonExtent

FUNCTION = re.compile(r"<function=([^<>\n]{1,128})(?:>|(?=\n))")
PARAMETER = re.compile(r"<parameter=([^<>\n]{1,128})(?:>|(?=\n))")
CLOSING = re.compile(r"</[ \t]{0,4}([A-Za-z_]\w{0,63})\b[^<>\n]{0,32}(?:>|(?=\n))")
SPACE = re.compile(r"[ \t\r\n]*")
# A longer tag is none, and more white space is no layout.
TAG_CHARS = 256
NAMED_KEYS = {"name", "arguments", "parameters", "id", "type"}
WRAPPED_KEYS = {"function", "id", "type", "index"}


@dataclass(frozen=True)
class Tools:
    """What a request declared.

    Attributes:
        schemas: the parameters' JSON schema of each function, by its name.
        required: whether the answer has to be a call.
        named: the one function that has to be called.
    """

    schemas: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    required: bool = False
    named: str | None = None


@dataclass(frozen=True)
class Call:
    """A whole call that the model wrote."""

    name: str
    arguments: Json


class Mangled(Exception):
    """It is no call: the text stays text."""


def after_space(text: str, at: int) -> int:
    """The position of the next character that is no white space."""
    found = SPACE.match(text, at)
    return found.end() if found else at


def may_become(text: str, at: int, starts: tuple[str, ...]) -> bool:
    """Whether the text ends inside a tag that begins, or may yet begin, with one of `starts`."""
    tail = text[at : at + TAG_CHARS]
    if len(tail) == TAG_CHARS or ">" in tail or "\n" in tail:
        return False
    return any(start.startswith(tail) or tail.startswith(start) for start in starts)


class FunctionReader:
    """Reads `<function=…>` with its parameters.

    Repaired is what has one meaning only: a parameter that is not closed before the next one or the
    function's end, a missing bracket, a misspelt end, a stray closing tag. In a value, an end tag
    that nothing structural follows is text, and so is a complete function (`nested`).
    """

    def __init__(self, tools: Tools, at: int, nested: bool = True) -> None:
        self.at = at
        self.calls: list[Call] = []
        self.saw_nested = False
        self._depth = 0
        self._tools = tools
        self._nested = nested
        self._schema: Mapping[str, Any] = {}
        self._name = ""
        self._arguments: Json = {}
        self._parameter: str | None = None
        self._value_at = 0

    def read(self, text: str, final: bool) -> int | None:
        """Where the call ends; None if the text must grow first.

        Raises:
            Mangled: it is no call.
        """
        while not self.calls:
            if not self._name:
                step = self._open(text)
            elif self._parameter is None:
                step = self._between(text, final)
            else:
                step = self._value(text, final)
            if not step:
                if final:
                    raise Mangled
                return None
        return self.at

    def _open(self, text: str) -> bool:
        found = FUNCTION.match(text, self.at)
        name = found[1].strip() if found else ""
        if found and name in self._tools.schemas:
            self._name, self._schema, self.at = name, self._tools.schemas[name], found.end()
            return True
        if found or not may_become(text, self.at, ("<function=",)):
            raise Mangled
        return False

    def _between(self, text: str, final: bool) -> bool:
        """Outside of parameters."""
        at = after_space(text, self.at)
        if at - self.at > TAG_CHARS:
            raise Mangled
        if at == len(text):
            if final and self._arguments:
                self.calls.append(Call(self._name, self._arguments))
            return bool(self.calls)
        if found := PARAMETER.match(text, at):
            self._begin_value(found)
        elif found := CLOSING.match(text, at):
            self.at = found.end()
            if found[1] == "tool_call":
                self.at = at
            if found[1] in {"function", "tool_call"}:
                self.calls.append(Call(self._name, self._arguments))
        elif may_become(text, at, ("<parameter=", "</")):
            return False
        else:
            raise Mangled
        return True

    def _begin_value(self, found: re.Match[str]) -> None:
        self._parameter = found[1].strip()
        self._value_at = self.at = found.end()

    def _end_value(self, text: str, end: int) -> None:
        """One line end on each side is layout."""
        value = text[self._value_at : end]
        value = value.removeprefix("\r\n") if value[:2] == "\r\n" else value.removeprefix("\n")
        value = value[:-2] if value[-2:] == "\r\n" else value.removesuffix("\n")
        properties = self._schema.get("properties")
        known = properties if isinstance(properties, Mapping) else {}
        name = self._parameter or ""
        schema = known.get(name, self._schema.get("additionalProperties"))
        self._arguments[name] = typed(value, schema, self._schema)
        self._parameter, self.at = None, end

    def _value(self, text: str, final: bool) -> bool:
        """Up to the next thing that may end the value."""
        at = text.find("<", self.at)
        if at < 0:
            self.at = len(text)
            return False
        self.at = at
        if found := FUNCTION.match(text, at):
            self.saw_nested = self._nested
            self._depth += self._nested
        elif found := PARAMETER.match(text, at):
            if not self._depth and self._is_next(text, at, found[1].strip()):
                self._end_value(text, at)
                return True
        elif found := CLOSING.match(text, at):
            if found[1] == "function" and self._depth:
                self._depth -= 1
            elif found[1] in {"parameter", "function"} and not self._depth:
                ends = self._is_end(text, found, final)
                if ends is None:
                    return False
                if ends:
                    self._end_value(text, at)
                    self.at = found.end() if found[1] == "parameter" else at
                    return True
        elif not final and may_become(text, at, ("<parameter=", "<function=", "</")):
            return False
        self.at = found.end() if found else at + 1
        return True

    def _is_next(self, text: str, at: int, name: str) -> bool:
        """Whether a parameter begins here although the one before is open."""
        properties = self._schema.get("properties")
        declared = not properties or (isinstance(properties, Mapping) and name in properties)
        unused = name != self._parameter and name not in self._arguments
        line = text[max(self._value_at, at - TAG_CHARS) : at].rstrip(" \t")
        return declared and unused and line[-1:] == "\n"

    def _is_end(self, text: str, found: re.Match[str], final: bool) -> bool | None:
        """Whether an end tag is one: by what follows it. None if more text has to show."""
        followers: tuple[str, ...] = ("<parameter=", "</function", "</tool_call")
        if found[1] == "function":
            followers = ("</", "<tool_call>", "<function=")
        at = after_space(text, found.end())
        if at - found.end() > TAG_CHARS:
            return False
        if at == len(text):
            return True if final else None
        if text.startswith(followers, at):
            return True
        return None if not final and may_become(text, at, followers) else False


class JsonReader:
    """Reads a JSON value that describes calls; with `whole`, nothing but such to the text's end."""

    def __init__(self, tools: Tools, at: int, whole: bool = False) -> None:
        self.calls: list[Call] = []
        self.saw_nested = False
        self._tools = tools
        self._whole = whole
        self._begin = at
        self._extent: JsonExtent | None = JsonExtent(at)
        self.at = at

    def read(self, text: str, final: bool) -> int | None:
        """Where the call ends; None if the text must grow first.

        Raises:
            Mangled: it is no call.
        """
        while True:
            if self._extent:
                end = self._extent.end(text)
                self.at = min(self._extent.at, len(text))
                if end is None:
                    if final:
                        raise Mangled
                    return None
                self.calls += self._calls(text[self._begin : end])
                self._extent = None
            if not self._whole:
                return self.at
            at = after_space(text, self.at)
            if at == len(text):
                return at if final else None
            if text[at] in "{[":
                self._begin, self._extent = at, JsonExtent(at)
            elif (found := CLOSING.match(text, at)) and found[1] == "tool_call":
                self.at = found.end()
            elif not final and may_become(text, at, ("</",)):
                return None
            else:
                raise Mangled

    def _calls(self, text: str) -> list[Call]:
        try:
            value = from_json(text)
        except ValueError:
            raise Mangled from None
        calls = calls_in(value, self._tools)
        if calls is None and self._whole and self._tools.named:
            calls = _bare_arguments(value, self._tools.named, self._tools)
        if calls is None:
            raise Mangled
        return calls


def calls_in(value: object, tools: Tools) -> list[Call] | None:
    """The calls that a JSON value describes; None unless it is nothing but calls of `tools`."""
    if isinstance(value, list):
        return _all_calls(value, tools)
    if not isinstance(value, dict):
        return None
    if set(value) == {"tool_calls"} and isinstance(value["tool_calls"], list):
        return _all_calls(value["tool_calls"], tools)
    function = value.get("function")
    call = function if isinstance(function, dict) and set(value) <= WRAPPED_KEYS else value
    name = call.get("name")
    if not isinstance(name, str) or name not in tools.schemas or not set(call) <= NAMED_KEYS:
        return None
    arguments = as_object(call.get("arguments", call.get("parameters")))
    return None if arguments is None else [Call(name, arguments)]


def _all_calls(values: list[Any], tools: Tools) -> list[Call] | None:
    found: list[Call] = []
    for value in values:
        calls = None if isinstance(value, list) else calls_in(value, tools)
        if calls is None:
            return None
        found += calls
    return found or None


def _bare_arguments(value: object, name: str, tools: Tools) -> list[Call] | None:
    """The bare arguments of the one function that has to be called."""
    properties = tools.schemas[name].get("properties")
    known = properties if isinstance(properties, Mapping) else {}
    return [Call(name, value)] if isinstance(value, dict) and set(value) <= set(known) else None
