"""Answers as an engine sends them, and as clients read them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from fable_gateway.request import CHAT, Asked, understand
from fable_gateway.stream import AnswerStream
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletionChunk

CASES: dict[str, Any] = yaml.safe_load(
    (Path(__file__).parent / "gateway_cases.yaml").read_text(encoding="utf-8")
)
TOOLS: dict[str, Any] = CASES["tools"]
DONE = b"data: [DONE]\n\n"


def request(
    tools: Sequence[str] = tuple(TOOLS), choice: str = "auto", **more: object
) -> dict[str, Any]:
    """A chat request that declares `tools`; a `choice` that is a tool's name names it."""
    declared = [
        {"type": "function", "function": {"name": name, "parameters": TOOLS[name]}}
        for name in tools
    ]
    named = {"type": "function", "function": {"name": choice}}
    return {
        "model": "fable-27b",
        "messages": [],
        "tools": declared,
        "tool_choice": named if choice in TOOLS else choice,
    } | more


def asked(body: Mapping[str, Any]) -> Asked:
    found = understand(json.dumps(body).encode(), CHAT)
    assert found
    return found


def event(delta: Mapping[str, Any], finish: str | None = None, **more: object) -> bytes:
    """A chunk as vLLM writes it."""
    value = {
        "id": "chatcmpl-1",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": "qwen38-27b",
        "choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish} | more],
    }
    return (
        b"data: " + json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
    )


def whole(message: Mapping[str, Any], finish: str) -> bytes:
    """An unary answer."""
    choice = {"index": 0, "message": {"role": "assistant"} | dict(message), "finish_reason": finish}
    value = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "m"}
    return json.dumps(value | {"choices": [choice]}, ensure_ascii=False).encode()


def through(stream: AnswerStream, chunks: Iterable[bytes]) -> bytes:
    """All that the client of `stream` gets for `chunks` and their end."""
    return b"".join([*map(stream.feed, chunks), stream.end()])


@dataclass
class Read:
    """An answer as a client understands it."""

    content: str = ""
    reasoning: str = ""
    finish: str | None = None
    calls: list[tuple[str, Any]] = field(default_factory=list)
    error: str | None = None


def events_of(sent: bytes) -> Iterator[Any]:
    """The values of a stream that ends with `[DONE]`."""
    assert sent.endswith(DONE), sent[-300:]
    for part in (found.strip(b"\n") for found in sent[: -len(DONE)].split(b"\n\n")):
        if part and not part.startswith(b":"):
            assert part.startswith(b"data: "), part
            yield json.loads(part[6:])


def read_stream(sent: bytes) -> Read:
    """Put a stream together, and hold it against what strict clients rely on."""
    found = Read()
    ids: dict[int, str] = {}
    names: dict[int, str] = {}
    arguments: dict[int, str] = {}
    for value in events_of(sent):
        if "error" in value:
            found.error = value["error"]["code"]
            continue
        for choice in value["choices"]:
            delta = choice["delta"]
            assert found.finish is None, "a delta behind the finish_reason"
            found.content += delta.get("content") or ""
            thought = delta.get("reasoning") or ""
            assert thought == (delta.get("reasoning_content") or "")
            found.reasoning += thought
            assert "tool_calls" not in delta or delta["tool_calls"]
            for entry in delta.get("tool_calls", []):
                index = entry["index"]
                if index not in names:
                    assert index == len(names)
                    assert entry["type"] == "function"
                    assert entry["id"]
                    assert entry["id"] not in ids.values()
                    ids[index], names[index] = entry["id"], entry["function"]["name"]
                    arguments[index] = ""
                else:
                    assert not entry.get("id")
                    assert not entry["function"].get("name")
                arguments[index] += entry["function"].get("arguments") or ""
            found.finish = choice["finish_reason"]
    if found.error is None:
        found.calls = [(names[i], _object(arguments[i])) for i in range(len(names))]
    return found


def read_with_openai(sent: bytes) -> Read:
    """The same stream as the official client's accumulator reads it."""
    state: ChatCompletionStreamState[None] = ChatCompletionStreamState()
    for value in events_of(sent):
        state.handle_chunk(ChatCompletionChunk.model_validate(value))
    choice = state.current_completion_snapshot.choices[0]
    calls = [
        (call.function.name, _object(call.function.arguments))
        for call in choice.message.tool_calls or []
    ]
    extra = choice.message.model_extra or {}
    reasoning = extra.get("reasoning") or ""
    return Read(choice.message.content or "", reasoning, choice.finish_reason, calls)


def read_whole(body: bytes) -> Read:
    """An unary answer, held against what strict clients rely on."""
    choice = json.loads(body)["choices"][0]
    message = choice["message"]
    entries = message.get("tool_calls", [])
    assert "tool_calls" not in message or entries
    assert all(entry["id"] and entry["type"] == "function" for entry in entries)
    assert len({entry["id"] for entry in entries}) == len(entries)
    assert message.get("reasoning") == message.get("reasoning_content")
    calls = [(e["function"]["name"], _object(e["function"]["arguments"])) for e in entries]
    content, reasoning = message.get("content") or "", message.get("reasoning") or ""
    return Read(content, reasoning, choice["finish_reason"], calls)


def _object(arguments: str) -> Any:
    value = json.loads(arguments)
    assert isinstance(value, dict), arguments
    return value


def chunkings(text: str) -> Iterator[list[str]]:
    """All at once, one character at a time, and every single split."""
    yield [text]
    yield list(text)
    for at in range(1, len(text)):
        yield [text[:at], text[at:]]
