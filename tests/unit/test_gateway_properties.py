"""What holds for every answer, whatever stands in it."""

from __future__ import annotations

import json
import re
import sys
import tracemalloc
from itertools import pairwise
from typing import Any

import pytest
from fable_gateway.callreaders import Call
from fable_gateway.message import normalised
from fable_gateway.request import CHAT, COMPLETIONS, understand
from fable_gateway.stream import AnswerStream
from fable_gateway.toolcalls import MAX_CALL_CHARS, CallParser
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.gateway_answers import (
    DONE,
    TOOLS,
    asked,
    event,
    read_stream,
    read_whole,
    request,
    through,
    whole,
)

# Pieces from which a model's markup, and what looks like it, can come together.
PIECES = [
    "<tool_call>", "</tool_call>", "<function=shell>", "<function=horn>", "<function=none>",
    "</function>", "<parameter=line>", "<parameter=hours>", "</parameter>", "<parameter=quay",
    "</x>", "<think>", "</think>", "```", "~~~", "`", "\n", "\n", " ", "<", ">", "/", "=", "{", "}",
    '{"name": "horn", "arguments": {}}', '{"name": "shell", "arguments": {"line": "', '"}}', "[",
    "]", ",", '"', "\\", "a", "é", "潮", "007", "null", "text", "\r\n",
]  # fmt: skip
MARKUP = st.lists(st.sampled_from(PIECES), max_size=24).map("".join)
PLAIN = st.text(st.characters(exclude_characters="<{[`~", exclude_categories=["Cs"]), max_size=60)
FINISHES = st.sampled_from(["stop", "length", "tool_calls"])
CHOICES = st.sampled_from(["auto", "required", "shell"])
SENT = settings(max_examples=250, deadline=None)


def cut(text: str, places: list[int]) -> list[str]:
    at = sorted({place % (len(text) + 1) for place in places} | {0, len(text)})
    return [text[start:end] for start, end in pairwise(at)]


def streamed(body: dict[str, Any], deltas: list[dict[str, Any]], finish: str) -> bytes:
    events = [*map(event, deltas), event({}, finish), DONE]
    return through(AnswerStream(asked(body | {"stream": True})), events)


@SENT
@given(MARKUP, MARKUP, st.lists(st.integers(0, 200), max_size=12), FINISHES, CHOICES)
def test_streamed_and_whole_answers_come_out_the_same(
    thought: str, text: str, places: list[int], finish: str, choice: str
) -> None:
    body = request(choice=choice)
    message = {"content": text} | ({"reasoning": thought} if thought else {})
    sent = normalised(whole(message, finish), asked(body)).body
    deltas = [{"reasoning": part} for part in cut(thought, places)]
    deltas += [{"content": part} for part in cut(text, places)]
    found = read_whole(sent)
    assert read_stream(streamed(body, deltas, finish)) == found
    # Where a call was taken out of broken markup, what stood around it may meet and be one.
    if "<" not in found.content or not (found.calls or finish == "length"):
        assert normalised(sent, asked(body)).body == sent


@SENT
@given(MARKUP, st.lists(st.integers(0, 200), max_size=12), FINISHES)
def test_without_tools_content_is_never_changed(text: str, places: list[int], finish: str) -> None:
    for body in (request([]), request(choice="none")):
        sent = normalised(whole({"content": text}, finish), asked(body)).body
        assert json.loads(sent)["choices"][0]["message"]["content"] == text
        deltas = [{"content": part} for part in cut(text, places)]
        assert read_stream(streamed(body, deltas, finish)).content == text


@SENT
@given(PLAIN, st.lists(st.integers(0, 60), max_size=12))
def test_without_a_marker_every_byte_stays(text: str, places: list[int]) -> None:
    body = request()
    came = whole({"content": text}, "stop")
    assert normalised(came, asked(body)).body == came
    events = [event({"content": part}) for part in cut(text, places)]
    chunks = [event({"role": "assistant", "content": ""}), *events, event({}, "stop"), DONE]
    assert through(AnswerStream(asked(body)), chunks) == b"".join(chunks)


@SENT
@given(st.lists(st.tuples(st.sampled_from(["content", "reasoning"]), MARKUP | PLAIN), max_size=9))
def test_the_short_way_leads_where_the_long_one_does(texts: list[tuple[str, str]]) -> None:
    # Texts repeat, so that events differ from those before them in their text alone.
    deltas = [{kind: part} for kind, text in texts for part in (text[:2], text[2:4], text[4:], "x")]
    for body in (request(), request([])):
        short = streamed(body, deltas, "stop")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("fable_gateway.stream.learn", lambda *_arguments: None)
            long = streamed(body, deltas, "stop")
        ids = re.compile(rb"call_[0-9a-f]{24}")
        assert ids.sub(b"", short) == ids.sub(b"", long)


