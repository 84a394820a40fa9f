"""Answers through a real gateway process: strict calls, true ends, and history on its way up."""

from __future__ import annotations

import http.client
import json
from typing import Any

import openai
import pytest

from tests.unit.gateway_answers import DONE, event, read_stream, request, whole
from tests.unit.gateway_support import Engine, Gateway, client

XML = (
    "One moment.\n<tool_call>\n<function=ferry_times>\n<parameter=quay>\nNorth\n</parameter>\n"
    "<parameter=hours>\n3\n</parameter>\n</function>\n</tool_call>"
)
USAGE = (
    b'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"m",'
    b'"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":2,"total_tokens":5}}\n\n'
)


def events(*chunks: bytes, **more: object) -> dict[str, Any]:
    """What makes the invented engine send `chunks`."""
    return {"act": "events", "chunks": [chunk.hex() for chunk in chunks]} | more


def pieces(text: str, size: int) -> list[bytes]:
    return [event({"content": text[at : at + size]}) for at in range(0, len(text), size)]


def json_answer(body: bytes) -> dict[str, Any]:
    return events(body, content_type="application/json")


def call_of(completion: Any) -> tuple[str, Any]:
    (call,) = completion.choices[0].message.tool_calls
    return call.function.name, json.loads(call.function.arguments)


def test_official_client_gets_a_call_that_stood_in_the_text(gateway: Gateway) -> None:
    completion = client(gateway).chat.completions.create(
        model="fable-27b",
        messages=[],
        tools=request()["tools"],
        extra_body=json_answer(whole({"content": XML, "tool_calls": []}, "stop")),
    )
    assert call_of(completion) == ("ferry_times", {"quay": "North", "hours": 3})
    choice = completion.choices[0]
    assert (choice.message.content, choice.finish_reason) == ("One moment.", "tool_calls")


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_official_client_streams_a_call_that_stood_in_the_text(gateway: Gateway, size: int) -> None:
    with client(gateway).chat.completions.stream(
        model="fable-27b",
        messages=[],
        tools=request()["tools"],
        extra_body=events(*pieces(XML, size), event({}, "stop"), DONE),
    ) as stream:
        completion = stream.get_final_completion()
    assert call_of(completion) == ("ferry_times", {"quay": "North", "hours": 3})
    choice = completion.choices[0]
    assert (choice.message.content, choice.finish_reason) == ("One moment.", "tool_calls")


def test_history_is_repaired_on_its_way_up(gateway: Gateway, upstream: Engine) -> None:
    broken = {"id": "c1", "type": "function", "function": {"name": "shell", "arguments": '{"a'}}
    messages = [{"role": "assistant", "content": "", "tool_calls": [broken]}]
    assert gateway.ask({"model": "fable-27b", "messages": messages})[0] == 200
    sent = json.loads(upstream.next_seen().body)["messages"][0]["tool_calls"][0]["function"]
    assert json.loads(sent["arguments"]) == {"INVALID_JSON": '{"a'}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_usage_is_asked_for_and_shown_to_those_who_asked(
    gateway: Gateway, upstream: Engine, path: str
) -> None:
    came = (event({"content": "x"}), event({}, "stop"), USAGE, DONE)
    asks: tuple[dict[str, Any], ...] = ({}, {"stream_options": {"include_usage": True}})
    for more in asks:
        _, headers, sent = gateway.ask(events(*came, stream=True) | more, path=path)
        assert json.loads(upstream.next_seen().body)["stream_options"]["include_usage"] is True
        assert (USAGE in sent) == bool(more)
        assert sent == b"".join(c for c in came if more or c is not USAGE)
        assert (headers["cache-control"], headers["x-accel-buffering"]) == ("no-cache", "no")


@pytest.mark.parametrize("act", ["events", "headers_then_wait", "cut"])
def test_with_its_finish_reason_an_answer_is_whole_and_gets_its_end(
    gateway: Gateway, act: str
) -> None:
    # The engine closes, stays silent for an hour, or breaks off.
    came = events(event({"content": "x"}), event({}, "stop")) | {"act": act}
    assert read_stream(gateway.ask(came | {"stream": True})[2]).finish == "stop"


@pytest.mark.parametrize("tail", [(), (DONE,)], ids=["nothing", "DONE"])
def test_without_a_finish_reason_no_end_looks_like_one(
    gateway: Gateway, tail: tuple[bytes, ...]
) -> None:
    answer = http.client.HTTPResponse(gateway.open_raw(events(event({"content": "x"}), *tail)))
    answer.begin()
    with pytest.raises(http.client.IncompleteRead) as cut:
        answer.read()
    assert DONE not in cut.value.partial
    assert b'"code":"stream_cut"' in cut.value.partial


def test_engine_errors_inside_a_stream_pass(gateway: Gateway) -> None:
    error = b'data: {"error": {"message": "EngineCore died", "code": 500}}\n\n'
    came = (event({"content": "x"}), error, DONE)
    assert gateway.ask(events(*came))[2] == b"".join(came)
    stream = client(gateway).chat.completions.create(
        model="fable-27b", messages=[], stream=True, extra_body=events(*came)
    )
    with pytest.raises(openai.APIError, match="EngineCore died"):
        list(stream)


def test_comments_pass_and_are_no_events(gateway: Gateway) -> None:
    came = (b": hold\n\n", event({"content": "x"}), b": hold\n\n", event({}, "stop"), DONE)
    assert gateway.ask(events(*came))[2] == b"".join(came)


def test_a_false_alarm_passes_while_the_engine_goes_on(gateway: Gateway) -> None:
    came = [event({"content": text}) for text in ("if a ", "<", " b and <to", "day> ok")]
    act = events(*came, tools=request()["tools"]) | {"act": "headers_then_wait"}
    with gateway.open_raw(act) as connection, connection.makefile("rb") as answer:
        while answer.readline().strip():
            pass
        received = b""
        while b"ok" not in received:
            received += answer.read(int(answer.readline(), 16) + 2)[:-2]
    assert received == b"".join(came)


def test_a_large_request_and_a_large_answer_pass(gateway: Gateway, upstream: Engine) -> None:
    pad = "word " * 1_600_000
    body = json_answer(whole({"content": pad}, "stop"))
    asked = request(messages=[{"role": "user", "content": pad}])
    status, _, sent = gateway.ask(asked | body)
    assert status == 200
    assert sent == bytes.fromhex(body["chunks"][0])
    assert json.loads(upstream.next_seen().body)["messages"][0]["content"] == pad


def test_answers_other_than_text_of_a_model_pass_untouched(gateway: Gateway) -> None:
    odd = b'{"choices": [{"message": {"tool_calls": []}}]}'
    assert gateway.ask(json_answer(odd), path="/v1/embeddings")[2] == odd
    assert gateway.ask(events(odd, content_type="text/plain"))[2] == odd
