"""The gateway as its users meet it: a real process before an invented engine."""

from __future__ import annotations

import hashlib
import http.client
import json
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.unit.gateway_support import (
    KEY,
    MODELS,
    OTHER_KEY,
    PATIENCE_S,
    Engine,
    Gateway,
    client,
    engine,
    gateway_before,
)

FINISH = b'data: {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}\n\n'
DONE = b"data: [DONE]\n\n"


def hexed(*chunks: bytes) -> list[str]:
    return [chunk.hex() for chunk in chunks]


@pytest.mark.parametrize("model", MODELS)
def test_official_client_gets_an_answer(gateway: Gateway, model: str) -> None:
    messages = [{"role": "user", "content": "when is low tide?"}]
    answer = client(gateway).chat.completions.create(model=model, messages=messages)  # type: ignore[arg-type]
    assert answer.choices[0].message.content == "low tide at six"
    assert answer.model == model


def test_official_client_gets_a_stream(gateway: Gateway) -> None:
    messages = [{"role": "user", "content": "when is low tide?"}]
    stream = client(gateway).chat.completions.create(
        model=MODELS[0],
        messages=messages,  # type: ignore[arg-type]
        stream=True,
    )
    chunks: list[Any] = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "low tide at six"
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_official_client_gets_completions_and_models(gateway: Gateway) -> None:
    answer = client(gateway).completions.create(model=MODELS[1], prompt="low")
    assert answer.choices[0].text == "low tide"
    assert [model.id for model in client(gateway).models.list()] == MODELS


def test_unknown_and_missing_keys_look_the_same(gateway: Gateway, upstream: Engine) -> None:
    answers = [
        gateway.ask(headers=headers)
        for headers in (
            {},
            {"Authorization": "Bearer fable-unknown"},
            {"Authorization": f"Basic {KEY}"},
            {"Authorization": "Bearer "},
            {"x-api-key": KEY + "x"},
            {"x-api-key": "ключ".encode().decode("latin-1")},
        )
    ]
    assert {status for status, _, _ in answers} == {401}
    assert len({body for _, _, body in answers}) == 1
    error = json.loads(answers[0][2])["error"]
    assert error["code"] == "invalid_api_key"
    assert set(error) == {"message", "type", "param", "code"}
    assert upstream.seen.empty()
    with pytest.raises(openai.AuthenticationError):
        client(gateway, "fable-unknown").models.list()


def test_only_the_way_that_a_key_came_is_dropped(gateway: Gateway, upstream: Engine) -> None:
    sent = {
        "X-Api-Key": KEY,
        "Authorization": f"Bearer {OTHER_KEY}",
        "Cookie": KEY,
        "Accept-Encoding": "gzip",
        "Connection": "X-Only-Here",
        "X-Only-Here": "1",
        "X-Request-Id": "tide-1",
        "X-Custom": "kept",
    }
    status, received, _ = gateway.ask(
        {"model": "é"}, path="/v1/chat/completions?a=%2F", headers=sent
    )
    seen = upstream.next_seen()
    headers = {name.lower(): value for name, value in seen.headers}
    assert status == 200
    assert received["x-request-id"] == headers["x-request-id"] == "tide-1"
    assert headers["accept-encoding"] == "identity"
    assert headers["x-custom"] == "kept"
    assert "x-only-here" not in headers
    assert json.loads(seen.body) == {"model": "é"}
    assert seen.target == "/v1/chat/completions?a=%2F"
    everything = repr(seen.headers) + seen.target + seen.body.decode()
    assert KEY not in everything
    assert OTHER_KEY not in everything


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    chunks=st.lists(st.binary(min_size=1, max_size=200), max_size=8),
    text=st.text(max_size=20),
    cut_at=st.integers(1, 30),
)
def test_streamed_bytes_are_untouched(
    gateway: Gateway, chunks: list[bytes], text: str, cut_at: int
) -> None:
    event = f"data: {text}\n\n".encode()
    chunks = [FINISH, *chunks, b"\n\n", event[:cut_at], event[cut_at:], DONE]
    chunks = [chunk for chunk in chunks if chunk]
    status, headers, body = gateway.ask({"act": "events", "chunks": hexed(*chunks)})
    assert (status, body) == (200, b"".join(chunks))
    assert headers["content-type"] == "text/event-stream"
    assert "content-length" not in headers


