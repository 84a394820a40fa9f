"""Tool calls that a model wrote as text: found, and told apart from text that only shows one.

Three formats are known: XML functions, JSON in a tag, and the JSON of OpenAI's API as the whole
answer. Nothing here does I/O; text comes in pieces of any size, and the outcome does not depend on
where they were cut.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from fable_gateway.callreaders import (
    CLOSING,
    TAG_CHARS,
    Call,
    FunctionReader,
    JsonReader,
    Mangled,
    Tools,
    after_space,
    may_become,
)
from fable_gateway.scan import END_THINK, LAYOUT, LAYOUT_CHARS, Fences, layout_at

# Of one call: more than the engine's whole context.
MAX_CALL_CHARS = 1 << 20
# Read again after what turned out to be no call; beyond it, the rest is text.
MAX_REREAD_CHARS = 4 << 20

OPEN, THINK = "<tool_call>", "<think>"
MARKER = re.compile(r"<tool_call>|<function=([^<>\n]{1,128})(?:>|(?=\n))")
JSON_STARTS = (
    '{"name":"%s"',
    '{"function":{"name":"%s"',
    '{"type":"function","function":{"name":"%s"',
)
CALLS_START = '{"tool_calls":['


@dataclass(frozen=True)
class Thought:
    """Reasoning that stood inside the content."""

    text: str


Item = str | Thought | Call


class CallParser:
    """Reads the text of one answer.

    Args:
        tools: what may be called; with none, everything is text.
        is_content: whether it may begin with a thought, or be the JSON of calls from end to end.
    """

    def __init__(self, tools: Tools, is_content: bool = True) -> None:
        self.in_call = False
        self.withheld = False
        self._tools = tools
        self._markers = (OPEN, END_THINK, *(f"<function={name}>" for name in tools.schemas))
        self._text = ""  # what has not come out yet, apart from `_space` before it
        self._at = 0  # read up to here
        self._begin = 0  # of the call that is being read
        self._space = ""  # layout, if a call follows
        self._first = self._start if is_content else self._look
        self._state: Callable[[], bool] = self._first if tools.schemas else self._plain
        self._reader: FunctionReader | JsonReader | None = None
        self._fences = Fences()
        self._items: list[Item] = []
        self._spoken = False
        self._after_call = False
        self._wrapped = False
        self._final = False
        self._reread = MAX_REREAD_CHARS

    @property
    def holding(self) -> bool:
        """Whether something was taken that has not come out."""
        return bool(self._text or self._space)

    @property
    def quiet(self) -> bool:
        """Whether plain text would come straight out again and leave nothing behind."""
        idle = not self.in_call and not self.holding and not self._after_call
        return idle and self._state in {self._look, self._plain}

    def feed(self, text: str) -> list[Item]:
        """Take the next piece; returns what is settled by it, in order."""
        # CPython extends a string in place if one name alone holds it: linear in all.
        whole, self._text = self._text, ""
        whole += text
        self._text = whole
        del whole
        self._run()
        if not self.in_call:
            self._text, self._at = self._text[self._at :], 0
        return self._taken()

    def finish(self, whole: bool) -> list[Item]:
        """The end of the text; `whole` says that the model ended it and was not cut off.

        A call that is not complete then is text, or withheld if it was cut off.
        """
        if self.in_call and not whole:
            self.withheld = True
            self._text = self._space = ""
            return self._taken()
        self._final = True
        self._run()
        rest = self._space + self._text[self._at :]
        if rest.strip(LAYOUT) or not self._after_call:
            self._say(rest)
        self._text = self._space = ""
        return self._taken()

    def _run(self) -> None:
        while self._state():
            pass

    def _taken(self) -> list[Item]:
        items, self._items = self._items, []
        return items

    def _say(self, text: str) -> None:
        if text:
            self._items.append(text)
            self._spoken = self._spoken or bool(text.strip())

    # Each state reads on from `_at` and returns False when it needs more text.

    def _plain(self) -> bool:
        self._say(self._space + self._text[self._at :])
        self._space, self._at = "", len(self._text)
        return False

    def _start(self) -> bool:
        """The very beginning: a thought, JSON that is the whole answer, or text."""
        at = after_space(self._text, self._at)
        rest = self._text[at : at + TAG_CHARS] if at - self._at <= LAYOUT_CHARS else "text"
        json = self._starts_json(rest)
        if not self._final and (json is None or THINK.startswith(rest)) and rest != THINK:
            return False
        if rest.startswith(THINK):
            self._at = at + len(THINK)
            self._state = self._think
        elif json:
            self._read_call(self._at, JsonReader(self._tools, at, whole=True))
        else:
            self._state = self._look
        return True

    def _starts_json(self, rest: str) -> bool | None:
        """Whether the answer begins as the JSON of a call; None if more text has to show."""
        if rest[:1] not in {"{", "["}:
            return False
        if self._tools.required or self._tools.named:
            return True
        compact = "".join(rest.split()).removeprefix("[")
        starts = [start % name for start in JSON_STARTS for name in self._tools.schemas]
        if any(compact.startswith(start) for start in (*starts, CALLS_START)):
            return True
        undecided = len(rest) < TAG_CHARS
        undecided = undecided and any(s.startswith(compact) for s in (*starts, CALLS_START))
        return None if undecided else False

    def _think(self) -> bool:
        end = self._text.find(END_THINK, self._at)
        stop = end if end >= 0 else self._open_tail((END_THINK,))
        if stop > self._at:
            self._items.append(Thought(self._text[self._at : stop]))
        self._at = stop
        if end < 0:
            return False
        self._at += len(END_THINK)
        self._after_call = True
        self._state = self._look
        return True

    def _look(self) -> bool:
        """Text outside of calls: all of it up to the next marker is settled."""
        found = MARKER.search(self._text, self._at)
        stop = found.start() if found else self._open_tail(self._markers)
        self._settle(self._text[self._at : stop])
        self._at = stop
        if not found:
            return False
        name = (found[1] or "").strip()
        if self._fences.inside or (name and name not in self._tools.schemas):
            self._settle(found[0])
            self._at = found.end()
        elif name:
            self._wrapped = False
            self._read_call(stop, FunctionReader(self._tools, stop))
        else:
            self._wrapped = True
            self.in_call, self._begin, self._at = True, stop, found.end()
            self._state = self._opened
        return True

    def _opened(self) -> bool:
        at = after_space(self._text, self._at)
        if at == len(self._text) and at - self._at <= TAG_CHARS and not self._final:
            return False
        if at - self._at > TAG_CHARS:
            at = self._at
        if self._text[at : at + 1] in {"{", "["}:
            self._read_call(self._begin, JsonReader(self._tools, at))
        else:
            self._read_call(self._begin, FunctionReader(self._tools, at))
        return True

    def _read_call(self, begin: int, reader: FunctionReader | JsonReader) -> None:
        self.in_call, self._begin, self._reader = True, begin, reader
        self._state = self._reading

    def _reading(self) -> bool:
        assert self._reader
        try:
            end = self._reader.read(self._text, self._final)
            if (len(self._text) if end is None else end) - self._begin > MAX_CALL_CHARS:
                raise Mangled
        except Mangled:
            self._give_up(self._reader)
            return True
        if end is None:
            return False
        self._items += self._reader.calls
        self.in_call, self._at = False, end
        self._after_call = True
        self._space = self._space.replace(END_THINK, "")
        self._state = self._after
        return True

    def _give_up(self, reader: FunctionReader | JsonReader) -> None:
        """It was no call: its first characters are text, and what follows is read again."""
        self._reread -= reader.at - self._begin
        if reader.saw_nested and self._reread >= 0:
            # Perhaps the markup inside a value was not a whole function.
            start = after_space(self._text, self._begin + len(OPEN) * self._wrapped)
            self._read_call(self._begin, FunctionReader(self._tools, start, nested=False))
            return
        marker = MARKER.match(self._text, self._begin)
        self._at = marker.end() if marker else after_space(self._text, self._begin) + 1
        self._settle(self._text[self._begin : self._at])
        self.in_call = False
        self._state = self._look if self._reread >= 0 else self._plain

    def _after(self) -> bool:
        """Behind a call: more calls of the same tag, closing tags, or text again."""
        self._at = at = after_space(self._text, self._at)
        if at == len(self._text):
            return False
        closing = CLOSING.match(self._text, at)
        if closing and (self._wrapped or closing[1] in {"tool_call", "function", "parameter"}):
            self._at = closing.end()
            self._wrapped = self._wrapped and closing[1] != "tool_call"
            return True
        if not closing and not self._final and may_become(self._text, at, ("</",)):
            return False
        if self._wrapped and self._text[at] in "{[":
            self._read_call(at, JsonReader(self._tools, at))
        else:
            self._state = self._look if self._spoken else self._first
        return True

    def _settle(self, text: str) -> None:
        """Text that belongs to no call; layout at its end waits for what follows."""
        self._fences.advance(text)
        if self._after_call:
            text = text.lstrip(LAYOUT)
            if not text:
                return
            self._after_call = False
            text = (self._space if self._spoken else "") + text
        else:
            text = self._space + text
        cut = layout_at(text)
        self._say(text[:cut])
        self._space = text[cut:]

    def _open_tail(self, markers: tuple[str, ...]) -> int:
        """Where a marker may begin that the text does not hold whole yet."""
        at = -1 if self._final else self._text.rfind("<", self._at)
        tail = self._text[at : at + TAG_CHARS] if at >= 0 else ""
        return at if tail and any(m.startswith(tail) for m in markers) else len(self._text)
