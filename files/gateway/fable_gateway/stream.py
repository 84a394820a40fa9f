"""A stream on its way to the client: what needs no change passes byte for byte.

Pure: bytes in, bytes out. An event is sent whole, or held whole while its text may end in layout or
in the beginning of a call.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from fable_gateway.answer import REASONING, Choice, Part, joined, parts_of, tidied
from fable_gateway.arguments import Json
from fable_gateway.errors import error_body
from fable_gateway.request import Asked
from fable_gateway.shortcut import Shortcut, learn
from fable_gateway.sse import MAX_EVENT_BYTES, Splitter, TooLong, data_of, with_data

DONE = b"data: [DONE]\n\n"
SPLIT_KEYS = frozenset({"content", "tool_calls", *REASONING})
# While a call is read, every so many held events an empty one goes out: clients time out.
HELD_EVENTS = 64
DECODER = json.JSONDecoder()


@dataclass
class _Event:
    raw: bytes
    value: Json
    changed: bool

    def encoded(self) -> bytes:
        return with_data(self.raw, [self.value]) if self.changed else self.raw


@dataclass
class _Track:
    """One choice: what came in, what came of it, and the events that wait for the two to agree."""

    choice: Choice
    events: list[_Event] = field(default_factory=list)
    came: list[Part] = field(default_factory=list)
    out: list[Part] = field(default_factory=list)
    skipped: int = 0
    finished: bool = False


class AnswerStream:
    """The events of one answer.

    Attributes:
        usage: the engine's own count, once it came.
        finish_reason: of the first choice, as the client sees it.
        complete: whether every choice has its finish_reason.
        failed: whether the client got an error event.
        done: whether `[DONE]` has gone out.
        cut: why the answer is not whole; nothing of it may look like an end.
    """

    def __init__(self, asked: Asked) -> None:
        self.usage: Json | None = None
        self.finish_reason: str | None = None
        self.complete = False
        self.failed = False
        self.done = False
        self.cut: str | None = None
        self._asked = asked
        self._splitter = Splitter()
        self._tracks: dict[int, _Track] = {}
        self._shortcut: Shortcut | None = None

    def feed(self, chunk: bytes) -> bytes:
        """Take bytes of the engine; returns those for the client."""
        try:
            return b"".join([self._event(raw) for raw in self._splitter.feed(chunk)])
        except TooLong:
            self.cut = f"the engine sent an event of more than {MAX_EVENT_BYTES} bytes"
            return b""

    def end(self) -> bytes:
        """The engine's stream is over: what the client still gets."""
        if self.done or self.cut:
            return b""
        if self.failed:
            return self._splitter.rest
        if not self.complete:
            self.cut = "the engine's stream ended without a finish_reason"
            return b""
        self.done = True
        return DONE

    def _event(self, raw: bytes) -> bytes:
        if self._shortcut:
            out = self._shortcut.take(raw)
            if out is not None:
                return out
            self._shortcut = None
        if self.done or self.cut:
            return b""
        data = data_of(raw)
        if data is None:
            return raw
        if data.strip() == b"[DONE]":
            return self._done(raw)
        try:
            value = DECODER.decode(data.decode())
        except (ValueError, RecursionError):
            return raw
        if not isinstance(value, dict):
            return raw
        if value.get("error") or value.get("object") == "error":
            self.failed = True
            return raw
        return self._chunk(_Event(raw, value, changed=False))

    def _done(self, raw: bytes) -> bytes:
        if self.complete or self.failed:
            self.done = True
            return raw
        self.cut = "the engine's stream ended without a finish_reason"
        return b""

    def _chunk(self, event: _Event) -> bytes:
        value = event.value
        if isinstance(value.get("usage"), dict):
            self.usage = value["usage"]
        choices = value.get("choices")
        if self._asked.strip_usage and "usage" in value:
            if not choices:
                return b""
            del value["usage"]
            event.changed = True
        if not isinstance(choices, list) or not all(isinstance(c, dict) for c in choices):
            return event.encoded()
        if len(choices) == 1:
            return self._single(event, choices[0])
        # Engines send one choice an event; several are taken apart.
        rest = {key: item for key, item in value.items() if key not in {"choices", "usage"}}
        out = [self._single(_Event(b"", rest | {"choices": [c]}, changed=True), c) for c in choices]
        if not choices or "usage" in value:
            event.value = value if not choices else rest | {"choices": [], "usage": value["usage"]}
            event.changed = event.changed or bool(choices)
            out.append(event.encoded())
        return b"".join(out)

    def _single(self, event: _Event, choice: Json) -> bytes:
        index = choice.get("index", 0)
        track = self._tracks.get(index if isinstance(index, int) else 0)
        if track is None:
            track = _Track(Choice(self._asked.tools, streamed=True))
            self._tracks[index if isinstance(index, int) else 0] = track
            self.complete = False
        reason = choice.get("finish_reason")
        delta = choice.get("delta")
        if track.finished and reason and not (delta and parts_of(delta)):
            # Engines have been seen to end twice, and the second time with another reason.
            return b""
        if not self._asked.chat or not isinstance(delta, dict) or track.finished:
            if isinstance(reason, str):
                self._finish(track, reason)
            return event.encoded()
        event.changed = tidied(delta) or event.changed
        came = parts_of(delta)
        out = [part for piece in came for part in track.choice.feed(piece)]
        if isinstance(reason, str) and reason:
            came.append(Part("finish_reason", reason))
            out += track.choice.finish(reason)
            self._finish(track, str(out[-1].value))
        return self._emit(track, event, came, out)

    def _finish(self, track: _Track, reason: str) -> None:
        track.finished, self.finish_reason = True, reason
        tracks = self._tracks.values()
        self.complete = len(tracks) >= self._asked.choices and all(t.finished for t in tracks)

    def _emit(self, track: _Track, event: _Event, came: list[Part], out: list[Part]) -> bytes:
        track.events.append(event)
        track.came += came
        track.out += out
        if track.choice.undecided and not track.finished:
            return b""
        events, came, out = track.events, joined(track.came), joined(track.out)
        track.events, track.came, track.out = [], [], []
        if came == out:
            sent = b"".join([held.encoded() for held in events])
            if len(came) == len(events) == 1 and track.choice.is_quiet(came[0].kind):
                self._shortcut = learn(event.raw, event.value, came[0].value, event.changed)
        else:
            values = _rebuilt(events, out)
            track.skipped = 0 if values else track.skipped + 1
            if track.skipped == HELD_EVENTS:
                track.skipped = 0
                values = [_with_choice(event.value, {"content": ""}, None, last=False)]
            sent = with_data(event.raw, values)
        half_sent = [call.name for call in track.choice.broken if call.sent]
        if half_sent:
            self.failed = True
            reason = f"the arguments for {half_sent[0]} are no whole JSON object"
            sent += error_event(reason, "tool_call_cut")
        return sent


