"""The short way for events that differ from the one before in plain text only.

Nearly every event of a stream is such: its bytes are those of the event before but for the text. It
is recognised without being parsed, and what was done with the one before is done with it.
"""

from __future__ import annotations

import re

from fable_gateway.answer import REASONING
from fable_gateway.arguments import Json
from fable_gateway.sse import with_data

# Text that is its own JSON, holds nothing a marker or a fence begins with, and ends in no layout.
PLAIN = re.compile(rb'[^"\\<`~\x00-\x1f]*[^"\\<`~\x00-\x20]')
# Stands in for the text; no engine writes it.
PLACE = "\ufdd0text\ufdd1"
PLACE_BYTES = PLACE.encode()


class Shortcut:
    """Made from an event that passed: what surrounds its text, and what surrounded it going out.

    Whoever reads the text need not see more of its line: that it is no fence shows already.
    """

    def __init__(self, before: bytes, after: bytes, out: list[bytes]) -> None:
        self._before, self._after, self._out = before, after, out
        self._least = len(before) + len(after)

    def take(self, raw: bytes) -> bytes | None:
        """What comes of the event `raw`; None if it is no such event."""
        if not (raw.startswith(self._before) and raw.endswith(self._after)):
            return None
        text = raw[len(self._before) : len(raw) - len(self._after)]
        if len(raw) <= self._least or not PLAIN.fullmatch(text):
            return None
        return text.join(self._out)


def learn(raw: bytes, value: Json, text: str, changed: bool) -> Shortcut | None:
    """A shortcut for events like `raw`, which has passed and whose `value` went out; or None.

    Args:
        raw: the event, with one choice, and nothing in it but text.
        value: what went out for it.
        text: the text.
        changed: whether it differs from `raw`; reasoning may have got its second name.
    """
    delta = value["choices"][0]["delta"]
    names = [name for name in ("content", *REASONING) if delta.get(name)]
    same = all(delta[name] == text for name in names)
    encoded = text.encode(errors="replace")
    starts = [m.end() for name in names for m in re.finditer(rb'"%b": ?"' % name.encode(), raw)]
    if not same or len(starts) != 1 or not PLAIN.fullmatch(encoded):
        return None
    before, after = raw[: starts[0]], raw[starts[0] + len(encoded) :]
    if before + encoded + after != raw or not after.startswith(b'"'):
        return None
    if not changed:
        return Shortcut(before, after, [before, after])
    choice = value["choices"][0] | {"delta": delta | dict.fromkeys(names, PLACE)}
    out = with_data(raw, [value | {"choices": [choice]}]).split(PLACE_BYTES)
    return Shortcut(before, after, out) if len(out) == len(names) + 1 else None
