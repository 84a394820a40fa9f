"""What text is scanned for before it can be read: layout, code in Markdown, where JSON ends."""

from __future__ import annotations

import re

FENCE = re.compile(r"^ {0,3}(`{3,}|~{3,})([^\n]*)$", re.MULTILINE)
# Enough of a line to see whether it is a fence.
LINE_CHARS = 256
STRUCTURE = re.compile(r'["{}\[\]]')
IN_STRING = re.compile(r'["\\]')


# White space before a call is layout, up to this many characters.
LAYOUT, LAYOUT_CHARS = " \t\r\n", 16
END_THINK = "</think>"


def layout_at(text: str) -> int:
    """Where the layout at the end of `text` begins; an end of thinking may stand in it."""
    at = _space_at(text, len(text))
    if text.endswith(END_THINK, 0, at):
        at = _space_at(text, at - len(END_THINK))
    return at


def _space_at(text: str, end: int) -> int:
    low = max(0, end - LAYOUT_CHARS)
    return low + len(text[low:end].rstrip(LAYOUT))


class Fences:
    """Whether the end of a text that comes in pieces is inside code (CommonMark, 4.5 and 6.1)."""

    def __init__(self) -> None:
        self._line = ""
        self._ticks = 0
        self._open = ""

    @property
    def inside(self) -> bool:
        """In a fenced block, or after an unpaired backtick of the same line."""
        return bool(self._open) or self._ticks % 2 == 1

    def advance(self, text: str) -> None:
        """Take the next piece."""
        done, newline, last = text.rpartition("\n")
        if newline:
            for found in FENCE.finditer(self._line + done):
                self._fence(found[1], found[2])
            self._line, self._ticks = "", 0
        self._ticks += last.count("`")
        if len(self._line) < LINE_CHARS:
            self._line += last[:LINE_CHARS]

    def _fence(self, mark: str, rest: str) -> None:
        if not self._open:
            if mark[0] == "~" or "`" not in rest:
                self._open = mark
        elif mark.startswith(self._open) and not rest.strip():
            self._open = ""


class JsonExtent:
    """Finds the end of the JSON object or array that begins at `at`, in text that grows."""

    def __init__(self, at: int) -> None:
        self.at = at
        self._depth = 0
        self._in_string = False

    def end(self, text: str) -> int | None:
        """Where it ends, just behind its last bracket; None if the text must grow first."""
        while True:
            pattern = IN_STRING if self._in_string else STRUCTURE
            found = pattern.search(text, self.at)
            if not found:
                self.at = max(self.at, len(text))
                return None
            self.at = found.end()
            if found[0] == "\\":
                # What it escapes may not be there yet; the position may lie behind the text.
                self.at += 1
            elif found[0] == '"':
                self._in_string = not self._in_string
            else:
                self._depth += 1 if found[0] in "{[" else -1
                if self._depth == 0:
                    return self.at