def test_the_short_way_is_taken() -> None:
    stream = AnswerStream(asked(request(stream=True)))
    for kind, text in (("reasoning", " a"), ("content", " b")):
        first = stream.feed(event({kind: text}))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("fable_gateway.stream.data_of", None)
            again = stream.feed(event({kind: " 潮 c"}))
        assert again == first.replace(text.encode(), " 潮 c".encode())


@SENT
@given(st.text("<tool_cafunin=hr>{ \n", max_size=80))
def test_text_is_held_no_longer_than_a_marker_and_layout_take(text: str) -> None:
    parser = CallParser(asked(request()).tools)
    longest = max(len(f"<function={name}>") for name in TOOLS) + 2 * 16
    said = 0
    for number, character in enumerate(text, 1):
        said += sum(len(item) for item in parser.feed(character) if isinstance(item, str))
        assert parser.in_call or number - said <= longest
    said += sum(len(item) for item in parser.finish(whole=True) if isinstance(item, str))
    assert said == len(text) or "<function=horn>" in text


@SENT
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner),
        max_leaves=5,
    ),
    st.lists(st.integers(0, 60), max_size=6),
    FINISHES,
)
def test_arguments_sent_are_an_object_or_the_stream_says_that_they_broke(
    arguments: Any, places: list[int], finish: str
) -> None:
    text = json.dumps(arguments)
    first = {"index": 0, "id": "a", "type": "function", "function": {"name": "horn"}}
    later = [{"index": 0, "function": {"arguments": part}} for part in cut(text, places)]
    deltas = [{"tool_calls": [entry]} for entry in (first, *later)]
    found = read_stream(streamed(request(), deltas, finish))
    if isinstance(arguments, dict):
        assert found.calls == [("horn", arguments)]
    # An object inside a string is one that was encoded twice.
    assert found.error is None or not isinstance(arguments, dict)


def any_event_end(chunks: list[bytes], end: bytes) -> list[bytes]:
    return [chunk.replace(b"\n", end) for chunk in chunks]


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
def test_events_are_the_same_wherever_the_bytes_are_cut(end: bytes) -> None:
    deltas = [{"content": "潮 "}, {"content": "<function=horn>\n</func"}, {"content": "tion>"}]
    chunks = [b": hold\n\n", *map(event, deltas), b": hold\nid: 7\n" + event({}, "stop"), DONE]
    came = b"".join(any_event_end(chunks, end))
    body = request()
    wanted = None
    for at in range(len(came)):
        sent = through(AnswerStream(asked(body)), [came[:at], came[at:]])
        sent = sent.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        found = read_stream(sent.replace(b": hold\nid: 7\n", b""))
        wanted = wanted or found
        assert found == wanted
        assert sent.count(b": hold") == 2
    assert wanted
    assert (wanted.content, wanted.calls, wanted.finish) == ("潮", [("horn", {})], "tool_calls")


def test_usage_is_asked_for_and_taken_away_again() -> None:
    usage = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    last = event({}, "stop") + b"data: " + json.dumps({"choices": [], "usage": usage}).encode()
    came = event({"content": "x"}) + last + b"\n\n" + DONE
    for path in (CHAT, COMPLETIONS):
        for options in (None, {}, {"include_usage": False}, {"continuous_usage_stats": False}):
            body = {"stream": True} | ({} if options is None else {"stream_options": options})
            found = understand(json.dumps(body).encode(), path)
            assert found
            assert json.loads(found.body)["stream_options"]["include_usage"] is True
            stream = AnswerStream(found)
            assert b"usage" not in through(stream, [came])
            assert stream.usage == usage
    wants = json.dumps({"stream": True, "stream_options": {"include_usage": True}}).encode()
    found = understand(wants, CHAT)
    assert found
    assert found.body == wants
    stream = AnswerStream(found)
    assert through(stream, [came]) == came
    assert stream.usage == usage


@given(st.binary(max_size=60) | st.text(max_size=40).map(str.encode))
def test_a_request_that_cannot_be_read_goes_on_as_it_is(body: bytes) -> None:
    found = understand(body, CHAT)
    assert found
    try:
        is_object = isinstance(json.loads(body.decode()), dict)
    except ValueError:
        is_object = False
    assert is_object or found.body == body


@pytest.mark.parametrize("n", [1, 3])
def test_without_every_finish_reason_it_is_no_end(n: int) -> None:
    ends = [event({}, "stop", index=index) for index in range(n)]
    for missing in range(n):
        came = [end for index, end in enumerate(ends) if index != missing]
        for tail in ([], [DONE]):
            stream = AnswerStream(asked(request(n=n)))
            assert DONE not in through(stream, [event({"content": "x"}), *came, *tail])
            assert stream.cut
    stream = AnswerStream(asked(request(n=n)))
    assert through(stream, ends) == b"".join(ends) + DONE


