"""Mutated streams and requests: no crash, no hang, no false end, flat memory.

A seeded sample; `--long` takes 200,000 streams and 50,000 requests.
"""

from __future__ import annotations

import gc
import json
import random
import sys
from collections.abc import Iterator
from typing import Any

from fable_gateway.message import normalised
from fable_gateway.request import CHAT, COMPLETIONS, Asked, understand
from fable_gateway.stream import AnswerStream

from tests.unit.gateway_answers import CASES, DONE, asked, event, request, whole

SEED = 20_260_701
STREAMS, LONG_STREAMS = 4_000, 200_000
REQUESTS, LONG_REQUESTS = 3_000, 50_000
# Of the interpreter's memory blocks; one left behind by each stream would be more.
FLAT_BLOCKS = 1500
WEDGES = [
    b"", b"\n", b"\r\n", b"\r", b"\n\n", b"data: ", b"data:", b": x\n\n", b"{", b"}", b"[", b"]",
    b'"', b"null", b"\\", b"\\ud83d", b"\xff", b"\xe6\xbd", b"\x00", b"<", b"</", b"<tool_call>",
    b"</tool_call>", b"<function=horn>", b"</function>", b"<parameter=line>", b"</parameter>",
    b"</think>", b"```", b'"index":1', b'"index":"0"', b'"id":null', b"1e999", b"NaN", b"9" * 500,
    b'"finish_reason":"stop"', b'"tool_calls":[]', b'"tool_calls":{}', b'"tool_calls":[null]',
    b'"delta":null', b'"choices":[]', b'"choices":[{}]', b'"function":null', b'"arguments":{}',
    b'"usage":{}', b'"content":7', DONE, b'data: {"error":{}}\n\n',
    b'data: {"choices":[{"index":9,"delta":{"content":"x"}}]}\n\n',
]  # fmt: skip
TYPES: list[Any] = [None, True, 0, -1, 1.5, "", "x", "<tool_call>", [], {}, [None], {"a": 1}]


def streams() -> Iterator[bytes]:
    for case in CASES["streams"]:
        events = b"".join(map(event, case["deltas"]))
        yield events + event({}, case.get("finish", "stop")) + DONE
    for case in CASES["answers"]:
        text = case.get("content", "")
        events = b"".join(event({"content": text[at : at + 5]}) for at in range(0, len(text), 5))
        yield events + event({}, case.get("finish", "stop")) + DONE


def mutated(content: bytes, chance: random.Random) -> bytes:
    """A few cuts, copies and insertions."""
    result = bytearray(content)
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(result) + 1)
        end = min(len(result), at + chance.choice((0, 1, 3, 20, 200)))
        kind = chance.randrange(4)
        if kind == 0:
            del result[at:end]
        elif kind == 1:
            result[at:at] = result[at:end]
        elif kind == 2:
            result[at:end] = chance.choice(WEDGES)
        else:
            result[at:at] = chance.choice(WEDGES)
    return bytes(result)


def chunks_of(content: bytes, chance: random.Random) -> Iterator[bytes]:
    at = 0
    while at < len(content):
        size = chance.choice((1, 7, 100, 1000, len(content)))
        yield content[at : at + size]
        at += size


def questions() -> list[Asked]:
    bodies = [
        request(choice=choice, **more)
        for choice in ("auto", "required", "shell", "none")
        for more in ({}, {"stream": True}, {"n": 2})
    ]
    plain = understand(b'{"prompt": "x", "stream": true}', COMPLETIONS)
    assert plain
    return [*map(asked, bodies), plain]


def test_mutated_streams(long: bool) -> None:
    chance = random.Random(SEED)
    seeds, ways = list(streams()), questions()
    before = 0
    for number in range(LONG_STREAMS if long else STREAMS):
        came = mutated(chance.choice(seeds), chance)
        stream = AnswerStream(chance.choice(ways))
        sent = b"".join([stream.feed(chunk) for chunk in chunks_of(came, chance)]) + stream.end()
        # An end is what the engine meant as one, and nothing else.
        assert stream.cut or stream.complete or stream.failed, came
        assert not (stream.cut and (b"\n\n" + sent).endswith(b"\n\n" + DONE)), came
        if number == 1000:
            gc.collect()
            before = sys.getallocatedblocks()
    gc.collect()
    assert sys.getallocatedblocks() - before < FLAT_BLOCKS


def retyped(value: Any, chance: random.Random) -> Any:
    """A copy in which something has another type, is missing, or stands twice."""
    if isinstance(value, dict) and value and chance.random() < 0.9:
        key = chance.choice(list(value))
        if chance.random() < 0.1:
            return {name: item for name, item in value.items() if name != key}
        return value | {key: retyped(value[key], chance)}
    if isinstance(value, list) and value and chance.random() < 0.9:
        at = chance.randrange(len(value))
        return [*value[:at], retyped(value[at], chance), *value[at : at + chance.randrange(3)]]
    return chance.choice(TYPES)


def test_mutated_requests(long: bool) -> None:
    chance = random.Random(SEED)
    bodies = [request(messages=case["messages"], stream=True) for case in CASES["history"]]
    bodies.append({"model": "m", "prompt": ["a", "b"], "stream": True, "stream_options": {}})
    answers = [
        whole({"content": case.get("content"), "tool_calls": case.get("calls")}, "stop")
        for case in CASES["answers"]
    ]
    for _ in range(LONG_REQUESTS if long else REQUESTS):
        body = chance.choice(bodies)
        for _ in range(chance.randint(1, 3)):
            body = retyped(body, chance)
        text = json.dumps(body).encode()
        text = mutated(text, chance) if chance.random() < 0.3 else text
        found = understand(text, chance.choice((CHAT, COMPLETIONS)))
        assert found
        if found.body != text:
            # Only what was read is written anew, and what was written is right.
            assert understand(found.body, CHAT)
            assert isinstance(json.loads(found.body), dict)
        normalised(chance.choice(answers), found)


def test_mutated_answers(long: bool) -> None:
    chance = random.Random(SEED)
    ways = questions()
    values = [
        json.loads(whole({"content": case.get("content"), "tool_calls": case.get("calls")}, "stop"))
        for case in CASES["answers"]
    ]
    deltas = [delta for case in CASES["streams"] for delta in case["deltas"]]
    for _ in range(LONG_REQUESTS if long else REQUESTS):
        way = chance.choice(ways)
        value = retyped(chance.choice(values), chance)
        body = json.dumps(value).encode()
        sent = normalised(body, way).body
        assert sent == body or isinstance(json.loads(sent), dict)
        stream = AnswerStream(way)
        for delta in (retyped(chance.choice(deltas), chance) for _ in range(3)):
            stream.feed(b"data: " + json.dumps({"choices": [{"delta": delta}]}).encode() + b"\n\n")
        stream.feed(event({}, "tool_calls"))
        stream.end()