def test_first_event_passes_while_the_engine_goes_on(gateway: Gateway, upstream: Engine) -> None:
    event = b"data: {}\n\n"
    connection = gateway.open_raw({"act": "headers_then_wait", "chunks": hexed(event)})
    with connection, connection.makefile("rb") as answer:
        while answer.readline().strip():
            pass
        assert answer.readline().strip() == b"%x" % len(event)
        assert answer.read(len(event)) == event
    assert upstream.next_seen().closed.wait(PATIENCE_S)


def test_engine_errors_pass_through(gateway: Gateway, upstream: Engine) -> None:
    for status, text in ((400, '{"detail": "no"}'), (500, "broken kernel"), (404, "{}")):
        upstream.refusals = [(status, text)]
        assert gateway.ask()[::2] == (status, text.encode())
        upstream.next_seen()
    assert upstream.seen.empty()


def test_nothing_outside_v1_reaches_the_engine(gateway: Gateway, upstream: Engine) -> None:
    for path in (
        "/tokenize",
        "/v1/../metrics",
        "/v1/%2e%2E/metrics",
        "/v1/a%2f..%2fmetrics",
        "/v1",
    ):
        status, _, body = gateway.ask(method="GET", path=path)
        assert status == 404
        assert json.loads(body)["error"]["code"] == "not_found"
    assert upstream.seen.empty()
    assert gateway.ask(path="/v1/tokenize/new?x=1")[0] == 200
    assert upstream.next_seen().target == "/v1/tokenize/new?x=1"


def test_contradictory_framing_is_refused(gateway: Gateway, upstream: Engine) -> None:
    with gateway.open_raw({}, Transfer_Encoding="chunked") as connection:
        assert connection.recv(1 << 16).split()[1] == b"400"
    assert upstream.seen.empty()
    assert KEY not in gateway.text


def test_a_malformed_header_is_not_quoted_in_the_journal(gateway: Gateway) -> None:
    with socket.create_connection(("127.0.0.1", gateway.port), PATIENCE_S) as connection:
        connection.sendall(f"GET /v1/models HTTP/1.1\r\nBearer {KEY}\r\n\r\n".encode())
        assert connection.recv(1 << 16).split()[1] == b"400"
    gateway.wait_for(lambda line: line["event"] == "library")
    assert KEY not in gateway.text


@pytest.mark.parametrize(
    "act", [{"act": "cut"}, {"act": "events"}], ids=["connection broken", "ended without DONE"]
)
def test_a_cut_stream_never_looks_complete(gateway: Gateway, act: dict[str, str]) -> None:
    chunks = hexed(b'data: {"choices": []}\n\n', b'data: {"choi')
    connection = gateway.open_raw(act | {"chunks": chunks, "stream": True})
    response = http.client.HTTPResponse(connection)
    response.begin()
    assert response.status == 200
    with connection, pytest.raises(http.client.IncompleteRead) as cut:
        response.read()
    # What is no whole event is not passed on.
    assert cut.value.partial.startswith(bytes.fromhex(chunks[0]) + b"\n\ndata: ")
    last = cut.value.partial.rstrip().rsplit(b"data: ", 1)[1]
    assert json.loads(last)["error"]["code"] == "stream_cut"


def test_official_client_raises_on_a_cut_stream(gateway: Gateway) -> None:
    stream = client(gateway).chat.completions.create(
        model=MODELS[0],
        messages=[],
        stream=True,
        extra_body={"act": "cut", "chunks": hexed(b'data: {"choices": []}\n\n')},
    )
    with pytest.raises(openai.APIError, match="engine broke off"):
        list(stream)