def error_event(message: str, code: str) -> bytes:
    """An error inside a stream."""
    return with_data(b"", [error_body(message, "server_error", code)])


def _rebuilt(events: list[_Event], out: list[Part]) -> list[Json]:
    """New events for `out`; what else the old ones carried goes with the last."""
    last = events[-1].value
    deltas: list[Json] = []
    reason: str | None = None
    for part in out:
        if part.kind == "finish_reason":
            reason = part.value
        elif part.kind == "reasoning":
            deltas.append(dict.fromkeys(REASONING, part.value))
        else:
            deltas.append({part.kind: part.value})
    extras: Json = {}
    for event in events:
        delta = event.value["choices"][0]["delta"]
        extras |= {key: item for key, item in delta.items() if key not in SPLIT_KEYS}
    weighs = any(last["choices"][0].get(key) for key in ("logprobs", "token_ids", "stop_reason"))
    if reason is not None or (not deltas and (extras or weighs or last.get("usage"))):
        deltas.append({})
    if deltas:
        deltas[0] = extras | deltas[0]
    return [
        _with_choice(last, delta, reason, last=number == len(deltas))
        for number, delta in enumerate(deltas, 1)
    ]


def _with_choice(value: Json, delta: Json, reason: str | None, last: bool) -> Json:
    old = value["choices"][0]
    if last:
        choice = old | {"delta": delta, "finish_reason": reason}
    else:
        choice = {"index": old.get("index", 0), "delta": delta, "finish_reason": None}
    result = value | {"choices": [choice]}
    if not last:
        result.pop("usage", None)
    return result
