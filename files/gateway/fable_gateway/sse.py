"""Server-sent events: cut out of a stream of bytes, and put into one (WHATWG HTML, 9.2)."""

from __future__ import annotations

import re

from fable_gateway.arguments import Json, to_bytes

# Two line ends; "\r\n" is one.
END = re.compile(rb"(?:\r\n|\n|\r(?!\n)){2}")
END_BYTES = 4
LINE_END = re.compile(rb"\r\n|\n|\r")
MAX_EVENT_BYTES = 16 << 20


class TooLong(Exception):
    """An event does not end."""


class Splitter:
    """Cuts bytes into events; each comes out with the very bytes that it had, its end included."""

    def __init__(self) -> None:
        self._rest = bytearray()
        self._searched = 0

    @property
    def rest(self) -> bytes:
        """The beginning of an event that has not ended."""
        return bytes(self._rest)

    def feed(self, chunk: bytes) -> list[bytes]:
        """Take the next bytes; returns the events that they end.

        Raises:
            TooLong: more than `MAX_EVENT_BYTES` and no end.
        """
        single = chunk.endswith(b"\n\n") and chunk.find(b"\n\n") == len(chunk) - 2
        if single and not self._rest and b"\r" not in chunk:
            return [chunk]
        self._rest += chunk
        events, start = [], 0
        for found in END.finditer(self._rest, self._searched):
            events.append(bytes(self._rest[start : found.end()]))
            start = found.end()
        del self._rest[:start]
        self._searched = max(0, len(self._rest) - END_BYTES)
        if len(self._rest) > MAX_EVENT_BYTES:
            raise TooLong
        return events


def data_of(event: bytes) -> bytes | None:
    """The data of an event; None if it has none, as a comment."""
    if event.startswith(b"data: ") and event.find(b"\n") == len(event) - 2 and b"\r" not in event:
        return event[6:-2]
    lines = [_value(line) for line in LINE_END.split(event) if _is_data(line)]
    return b"\n".join(lines) if lines else None


def with_data(event: bytes, values: list[Json]) -> bytes:
    """Events with new data in place of those of `event`; its other lines stay with the first."""
    others = [line for line in LINE_END.split(event) if line and not _is_data(line)]
    kept = b"".join(line + b"\n" for line in others) if len(event) > 6 else b""
    return kept + b"".join(b"data: " + to_bytes(value) + b"\n\n" for value in values)


def _is_data(line: bytes) -> bool:
    return line.startswith(b"data:") or line == b"data"


def _value(line: bytes) -> bytes:
    return line[5:].removeprefix(b" ")
