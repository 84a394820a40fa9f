"""A whole answer on its way to the client: its bytes pass as they are unless something is wrong."""

from __future__ import annotations

import json
from typing import NamedTuple

from fable_gateway.answer import REASONING, Choice, Part, parts_of, tidied
from fable_gateway.arguments import Json, to_bytes
from fable_gateway.callreaders import Tools
from fable_gateway.request import Asked


class Whole(NamedTuple):
    """An answer: its bytes, the engine's own count of tokens, the first choice's finish_reason."""

    body: bytes
    usage: Json | None = None
    finish_reason: str | None = None


def normalised(body: bytes, asked: Asked) -> Whole:
    """`body` as the client gets it; what cannot be read comes out as it is."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return Whole(body)
    choices = value.get("choices") if isinstance(value, dict) else None
    if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
        return Whole(body)
    changed = False
    if asked.chat:
        for choice in choices:
            if isinstance(choice.get("message"), dict):
                changed = _choice(choice, asked.tools) or changed
    usage = value.get("usage")
    reason = choices[0].get("finish_reason") if choices else None
    return Whole(
        to_bytes(value) if changed else body,
        usage if isinstance(usage, dict) else None,
        reason if isinstance(reason, str) else None,
    )


def _choice(choice: Json, tools: Tools) -> bool:
    """Set one choice right; says whether anything was wrong."""
    message: Json = choice["message"]
    changed = tidied(message)
    reader = Choice(tools, streamed=False)
    came = [_indexed(part) for part in parts_of(message)]
    out = [part for piece in came for part in reader.feed(piece)]
    given = choice.get("finish_reason")
    reason = given if isinstance(given, str) and given else "stop"
    out += reader.finish(reason)
    texts = {
        kind: "".join(p.value for p in out if p.kind == kind) for kind in ("reasoning", "content")
    }
    for kind, names in (("reasoning", REASONING), ("content", ("content",))):
        before = next((part.value for part in came if part.kind == kind), "")
        if texts[kind] != before:
            message |= dict.fromkeys(names, texts[kind] or None)
            changed = True
    lost = {call.index for call in reader.broken}
    calls = [call for call in _assembled(out) if call.pop("index") not in lost]
    if calls != message.get("tool_calls", []):
        message.pop("tool_calls", None)
        message |= {"tool_calls": calls} if calls else {}
        changed = True
    if out[-1].value != reason:
        choice["finish_reason"] = out[-1].value
        changed = True
    return changed


def _indexed(part: Part) -> Part:
    if part.kind != "tool_calls":
        return part
    entries = [entry for entry in part.value if isinstance(entry, dict)]
    return Part(part.kind, [entry | {"index": at} for at, entry in enumerate(entries)])


def _assembled(parts: list[Part]) -> list[Json]:
    """Whole calls from their deltas, in order."""
    calls: dict[int, Json] = {}
    for entry in (entry for part in parts if part.kind == "tool_calls" for entry in part.value):
        if entry["index"] not in calls:
            calls[entry["index"]] = entry
            continue
        function = calls[entry["index"]]["function"]
        more = entry["function"]["arguments"]
        calls[entry["index"]]["function"] = function | {
            "arguments": (function.get("arguments") or "") + more
        }
    return [calls[index] for index in sorted(calls)]
