"""One choice of an answer: reasoning, content and tool calls, told apart and made strict.

Streamed or not, an answer goes through the same steps, so both come out the same.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from fable_gateway.arguments import Json, to_json
from fable_gateway.callreaders import Call, Tools
from fable_gateway.enginecalls import Broken, EngineCalls
from fable_gateway.toolcalls import CallParser, Item, Thought

# What a model ends by itself; everything else cut it off.
ENDED_BY_MODEL = frozenset({"stop", "tool_calls", "function_call"})
# Beyond it, reasoning that looks like a call goes out as reasoning.
MAX_THOUGHT_CALL_CHARS = 1 << 20
REASONING = ("reasoning", "reasoning_content")


class Part(NamedTuple):
    """A piece of an answer.

    Attributes:
        kind: reasoning, content, tool_calls or finish_reason.
        value: text, or for tool_calls a list of deltas.
    """

    kind: str
    value: Any


class ThoughtCalls:
    """Calls that a model wrote at the end of its reasoning, instead of an answer.

    From the first call on the text is kept. If anything but more calls follows, it was quoted.
    """

    def __init__(self, tools: Tools) -> None:
        self._tools = tools
        self._parser = CallParser(tools, is_content=False)
        self._kept = ""
        self._calls: list[Call] = []

    @property
    def holding(self) -> bool:
        """Whether text was taken that has not come out."""
        return bool(self._kept)

    @property
    def is_quiet(self) -> bool:
        """Whether plain text would come straight out again."""
        return self._parser.quiet

    @property
    def in_call(self) -> bool:
        """Whether more is held than layout or the beginning of a marker."""
        return bool(self._calls) or self._parser.in_call

    def feed(self, text: str) -> str:
        """Take the next piece; returns the reasoning that is settled."""
        kept, self._kept = self._kept, ""
        kept += text
        self._kept = kept
        del kept
        return self._settled(self._parser.feed(text))

    def release(self) -> str:
        """The answer goes on: all of it was reasoning."""
        if not self._kept:
            return ""
        kept, self._kept, self._calls = self._kept, "", []
        self._parser = CallParser(self._tools, is_content=False)
        return kept

    def finish(self, whole: bool) -> tuple[str, list[Call]]:
        """The end, and no answer came: what is left of the reasoning, and the calls."""
        if not whole:
            return self.release(), []
        text = self._settled(self._parser.finish(whole))
        calls, self._calls = self._calls, []
        if not calls:
            text += self._kept
        self._kept = ""
        return text, calls

    def _settled(self, items: list[Item]) -> str:
        settled, quoted = "", False
        for item in items:
            if isinstance(item, Call):
                self._calls.append(item)
            elif self._calls:
                quoted = quoted or bool(_text_of(item).strip())
            else:
                settled += _text_of(item)
        self._kept = self._kept[len(settled) :]
        if quoted or len(self._kept) > MAX_THOUGHT_CALL_CHARS:
            settled += self.release()
        return settled


def _text_of(item: Item) -> str:
    if isinstance(item, Thought):
        return item.text
    return item if isinstance(item, str) else ""


class Choice:
    """One choice on its way through.

    Args:
        tools: what the request declared.
        streamed: whether what comes out is gone for good, as it is in a stream.
    """

    def __init__(self, tools: Tools, streamed: bool) -> None:
        self._streamed = streamed
        self._content = CallParser(tools)
        self._thoughts = ThoughtCalls(tools) if tools.schemas else None
        self._calls = EngineCalls()
        self._answered = False
        self.broken: list[Broken] = []

    @property
    def undecided(self) -> bool:
        """Whether the end of the text so far may turn out to be layout or a marker."""
        thoughts = self._thoughts
        if thoughts and thoughts.holding and not thoughts.in_call:
            return True
        return self._content.holding and not self._content.in_call

    def is_quiet(self, kind: str) -> bool:
        """Whether plain text of this kind would come straight out again."""
        if kind == "content":
            return self._content.quiet and self._answered
        thoughts = self._thoughts
        quiet = not self._content.holding and (thoughts is None or thoughts.is_quiet)
        return kind == "reasoning" and quiet

    def feed(self, part: Part) -> list[Part]:
        """Take a piece that the engine sent; returns what comes of it now."""
        if part.kind == "reasoning":
            text = self._thoughts.feed(part.value) if self._thoughts else part.value
            return [Part("reasoning", text)] if text else []
        if part.kind == "content":
            before = self._resume() if part.value.strip() else []
            return before + self._parts(self._content.feed(part.value))
        before = self._resume() + self._parts(self._content.finish(whole=True))
        self._content = CallParser(Tools())
        entries = self._calls.feed(part.value)
        return [*before, Part("tool_calls", entries)] if entries else before

    def finish(self, reason: str) -> list[Part]:
        """The end: everything that is still held, then the finish_reason that is true."""
        whole = reason in ENDED_BY_MODEL
        parts = self._parts(self._content.finish(whole))
        if self._thoughts and not self._answered and not self._calls.count:
            text, calls = self._thoughts.finish(whole)
            before = [Part("reasoning", text)] if text else []
            parts = before + (self._parts(list(calls)) if calls else parts)
        else:
            parts = self._resume() + parts
        left, self.broken = self._calls.finish()
        if left:
            parts.append(Part("tool_calls", left))
        unsent = [call for call in self.broken if not (call.sent and self._streamed)]
        if whole:
            parts += [Part("content", as_text(call)) for call in unsent]
        calls_out = self._calls.count - len(unsent)
        if calls_out and reason == "stop":
            reason = "tool_calls"
        if not calls_out and reason == "tool_calls":
            reason = "stop"
        return [*parts, Part("finish_reason", reason)]

    def _resume(self) -> list[Part]:
        """The answer has begun, so calls inside the reasoning were quoted."""
        self._answered = True
        text = self._thoughts.release() if self._thoughts else ""
        return [Part("reasoning", text)] if text else []

    def _parts(self, items: list[Item]) -> list[Part]:
        return [part for item in items for part in self._part(item)]

    def _part(self, item: Item) -> list[Part]:
        if isinstance(item, Thought):
            return [Part("reasoning", item.text)]
        if isinstance(item, str):
            return [Part("content", item)]
        try:
            arguments = to_json(item.arguments)
        except (ValueError, RecursionError):
            return [
                Part("content", as_text(Broken(0, item.name, repr(item.arguments), sent=False)))
            ]
        return [Part("tool_calls", [self._calls.add(item.name, arguments)])]


def as_text(call: Broken) -> str:
    """A call that cannot be sent as one, in the form in which the model would have written it."""
    body = to_json({"name": call.name, "arguments": call.text})
    return f"<tool_call>\n{body}\n</tool_call>"


def joined(parts: list[Part]) -> list[Part]:
    """`parts` with neighbouring texts of one kind made one."""
    result: list[Part] = []
    for part in parts:
        if result and result[-1].kind == part.kind and isinstance(part.value, str):
            result[-1] = Part(part.kind, result[-1].value + part.value)
        elif part.value:
            result.append(part)
    return result


def parts_of(delta: Json) -> list[Part]:
    """The pieces in a delta or a message."""
    parts = []
    thought = delta.get("reasoning") or delta.get("reasoning_content")
    if thought and isinstance(thought, str):
        parts.append(Part("reasoning", thought))
    content = delta.get("content")
    if content and isinstance(content, str):
        parts.append(Part("content", content))
    calls = delta.get("tool_calls")
    if calls and isinstance(calls, list):
        parts.append(Part("tool_calls", calls))
    return parts


def tidied(delta: Json) -> bool:
    """Give reasoning both of its names and take an empty list of calls away; says if it had to."""
    changed = False
    if "tool_calls" in delta and not delta["tool_calls"]:
        del delta["tool_calls"]
        changed = True
    for name, other in (REASONING, REASONING[::-1]):
        if delta.get(name) and isinstance(delta[name], str) and not delta.get(other):
            delta[other] = delta[name]
            changed = True
    return changed
