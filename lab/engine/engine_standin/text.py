"""Tokens and invented answers: deterministic text in place of a model's. Pure."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

TOKEN = re.compile(r"[一-鿿]|\w+|[^\w\s]")
CALL = re.compile(r"\bcall (\w+)", re.IGNORECASE)
MESSAGE_OVERHEAD = 4  # role and separators of one message, in tokens
REASONING_TOKENS = 48
ANSWER_TOKENS = 96
COMPLETION_TOKENS = 1024

Channel = Literal["reasoning", "content", "tool", "hidden"]
Piece = tuple[Channel, str]
END: Piece = ("hidden", "<|im_end|>")

DOMAIN_MARKS = {
    "code": ("code", "python", "function", "def ", "program"),
    "prose": ("prose", "story", "tale", "novel"),
}
WORDS = {
    "essay": (
        "the a this each every no one another measure reason habit claim view cost gain limit "
        "city market craft method history question answer balance pattern shows asks keeps "
        "weakens explains follows because while although when therefore slowly often rarely "
        "together between against beyond within clear plain early common quiet modern"
    ),
    "prose": (
        "rain lamp harbour stairs Mira Anton Jules Odile Petrov Hana Tomas Wren Ilse Bo river "
        "window coat letter winter bread bell old new small grey walked waited laughed turned "
        "opened carried under over past toward into and but then until again softly nobody "
        "somebody morning evening salt smoke ash the a her his their"
    ),
    "code": (
        "def return for in if not else value index items result total count key row name path "
        "= + - ( ) [ ] : , . len range append sorted sum min max None True False 0 1 2 self "
        "class import yield while with as"
    ),
    "chinese": (
        "山 水 风 夜 灯 城 门 书 人 路 雨 春 秋 江 月 声 心 石 花 雪 来 去 看 听 说 在 有 不 大 小"
    ),
}


@dataclass(frozen=True)
class Answer:
    """All pieces of an answer, one a token, and how it ends."""

    pieces: tuple[Piece, ...]
    finish: Literal["stop", "length"]
    call: tuple[str, str] | None  # tool name and its arguments as JSON, when complete


def count_tokens(text: str) -> int:
    """Tokens of a text: a word, a Chinese character or a punctuation mark each."""
    return len(TOKEN.findall(text))


def domain_of(prompt: str) -> str:
    """The timing domain of a prompt, by plain marks in it."""
    if re.search(r"[一-鿿]", prompt):
        return "chinese"
    lower = prompt.lower()
    return next((d for d, marks in DOMAIN_MARKS.items() if any(m in lower for m in marks)), "essay")


def _words(domain: str, prompt: str) -> Iterator[str]:
    words = WORDS[domain].split()
    gap = "" if domain == "chinese" else " "
    state = zlib.crc32(prompt.encode())
    while True:
        state = (state * 1103515245 + 12345) % (1 << 31)
        yield words[(state >> 8) % len(words)] + gap


def _example(schema: Mapping[str, Any]) -> Any:
    if schema.get("enum"):
        return schema["enum"][0]
    examples = {"integer": 1, "number": 1.5, "boolean": True, "array": [], "object": {}}
    return examples.get(str(schema.get("type")), "example")


def plan_call(
    prompt: str, tools: Sequence[Mapping[str, Any]], choice: object
) -> tuple[str, dict[str, Any]] | None:
    """The tool call that a prompt asks for: "call NAME" in it, or a required or named choice."""
    functions = {tool["function"]["name"]: tool["function"] for tool in tools}
    found = CALL.search(prompt)
    name = found[1] if found else None
    if isinstance(choice, dict):
        name = choice["function"]["name"]
    elif choice == "required" and name not in functions:
        name = next(iter(functions), None)
    if choice == "none" or name is None or name not in functions:
        return None
    parameters = functions[name].get("parameters") or {}
    properties = parameters.get("properties", {})
    required = parameters.get("required", list(properties))
    return name, {key: _example(properties.get(key, {})) for key in required}


def _call_pieces(name: str, arguments: Mapping[str, Any], channel: Channel) -> Iterator[Piece]:
    lines = ["<tool_call>\n", f"<function={name}>\n"]
    for key, value in arguments.items():
        text = value if isinstance(value, str) else json.dumps(value)
        lines += [f"<parameter={key}>\n", text, "\n</parameter>\n"]
    for line in [*lines, "</function>\n", "</tool_call>"]:
        yield channel, line


def compose(
    prompt: str,
    limit: int,
    *,
    chat: bool,
    thinking: bool = False,
    parse_reasoning: bool = True,
    call: tuple[str, dict[str, Any]] | None = None,
    parse_call: bool = True,
    ignore_end: bool = False,
) -> Answer:
    """The answer to a prompt, at most `limit` tokens long.

    After thinking, one token closes the thought (not shown) and the content starts with an empty
    line. Without a reasoning parser both stay in the content; without a parser that knows the
    model's XML calls, so does the call.
    """
    words = _words(domain_of(prompt), prompt)
    pieces: list[Piece] = []
    if chat and thinking:
        channel: Channel = "reasoning" if parse_reasoning else "content"
        pieces += [(channel, next(words)) for _ in range(REASONING_TOKENS)]
        pieces += [("hidden" if parse_reasoning else "content", "</think>"), ("content", "\n\n")]
    if call:
        pieces += _call_pieces(*call, "tool" if parse_call else "content")
    else:
        natural = ANSWER_TOKENS if chat else COMPLETION_TOKENS
        count = max(0, limit - len(pieces)) if ignore_end else natural
        pieces += [("content", next(words)) for _ in range(count)]
    if not ignore_end:
        pieces.append(END)
    complete = len(pieces) <= limit
    whole_call = call if call and parse_call and complete else None
    return Answer(
        tuple(pieces[:limit]),
        "stop" if complete and not ignore_end else "length",
        (whole_call[0], json.dumps(whole_call[1])) if whole_call else None,
    )