def test_an_error_of_the_engine_ends_the_stream_as_it_is() -> None:
    error = b'data: {"error": {"message": "EngineCore died", "code": 500}}\n\n'
    stream = AnswerStream(asked(request()))
    assert through(stream, [event({"content": "x"}), error, DONE]).endswith(error + DONE)
    assert not stream.cut


# Hostile sizes. Work is counted as the interpreter's own steps: no clock.

ENDLESS = {
    "a value": ("<tool_call>\n<function=shell>\n<parameter=line>\n", "abc < d </parameter> "),
    "parameters": ("<function=shell>\n<parameter=line>\n", "\n<parameter=line>"),
    "functions": ("<function=shell>\n<parameter=line>\n", "<function=horn></function>"),
    "json": ('<tool_call>{"name": "shell", "arguments": {"line": "', 'x\\" { ['),
    "brackets": ("<tool_call>", "["),
    "tags": ("", "<tool_call>"),
    "opened json": ("", '<tool_call>{"'),
    "half tags": ("", "<function=hor"),
    "space": ("<tool_call>", " "),
    "ticks": ("`", "<tool_call>`"),
    "thinking": ("<think>", "</thin"),
    "bare json": ('{"name": "horn", ', '"a": {},'),
}


@pytest.mark.parametrize("name", ENDLESS)
def test_a_tag_that_never_ends_is_bounded_and_linear(name: str) -> None:
    start, again = ENDLESS[name]

    def steps(pieces: int, size: int) -> int:
        parser = CallParser(asked(request()).tools)
        count = 0

        def traced(_frame: object, _event: str, _argument: object) -> None:
            nonlocal count
            count += 1

        sys.setprofile(traced)
        try:
            parser.feed(start)
            for _ in range(pieces):
                parser.feed(again * (size // len(again)))
            parser.finish(whole=True)
        finally:
            sys.setprofile(None)
        return count

    small, large = steps(64, 200), steps(256, 200)
    assert large < 4 * small * 1.5 + 1000


def test_what_is_held_of_an_endless_call_is_bounded() -> None:
    stream = AnswerStream(asked(request()))
    piece = event({"content": "0123456789abcdef" * 4096})
    stream.feed(event({"content": "<tool_call>\n<function=shell>\n<parameter=line>\n"}))
    tracemalloc.start()
    try:
        for _ in range(200):
            stream.feed(piece)
        assert tracemalloc.get_traced_memory()[1] < 16 * MAX_CALL_CHARS
    finally:
        tracemalloc.stop()


def test_an_event_that_never_ends_is_cut() -> None:
    stream = AnswerStream(asked(request()))
    for _ in range(20):
        stream.feed(b"data: " + b"x" * (1 << 20))
    assert stream.cut


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "[{" * 50_000])
def test_deep_json_passes_as_it_is(text: str) -> None:
    deep = text.encode()
    assert normalised(deep, asked(request())).body == deep
    found = understand(deep, CHAT)
    assert found
    assert found.body == deep
    answer = whole({"content": f"<tool_call>{text}</tool_call>"}, "stop")
    assert normalised(answer, asked(request())).body == answer
    history = [
        {"role": "assistant", "tool_calls": [{"function": {"name": "x", "arguments": text}}]}
    ]
    sent = json.loads(asked(request(messages=history)).body)["messages"][0]
    arguments = json.loads(sent["tool_calls"][0]["function"]["arguments"])
    assert arguments == {"INVALID_JSON": text}


def test_a_long_answer_is_read_whole() -> None:
    text = "line with a < sign and `code`\n" * 100_000
    answer = whole({"content": text + "<function=horn>\n</function>"}, "stop")
    found = read_whole(normalised(answer, asked(request())).body)
    assert (found.content, found.calls) == (text.rstrip(), [("horn", {})])


def test_a_schema_that_refers_to_itself_is_read() -> None:
    schema = {"$defs": {"T": {"anyOf": [{"$ref": "#/$defs/T"}] * 9 + [{"type": "integer"}]}}}
    tool = {"name": "f", "parameters": schema | {"properties": {"x": {"$ref": "#/$defs/T"}}}}
    body = {"tools": [{"type": "function", "function": tool}], "messages": []}
    parser = CallParser(asked(body).tools)
    items = parser.feed("<function=f>\n<parameter=x>\n7\n</parameter>\n</function>")
    assert items == [Call("f", {"x": 7})]
