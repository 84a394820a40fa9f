"""Tool calls that the engine sends as such: ids, index, type and string arguments made strict.

What is right already comes out as the very same objects.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field

from fable_gateway.arguments import Json, as_object, is_strict_object, to_json

IN_STRING = re.compile(r'["\\\x00-\x1f]')
ESCAPED = re.compile(r'["\\/bfnrt]')
HEX = re.compile(r"[0-9a-fA-F]{0,4}")


def new_id() -> str:
    """An id for a call."""
    return f"call_{uuid.uuid4().hex[:24]}"


def _as_text(piece: object) -> str:
    """Arguments that are no text, as the text that they should have been."""
    try:
        return "" if piece is None else to_json(piece)
    except (ValueError, RecursionError):
        return repr(piece)


class Arguments:
    """One call's arguments on their way through.

    An object passes piece by piece, with invalid escapes and raw control characters in its strings
    made valid. Anything else (encoded twice, null, nothing) is kept to the end.
    """

    def __init__(self) -> None:
        self.sent: list[str] = []
        self.kept: list[str] = []
        self._is_object = False
        self._in_string = False
        self._escaped = False
        self._hex: str | None = None

    @property
    def text(self) -> str:
        """Everything that arrived, repaired as far as it was sent."""
        return "".join(self.sent) + "".join(self.kept)

    def feed(self, piece: object) -> str:
        """Take the next piece of any JSON type; returns what can be sent."""
        text = piece if isinstance(piece, str) else _as_text(piece)
        if not self._is_object:
            if not self.kept and text.lstrip().startswith("{"):
                self._is_object = True
            else:
                if text.strip() or self.kept:
                    self.kept.append(text)
                return ""
        text = self._repaired(text)
        self.sent.append(text)
        return text

    def finish(self) -> str | None:
        """What is left to send; None if no object came of it."""
        if self._is_object:
            return "" if is_strict_object("".join(self.sent)) else None
        value = as_object("".join(self.kept))
        return None if value is None else to_json(value)

    def _repaired(self, text: str) -> str:
        out: list[str] = []
        at = 0
        while at < len(text):
            if self._escaped:
                at = self._escape(text, at, out)
                continue
            if not self._in_string:
                quote = text.find('"', at) + 1
                self._in_string = quote > 0
                out.append(text[at : quote or len(text)])
                at = quote or len(text)
                continue
            found = IN_STRING.search(text, at)
            out.append(text[at : found.start() if found else len(text)])
            at = found.end() if found else len(text)
            if found and found[0] < " ":
                out.append(f"\\u{ord(found[0]):04x}")
            elif found:
                out.append(found[0])
                self._escaped = found[0] == "\\"
                self._in_string = self._escaped
        return "".join(out)

    def _escape(self, text: str, at: int, out: list[str]) -> int:
        """Behind a backslash, which is sent already: another one makes it a plain character."""
        if self._hex is None:
            if text[at] == "u":
                self._hex = "u"
                return at + 1
            self._escaped = False
            valid = ESCAPED.match(text, at)
            out.append(valid[0] if valid else "\\")
            return at + len(valid[0]) if valid else at
        found = HEX.match(text, at, at + 5 - len(self._hex))
        self._hex += found[0] if found else ""
        at = found.end() if found else at
        if len(self._hex) == 5 or at < len(text):
            out.append(self._hex if len(self._hex) == 5 else "\\" + self._hex)
            self._escaped, self._hex = False, None
        return at


@dataclass
class _Call:
    index: int
    id: str
    given: bool
    name: str = ""
    begun: bool = False
    arguments: Arguments = field(default_factory=Arguments)
    waiting: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Broken:
    """A call whose arguments are no object; `sent` if the client has seen a part of it."""

    index: int
    name: str
    text: str
    sent: bool


class EngineCalls:
    """The calls of one answer, those that its text held among them: indexes count on."""

    def __init__(self) -> None:
        self.count = 0
        self._calls: list[_Call] = []
        self._by_id: dict[str, _Call] = {}
        self._by_index: dict[str, _Call] = {}

    def add(self, name: str, arguments: str) -> Json:
        """The delta of a whole call that stood in the text."""
        function = {"name": name, "arguments": arguments}
        entry = {"index": self.count, "id": new_id(), "type": "function", "function": function}
        self.count += 1
        return entry

    def feed(self, entries: Iterable[object]) -> list[Json]:
        """Take the entries of one delta; returns those to send, unchanged ones as they are."""
        fixed = (self._entry(entry) for entry in entries if isinstance(entry, dict))
        return [entry for entry in fixed if entry is not None]

    def finish(self) -> tuple[list[Json], list[Broken]]:
        """What must still be sent before the end, and the calls that came to nothing."""
        left: list[Json] = []
        broken: list[Broken] = []
        for call in self._calls:
            rest = call.arguments.finish() if call.name else None
            if rest is None:
                broken.append(Broken(call.index, call.name, call.arguments.text, call.begun))
            elif rest or not call.begun:
                left.append(self._delta(call, rest))
        return left, broken

    def _entry(self, entry: Json) -> Json | None:
        function = entry.get("function")
        function = function if isinstance(function, dict) else {}
        name = function.get("name")
        name = name if isinstance(name, str) else ""
        call, is_new = self._call(entry, name)
        call.name = call.name or name
        piece = function.get("arguments")
        ready = call.arguments.feed(piece)
        if not call.name:
            call.waiting.append(ready)
            return None
        begins = not call.begun
        if self._is_strict(entry, call, begins and is_new) and ready == (piece or ""):
            call.begun = True
            return entry
        ready = "".join(call.waiting) + ready
        call.waiting = []
        # Until its arguments are known to be an object, the call can still become text.
        begins = begins and not call.arguments.kept
        return self._delta(call, ready) if begins or ready else None

    def _delta(self, call: _Call, arguments: str) -> Json:
        if call.begun:
            return {"index": call.index, "function": {"arguments": arguments}}
        call.begun = True
        function = {"name": call.name, "arguments": arguments}
        return {"index": call.index, "id": call.id, "type": "function", "function": function}

    def _is_strict(self, entry: Json, call: _Call, begins: bool) -> bool:
        function = entry["function"] if isinstance(entry.get("function"), dict) else {}
        if entry.get("index") != call.index or isinstance(entry["index"], bool):
            return False
        if not isinstance(function.get("arguments", ""), str):
            return False
        if begins:
            return entry.get("id") == call.id and entry.get("type") == "function"
        named = entry.get("id") or function.get("name") or call.waiting
        return not named and entry.get("type", "function") == "function"

    def _call(self, entry: Json, name: str) -> tuple[_Call, bool]:
        """The call that an entry belongs to, and whether it begins with it.

        Engines leave out the index, or the id, or repeat either: a new id begins a call, and so
        does a name where no call is open.
        """
        identity, index = entry.get("id"), entry.get("index")
        identity = identity if isinstance(identity, str) else ""
        last = self._calls[-1] if self._calls else None
        known = last if index is None else self._by_index.get(str(index))
        if identity and not name:
            known = self._by_id.get(identity) or (None if known and known.given else known)
        elif known and name:
            other = identity and identity != known.id
            known = None if other or _is_over(known, name) else known
        if known:
            return known, False
        given = bool(identity) and identity not in self._by_id
        call = _Call(self.count, identity if given else new_id(), given)
        self.count += 1
        self._calls.append(call)
        self._by_id[call.id] = self._by_index[str(index)] = call
        return call, True


def _is_over(call: _Call, name: str) -> bool:
    """Whether a name begins another call: this one has its own, and whole arguments."""
    return bool(call.name) and (name != call.name or is_strict_object(call.arguments.text))
