"""What a request's body asks for, as far as the gateway must know."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from fable_gateway.checked import Wrong, distinct

OPENING = re.compile(rb"\s*\{")
USAGE = b'"stream_options":{"include_usage":true},'


@dataclass(frozen=True)
class Asked:
    """A body that is a JSON object; what cannot be read leaves the defaults.

    Attributes:
        value: the object; None if the body is none.
        model: the model's name.
        stream: whether events are wanted.
        usage: whether the client wants the usage event at the end of the stream.
    """

    value: dict[str, object] | None = None
    model: str | None = None
    stream: bool = False
    usage: bool = False


def read(body: bytes, once: bool = False) -> Asked:
    """Look into `body`.

    Args:
        body: as the client sent it.
        once: take a body in which any key stands twice for none at all, for another reader could
            see another model in it.
    """
    try:
        value = json.loads(body.decode(), object_pairs_hook=distinct if once else None)
    except (ValueError, RecursionError, Wrong):
        return Asked()
    if not isinstance(value, dict):
        return Asked()
    model, options = value.get("model"), value.get("stream_options")
    return Asked(
        value=value,
        model=model if isinstance(model, str) else None,
        stream=value.get("stream") is True,
        usage=isinstance(options, dict) and options.get("include_usage") is True,
    )


def with_usage(body: bytes, asked: Asked) -> bytes:
    """`body`, which asks for a stream, asking for its usage too; the rest stays as it is."""
    value = asked.value or {}
    options = value.get("stream_options")
    opening = OPENING.match(body)
    if "stream_options" not in value and opening:
        return body[: opening.end()] + USAGE + body[opening.end() :]
    more = dict(options) if isinstance(options, dict) else {}
    return json.dumps(value | {"stream_options": more | {"include_usage": True}}).encode()
