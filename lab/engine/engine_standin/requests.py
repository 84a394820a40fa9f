"""Requests of the two generation endpoints: checked and turned into an answer. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine_standin import text
from engine_standin.arguments import Arguments

XML_PARSERS = {"qwen3_coder", "qwen3_xml"}  # those that know the model's calls
DEFAULT_COMPLETION_TOKENS = 16
Json = dict[str, Any]


class Refused(Exception):
    """A request that is answered with an error in vLLM's shape."""

    def __init__(self, status: int, kind: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.body = {
            "error": {"message": message, "type": kind, "param": param, "code": status},
        }


@dataclass(frozen=True)
class Job:
    """A checked request and the answer that it will get."""

    chat: bool
    stream: bool
    include_usage: bool
    continuous_usage: bool
    prompt_tokens: int
    domain: str
    answer: text.Answer


def _bad(message: str, param: str | None = None) -> Refused:
    return Refused(400, "BadRequestError", message, param)


def parse_body(raw: bytes) -> Json:
    """The JSON object in a request's body.

    Raises:
        Refused: it is none.
    """
    try:
        body = json.loads(raw)
    except ValueError as error:
        raise Refused(400, "Bad Request", f"The body is not valid JSON: {error}") from error
    if not isinstance(body, dict):
        raise Refused(400, "Bad Request", "The body is not a JSON object")
    return body


def _content_text(content: object, arguments: Arguments) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        raise _bad("A message's content must be a string or a list of parts", "messages")
    images = sum(part.get("type") in {"image_url", "input_image"} for part in content)
    if images > arguments.image_limit:
        raise _bad(f"At most {arguments.image_limit} image(s) may be provided in one prompt.")
    return " ".join(str(part.get("text", "")) for part in content)


def _chat_prompt(body: Json, arguments: Arguments) -> tuple[str, int, str]:
    """Whole prompt, its tokens, and the text of the last user message."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise _bad("messages must be a list with at least one message", "messages")
    if not all(isinstance(message, dict) and message.get("role") for message in messages):
        raise _bad("Each message must be an object with a role", "messages")
    texts = [_content_text(message.get("content"), arguments) for message in messages]
    last = next(
        (t for t, m in zip(texts[::-1], messages[::-1], strict=True) if m["role"] == "user"), ""
    )
    prompt = "\n".join(texts)
    tokens = text.count_tokens(prompt) + text.MESSAGE_OVERHEAD * (len(messages) + 1)
    if tools := body.get("tools"):
        tokens += text.count_tokens(json.dumps(tools))
    return prompt, tokens, last


def _completion_prompt(body: Json) -> tuple[str, int]:
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return prompt, max(1, text.count_tokens(prompt))
    if isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
        return " ".join(map(str, prompt)), len(prompt)
    raise _bad("prompt must be a string or a list of token ids (the stand-in takes one prompt)")


def _limit(body: Json, prompt_tokens: int, arguments: Arguments, default: int | None) -> int:
    window = arguments.max_model_len
    if prompt_tokens >= window:
        raise _bad(
            f"This model's maximum context length is {window} tokens. However, your request has "
            f"{prompt_tokens} input tokens. Please reduce the length of the input messages.",
            "input_tokens",
        )
    room = window - prompt_tokens
    asked = body.get("max_completion_tokens", body.get("max_tokens"))
    if asked is None:
        return min(room, default or room)
    if type(asked) is not int or asked < 1:
        raise _bad(f"max_tokens must be at least 1, got {asked}.", "max_tokens")
    if asked > room:
        raise _bad(
            f"'max_tokens' or 'max_completion_tokens' is too large: {asked}. This model's maximum "
            f"context length is {window} tokens and your request has {prompt_tokens} input tokens "
            f"({asked} > {window} - {prompt_tokens}).",
            "max_tokens",
        )
    return asked


def _tools(body: Json, arguments: Arguments) -> Sequence[Mapping[str, Any]]:
    tools = body.get("tools") or []
    choice = body.get("tool_choice", "auto" if tools else "none")
    if not isinstance(tools, list) or not all(
        isinstance(tool, dict)
        and isinstance(tool.get("function"), dict)
        and "name" in tool["function"]
        for tool in tools
    ):
        raise _bad("tools must be a list of {type, function: {name, parameters}}", "tools")
    if tools and choice == "auto" and arguments.tool_parser is None:
        raise _bad(
            '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set'
        )
    return tools


def make_job(body: Json, arguments: Arguments, *, chat: bool) -> Job:
    """Check a request and compose its answer.

    Raises:
        Refused: unknown model (404), or anything wrong with the request (400).
    """
    model = body.get("model")
    if model is not None and model not in arguments.served_names:
        raise Refused(404, "NotFoundError", f"The model `{model}` does not exist.", "model")
    options = body.get("stream_options") or {}
    template = body.get("chat_template_kwargs") or {}
    if not isinstance(options, dict) or not isinstance(template, dict):
        raise _bad("stream_options and chat_template_kwargs must be objects")
    if body.get("n") not in (None, 1):
        raise _bad("n: the stand-in gives one answer a request", "n")
    ignore_end = bool(body.get("ignore_eos"))
    if chat:
        prompt, tokens, last = _chat_prompt(body, arguments)
        choice = body.get("tool_choice", "auto")
        if isinstance(choice, dict) and not isinstance(choice.get("function"), dict):
            raise _bad("tool_choice must name a function", "tool_choice")
        answer = text.compose(
            prompt,
            _limit(body, tokens, arguments, None),
            chat=True,
            thinking=bool(template.get("enable_thinking", arguments.thinking)),
            parse_reasoning=arguments.reasoning_parser is not None,
            call=text.plan_call(last, _tools(body, arguments), choice),
            parse_call=arguments.tool_parser in XML_PARSERS,
            ignore_end=ignore_end,
        )
    else:
        prompt, tokens = _completion_prompt(body)
        limit = _limit(body, tokens, arguments, DEFAULT_COMPLETION_TOKENS)
        answer = text.compose(prompt, limit, chat=False, ignore_end=ignore_end)
    return Job(
        chat=chat,
        stream=bool(body.get("stream")),
        include_usage=bool(options.get("include_usage")),
        continuous_usage=bool(options.get("continuous_usage_stats")),
        prompt_tokens=tokens,
        domain=text.domain_of(prompt),
        answer=answer,
    )
