"""What a request asks for, and the body that goes to the engine for it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from fable_gateway.arguments import Json, to_bytes
from fable_gateway.callreaders import Tools
from fable_gateway.checked import distinct
from fable_gateway.history import repaired

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
USAGE = b'"stream_options":{"include_usage":true}'


@dataclass(frozen=True)
class Asked:
    """A request as far as its answer depends on it.

    Attributes:
        body: what goes to the engine: the client's own bytes wherever nothing had to change.
        chat: whether the answer is a chat message.
        tools: what the request declared; empty with tool_choice none.
        choices: how many choices the answer has.
        model: the model's name.
        strip_usage: whether usage was asked for by the gateway alone.
    """

    body: bytes
    chat: bool = False
    tools: Tools = field(default_factory=Tools)
    choices: int = 1
    strip_usage: bool = False
    model: str | None = None


def understand(body: bytes, path: str) -> Asked | None:
    """Read the body of a request to `path`; one that cannot be read goes to the engine as it is.

    Returns:
        None if `path` asks no model for text.
    """
    if path not in {CHAT, COMPLETIONS}:
        return None
    try:
        value = json.loads(body.decode())
        if not isinstance(value, dict):
            return Asked(body, path == CHAT)
        messages = value.get("messages")
        if path == CHAT and isinstance(messages, list):
            fixed = repaired(messages)
            if fixed is not messages:
                value["messages"] = fixed
                body = to_bytes(value)
        strip = value.get("stream") is True and not _asks_usage(value)
        return Asked(
            body=with_usage(body, value) if strip else body,
            chat=path == CHAT,
            tools=_tools(value) if path == CHAT else Tools(),
            choices=_choices(value),
            strip_usage=strip,
            model=_model(value),
        )
    except (ValueError, RecursionError):
        return Asked(body, path == CHAT)


def certain_model(body: bytes) -> str | None:
    """The model that every reader sees in `body`; None where two could differ."""
    try:
        value = json.loads(body.decode(), object_pairs_hook=distinct)
    except (ValueError, RecursionError):
        return None
    return _model(value) if isinstance(value, dict) else None


def _model(value: Json) -> str | None:
    model = value.get("model")
    return model if isinstance(model, str) else None


def with_usage(body: bytes, value: Json) -> bytes:
    """`body`, the JSON of `value`, asking for usage at the stream's end too."""
    options = value.get("stream_options")
    if "stream_options" not in value:
        head = body.rstrip()[:-1]
        return head + (b"," if value else b"") + USAGE + b"}"
    asked = (options if isinstance(options, dict) else {}) | {"include_usage": True}
    return to_bytes(value | {"stream_options": asked})


def _asks_usage(value: Json) -> bool:
    options = value.get("stream_options")
    return isinstance(options, dict) and options.get("include_usage") is True


def _choices(value: Json) -> int:
    """Choices in the answer: n of each prompt."""
    number = value.get("n")
    number = number if isinstance(number, int) and number > 0 else 1
    prompt = value.get("prompt")
    many = isinstance(prompt, list) and prompt and not isinstance(prompt[0], int)
    return number * len(prompt) if many and isinstance(prompt, list) else number


def _tools(value: Json) -> Tools:
    choice = value.get("tool_choice")
    if choice == "none":
        return Tools()
    schemas: dict[str, Json] = {}
    declared = value.get("tools")
    for tool in declared if isinstance(declared, list) else []:
        function = tool.get("function") if isinstance(tool, dict) else None
        if isinstance(function, dict) and isinstance(function.get("name"), str):
            parameters = function.get("parameters")
            schemas[function["name"]] = parameters if isinstance(parameters, dict) else {}
    schemas.pop("", None)
    return Tools(schemas, choice == "required", _named(choice, schemas))


def _named(choice: Any, schemas: dict[str, Json]) -> str | None:
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) and name in schemas else None
