"""Every case of gateway_cases.yaml: whole, streamed in every way, and its own outcome again."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fable_gateway.message import normalised
from fable_gateway.stream import AnswerStream

from tests.unit.gateway_answers import (
    CASES,
    DONE,
    TOOLS,
    Read,
    asked,
    chunkings,
    event,
    read_stream,
    read_whole,
    read_with_openai,
    request,
    through,
    whole,
)


def named(kind: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", CASES[kind], ids=[case["id"] for case in CASES[kind]])


def asking(case: dict[str, Any], **more: object) -> dict[str, Any]:
    return request(case.get("tools", tuple(TOOLS)), case.get("choice", "auto"), **more)


def expected(case: dict[str, Any]) -> Read:
    expect = case["expect"]
    content = expect.get("content", "")
    return Read(
        case["content"] if content == "SAME" else content,
        expect.get("reasoning", ""),
        expect["finish"],
        [tuple(call) for call in expect.get("calls", [])],
    )


def message_of(case: dict[str, Any]) -> dict[str, Any]:
    texts = ("content", "reasoning", "reasoning_content")
    message = {name: case[name] for name in texts if name in case}
    return message | ({"tool_calls": case["calls"]} if "calls" in case else {})


@named("answers")
def test_whole_answers(case: dict[str, Any]) -> None:
    body = whole(message_of(case), case.get("finish", "stop"))
    sent = normalised(body, asked(asking(case))).body
    assert read_whole(sent) == expected(case)
    if case["expect"].get("content") == "SAME" and "calls" not in case:
        assert sent == body
    assert normalised(sent, asked(asking(case))).body == sent


@named("answers")
def test_streamed_answers_are_the_same_however_they_are_cut(case: dict[str, Any]) -> None:
    finish = case.get("finish", "stop")
    cut = "content" if case.get("content", "").strip() else "reasoning"
    cut = "reasoning_content" if "reasoning_content" in case else cut
    for number, pieces in enumerate(chunkings(case.get(cut, ""))):
        events = [event({"role": "assistant", "content": ""})]
        for name in ("reasoning", "reasoning_content", "content"):
            texts = pieces if name == cut else [case[name]] if name in case else []
            events += [event({name: text}) for text in texts]
        if "calls" in case:
            events.append(event({"tool_calls": case["calls"]}))
        stream = AnswerStream(asked(asking(case, stream=True)))
        sent = through(stream, [*events, event({}, finish), DONE])
        if case["expect"].get("withheld"):
            # A part of the call is out already: it ends as an error.
            assert read_stream(sent).error == "tool_call_cut"
            continue
        assert read_stream(sent) == expected(case), pieces
        if number < 2:
            assert read_with_openai(sent) == expected(case)
        if case["expect"].get("same_bytes"):
            assert sent == b"".join([*events, event({}, finish), DONE])


@named("streams")
@pytest.mark.parametrize("cut_at", [None, 1, 7])
def test_streams(case: dict[str, Any], cut_at: int | None) -> None:
    events = [event(delta) for delta in case["deltas"]]
    ends = [case.get("finish", "stop"), *([case["behind"]] if "behind" in case else [])]
    came = b"".join([*events, *(event({}, end) for end in ends), DONE])
    chunks = [
        came[at : at + (cut_at or len(came))] for at in range(0, len(came), cut_at or len(came))
    ]
    sent = through(AnswerStream(asked(request(stream=True))), chunks)
    found = read_stream(sent)
    expect = case["expect"]
    assert found.error == expect.get("error")
    if not found.error:
        assert found == expected(case)
        assert read_with_openai(sent) == expected(case)
    assert found.finish == expect["finish"]
    for word in expect.get("never", []):
        assert word not in found.content
    if expect.get("same_bytes"):
        assert sent == came


def test_text_that_is_no_tag_is_not_held_longer_than_a_tag_takes() -> None:
    stream = AnswerStream(asked(request(stream=True)))
    case = next(case for case in CASES["streams"] if case["id"].startswith("a false alarm"))
    fed = out = b""
    waits = []
    for delta in case["deltas"]:
        fed += event(delta)
        out += stream.feed(event(delta))
        waits.append(fed.count(b"data: ") - out.count(b"data: "))
    assert waits == [1, 2, 3, 0, 0]


@named("history")
def test_history(case: dict[str, Any]) -> None:
    body = json.dumps({"model": "m", "messages": case["messages"]})
    sent = asked(json.loads(body)).body
    messages = json.loads(sent)["messages"]
    expect = case["expect"]
    if expect == "SAME":
        assert sent.decode() == body
        return
    if "messages" in expect:
        assert messages == expect["messages"]
    if "arguments" in expect:
        call = messages[0]["tool_calls"][0]
        assert json.loads(call["function"]["arguments"]) == expect["arguments"]
        assert call["id"]
        assert call["type"] == "function"
    if expect.get("linked"):
        assert messages[1]["tool_call_id"] == messages[0]["tool_calls"][0]["id"]
    again = asked(json.loads(sent)).body
    assert json.loads(again) == json.loads(sent)