def test_a_cut_unary_answer_never_looks_complete(gateway: Gateway) -> None:
    with pytest.raises((http.client.IncompleteRead, ConnectionResetError)):
        gateway.ask({"act": "length_cut", "chunks": hexed(b"{")}, path="/v1/embeddings")
    length_cut = {"act": "length_cut", "content_type": "application/json", "chunks": hexed(b"{")}
    status, _, body = gateway.ask(length_cut)
    assert (status, json.loads(body)["error"]["code"]) == (502, "engine_failed")
    # Of HTTP/1.0 even a plain close would be a proper end.
    cut = {"act": "cut", "chunks": hexed(b"{"), "content_type": "application/json"}
    with gateway.open_raw(cut | {"content_type": "text/plain"}, "1.0") as connection:
        with pytest.raises(ConnectionResetError):
            while connection.recv(1 << 16):
                pass
    with gateway.open_raw(cut, "1.0") as connection:
        assert connection.recv(1 << 16).startswith(b"HTTP/1.0 502")


@pytest.mark.parametrize(
    ("act", "read"),
    [
        ({"act": "wait", "stream": True}, b""),
        ({"act": "headers_then_wait"}, b"\r\n\r\n"),
        ({"act": "headers_then_wait", "chunks": hexed(b"data: 1\n\n")}, b"data: 1"),
        ({"act": "wait"}, b""),
    ],
    ids=["before headers", "after headers", "mid-stream", "unary"],
)
def test_a_client_that_leaves_ends_the_engine_request(
    gateway: Gateway, upstream: Engine, act: dict[str, object], read: bytes
) -> None:
    name = "left-" + hashlib.sha256(repr(act).encode()).hexdigest()
    connection = gateway.open_raw(act, X_Request_Id=name)
    seen = upstream.next_seen()
    received = b""
    while read not in received:
        received += connection.recv(1 << 16)
    assert not seen.closed.is_set()
    connection.close()
    assert seen.closed.wait(PATIENCE_S)
    line = gateway.wait_for(lambda line: line.get("id") == name)
    assert line["status"] == 499


def test_health_tells_gateway_and_engine_apart(gateway: Gateway, upstream: Engine) -> None:
    assert gateway.ask(method="GET", path="/health", headers={})[::2] == (
        200,
        b'{"gateway": "ok", "engine": "ok", "deployment": "0123456789abcdef"}',
    )
    assert gateway.ask(method="GET", path="/ready", headers={})[0] == 200
    upstream.stop()
    try:
        status, _, body = gateway.ask(method="GET", path="/health", headers={})
        assert (status, json.loads(body)["engine"]) == (200, "away")
        status, _, body = gateway.ask(method="GET", path="/ready", headers={})
        assert (status, json.loads(body)["missing_models"]) == (503, MODELS)
    finally:
        upstream.start()


def test_one_line_a_request_without_key_prompt_or_answer(gateway: Gateway) -> None:
    gateway.ask(
        {"messages": [{"role": "user", "content": "secret prompt"}]},
        path="/v1/chat/completions?q=query",
        headers={"x-api-key": KEY, "X-Request-Id": "line-1"},
    )
    line = gateway.wait_for(lambda line: line.get("id") == "line-1")
    assert line.pop("duration_ms") >= line.pop("ttft_ms") >= line.pop("queue_ms") >= 0
    assert line == {
        "event": "request",
        "id": "line-1",
        "key": "alice",
        "method": "POST",
        "path": "/v1/chat/completions",
        "status": 200,
        "finish_reason": "stop",
    }
    for secret in (KEY, "secret prompt", "low tide", "query"):
        assert secret not in gateway.text


def test_cap_is_exact_under_a_burst(tmp_path: Path) -> None:
    with engine() as upstream, gateway_before(upstream.url, tmp_path) as gateway:
        with ThreadPoolExecutor(40) as pool:
            asked = [pool.submit(gateway.ask, {"act": "hold"}) for _ in range(40)]
            for _ in range(8):
                upstream.next_seen()
            # Listing models needs no slot.
            assert gateway.ask(method="GET", path="/v1/models")[0] == 200
            upstream.next_seen()
            assert upstream.seen.empty()
            upstream.release.set()
            assert [future.result()[0] for future in asked] == [200] * 40
        # The one more is the list of models.
        assert upstream.most_running <= 8 + 1
        assert upstream.seen.qsize() == 40 - 8


def test_slots_come_back_after_every_kind_of_end(tmp_path: Path) -> None:
    with (
        engine() as upstream,
        gateway_before(upstream.url, tmp_path, max_in_flight=1, hold_seconds=0.3) as gateway,
    ):
        for _ in range(2):
            with pytest.raises((http.client.IncompleteRead, ConnectionResetError)):
                gateway.ask({"act": "length_cut", "chunks": hexed(b"{")})
            with pytest.raises(http.client.IncompleteRead):
                gateway.ask({"act": "cut", "chunks": hexed(b"data: 1")})
            upstream.refusals = [(500, "broken kernel")]
            assert gateway.ask()[0] == 500
            while not upstream.seen.empty():
                upstream.seen.get()
            for act in ({"act": "wait"}, {"act": "headers_then_wait"}):
                holder = gateway.open_raw(act)
                seen = upstream.next_seen()
                # A second one gets no slot, and one that leaves the queue takes none with it.
                gateway.open_raw({"act": "wait"}).close()
                status, headers, body = gateway.ask()
                assert (status, json.loads(body)["error"]["code"]) == (503, "overloaded")
                assert int(headers["retry-after"]) > 0
                holder.close()
                assert seen.closed.wait(PATIENCE_S)
            upstream.stop()
            assert gateway.ask()[0] == 503
            upstream.start()
            assert gateway.ask()[0] == 200
        assert upstream.most_running == 1


def test_bodies_up_to_the_limit_pass_and_larger_ones_are_refused(tmp_path: Path) -> None:
    limit = 3 << 20
    with (
        engine() as upstream,
        gateway_before(upstream.url, tmp_path, max_body_bytes=limit) as gateway,
    ):
        fits = {"pad": "x" * (limit - len(json.dumps({"pad": ""})))}
        assert gateway.ask(fits)[0] == 200
        assert json.loads(upstream.next_seen().body) == fits
        status, _, body = gateway.ask({"pad": fits["pad"] + "x"})
        assert (status, json.loads(body)["error"]["code"]) == (413, "request_too_large")
        connection = gateway.connect()
        chunks = (b"x" * (1 << 20) for _ in range(4))
        connection.request(
            "POST", "/v1/completions", chunks, {"x-api-key": KEY}, encode_chunked=True
        )
        assert connection.getresponse().status == 413
        connection.close()
        assert upstream.seen.empty()


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_a_body_that_does_not_decompress_is_refused_in_the_right_shape(
    gateway: Gateway, encoding: str
) -> None:
    status, _, body = gateway.ask(
        headers={"x-api-key": KEY, "Content-Encoding": encoding}, body={"model": "x"}
    )
    assert status == 400
    assert json.loads(body)["error"]["type"] == "invalid_request_error"


def test_a_key_never_reaches_the_journal_as_a_request_id(gateway: Gateway) -> None:
    gateway.ask(method="GET", path="/v1/models", headers={"x-api-key": KEY, "X-Request-Id": KEY})
    gateway.ask(
        method="GET", path="/v1/models", headers={"x-api-key": KEY, "X-Request-Id": "after-key"}
    )
    gateway.wait_for(lambda line: line.get("id") == "after-key")
    assert KEY not in gateway.text
