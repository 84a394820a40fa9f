"""The gateway at its edges: broken, slow and hostile connections, and what it says of itself."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import resource
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from fable_gateway import protocol

from tests.unit.gateway_support import (
    KEY,
    OTHER_KEY,
    PATIENCE_S,
    Engine,
    Gateway,
    digest,
    engine,
    gateway_before,
)

JSON_TYPE = "application/json; charset=utf-8"


def gauges(gateway: Gateway) -> dict[str, float]:
    """Name → value of every sample of /metrics."""
    _, _, body = gateway.ask(method="GET", path="/metrics", headers={})
    samples = re.findall(r"^(fable_gateway_\S+) (\S+)$", body.decode(), re.MULTILINE)
    return {name: float(value) for name, value in samples}


def wait_until_idle(gateway: Gateway) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while gauges(gateway)["fable_gateway_active"]:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def raw(gateway: Gateway, sent: bytes) -> tuple[int, dict[str, str], bytes, bytes]:
    """Status, headers, body of the answer to `sent`, and what comes until the connection ends."""
    with socket.create_connection(("127.0.0.1", gateway.port), PATIENCE_S) as connection:
        connection.sendall(sent)
        response = http.client.HTTPResponse(connection)
        response.begin()
        headers = {name.lower(): value for name, value in response.getheaders()}
        body = response.read()
        rest = b""
        if headers.get("connection") == "close":
            while chunk := connection.recv(1 << 16):
                rest += chunk
        return response.status, headers, body, rest


AUTH = f"Authorization: Bearer {KEY}"
SMUGGLED = "GET /v1/smuggled HTTP/1.1\r\nHost: x\r\n" + AUTH + "\r\n\r\n"
SMUGGLING = {
    "length and chunks": ["Content-Length: 5", "Transfer-Encoding: chunked"],
    "chunks and length": ["Transfer-Encoding: chunked", "Content-Length: 5"],
    "two lengths": ["Content-Length: 5", "Content-Length: 6"],
    "a list of lengths": ["Content-Length: 5, 6"],
    "a signed length": ["Content-Length: +5"],
    "a hex length": ["Content-Length: 0x5"],
    "chunked not last": ["Transfer-Encoding: chunked, gzip"],
    "chunked twice": ["Transfer-Encoding: chunked", "Transfer-Encoding: chunked"],
    "chunked misspelt": ["Transfer-Encoding: xchunked"],
    "blank before the colon": ["Transfer-Encoding : chunked"],
    "folded": ["X-Folded: a", " Transfer-Encoding: chunked"],
    "bare line feed": ["X-Bare: a\nTransfer-Encoding: chunked"],
    "null in a value": ["X-Null: a\0b"],
}


@pytest.mark.parametrize("framing", SMUGGLING.values(), ids=SMUGGLING)
def test_ambiguous_framing_is_refused_and_nothing_after_it_is_served(
    gateway: Gateway, upstream: Engine, framing: list[str]
) -> None:
    lines = ["POST /v1/completions HTTP/1.1", "Host: x", AUTH, *framing, "", ""]
    sent = "\r\n".join(lines) + "0\r\n\r\n" + SMUGGLED
    status, headers, body, rest = raw(gateway, sent.encode())
    assert (status, headers["content-type"], rest) == (400, JSON_TYPE, b"")
    assert json.loads(body)["error"]["code"] == "bad_request"
    assert KEY not in body.decode()
    assert upstream.seen.empty()


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET /v1/models HTTP/9.9\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"y" * 20_000 + b"\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n" + AUTH.encode()
        + b"\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n",
    ],
    ids=["TLS", "version", "long header", "bad chunk"],
)  # fmt: skip
def test_what_is_no_request_gets_the_openai_error_shape(gateway: Gateway, sent: bytes) -> None:
    status, headers, body, _ = raw(gateway, sent)
    assert (status, headers["content-type"]) == (400, JSON_TYPE)
    assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}


def test_a_body_is_asked_for_only_after_its_key(gateway: Gateway) -> None:
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nExpect: 100-continue\r\n"
    )
    with socket.create_connection(("127.0.0.1", gateway.port), PATIENCE_S) as connection:
        connection.sendall(f"{head}Authorization: Bearer wrong\r\n\r\n".encode())
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 401 ")
    with socket.create_connection(("127.0.0.1", gateway.port), PATIENCE_S) as connection:
        connection.sendall(f"{head}{AUTH}\r\n\r\n".encode())
        assert connection.recv(1 << 16) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(b"{}")
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200 ")


def test_where_a_client_says_it_comes_from_stays_here(gateway: Gateway, upstream: Engine) -> None:
    said = {"X-Forwarded-For": "1.2.3.4", "Forwarded": "for=1.2.3.4", "X-Real-IP": "1.2.3.4"}
    secrets = {"Cookie": "c=1", "Proxy-Authorization": "Basic x", "x-api-key": KEY}
    assert gateway.ask(headers=said | secrets)[0] == 200
    names = {name.lower() for name, _ in upstream.next_seen().headers}
    assert not names & {name.lower() for name in said | secrets}


def test_half_a_connection_is_gone_for_the_engine_too(gateway: Gateway, upstream: Engine) -> None:
    with gateway.open_raw({"act": "wait"}) as connection:
        seen = upstream.next_seen()
        connection.shutdown(socket.SHUT_WR)
        assert seen.closed.wait(PATIENCE_S)
    wait_until_idle(gateway)


def test_idle_connections_cost_nobody_anything(gateway: Gateway) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(8192, hard), hard))
    resource.prlimit(gateway.process.pid, resource.RLIMIT_NOFILE, (min(8192, hard), hard))
    idle = []
    try:
        for _ in range(2000):
            idle.append(socket.create_connection(("127.0.0.1", gateway.port), PATIENCE_S))
        assert gateway.ask()[0] == 200
    finally:
        for connection in idle:
            connection.close()
    assert gateway.ask()[0] == 200


def test_a_connection_without_a_request_ends_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock of 30 s, made short: on the protocol itself, in this process."""
    import asyncio

    from aiohttp import web

    monkeypatch.setattr(protocol, "HEADERS_S", 0.2)

    async def run() -> None:
        runner = web.AppRunner(web.Application())
        await runner.setup()
        assert runner.server
        server, loop = runner.server, asyncio.get_running_loop()
        listener = await loop.create_server(lambda: protocol.Protocol(server, loop), "127.0.0.1", 0)
        port = listener.sockets[0].getsockname()[1]
        for sent in (b"", b"GET / HTTP/1.1\r\nX-Slow: "):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(sent)
            assert await asyncio.wait_for(reader.read(), PATIENCE_S) == b""
            writer.close()
        listener.close()
        await runner.cleanup()

    asyncio.run(run())


def test_the_kernel_ends_connections_that_nobody_reads() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        protocol.prepare(listener)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 300)
        with socket.create_connection(listener.getsockname()) as client:
            accepted, _ = listener.accept()
            with accepted:
                assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 300
                assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
                accepted.settimeout(PATIENCE_S)
                with pytest.raises(OSError, match="timed out"):
                    while True:
                        accepted.sendall(b"x" * (1 << 20))
                assert client.fileno() > 0


def memory_mib(gateway: Gateway) -> float:
    """Largest resident memory that the process ever had, by the kernel's count."""
    status = Path(f"/proc/{gateway.process.pid}/status").read_text()
    found = re.search(r"^VmHWM:\s+(\d+) kB$", status, re.MULTILINE)
    assert found
    return int(found[1]) / 1024


def test_unfinished_bodies_share_a_budget(tmp_path: Path) -> None:
    size, budget = 24 << 20, 56 << 20
    limits: dict[str, Any] = {"max_body_bytes": size, "max_buffered_bytes": budget}
    with (
        engine() as upstream,
        gateway_before(upstream.url, tmp_path, hold_seconds=1, **limits) as gateway,
    ):
        before = memory_mib(gateway)
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: x\r\n{AUTH}\r\nContent-Length: {size}\r\n\r\n"
        )
        senders = [socket.create_connection(("127.0.0.1", gateway.port)) for _ in range(8)]

        def send(connection: socket.socket) -> None:
            connection.settimeout(PATIENCE_S)
            # The gateway may refuse it meanwhile.
            with contextlib.suppress(OSError):
                connection.sendall(head.encode() + b" " * (size - 1))

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(send, senders))
            # Small bodies pass all the while.
            assert gateway.ask()[0] == 200
            assert gauges(gateway)["fable_gateway_body_bytes_free"] < size
            assert memory_mib(gateway) - before < 1.5 * budget / (1 << 20)
        for connection in senders:
            connection.close()
        wait_until_idle(gateway)
        assert gauges(gateway)["fable_gateway_body_bytes_free"] == budget
        assert gateway.ask({"pad": "x" * (size - 100)})[0] == 200
        # Once the answer has begun, its request's body is forgotten.
        stream = gateway.open_raw({"act": "headers_then_wait", "pad": "x" * (size - 200)})
        with stream:
            assert stream.recv(100).startswith(b"HTTP/1.1 200")
            assert gauges(gateway)["fable_gateway_body_bytes_free"] == budget
            assert gauges(gateway)["fable_gateway_in_flight"] == 1


def test_a_full_queue_is_429_and_keys_share_the_slots(tmp_path: Path) -> None:
    keys = {"alice": digest(KEY), "bob": digest(OTHER_KEY) | {"max_in_flight": 1}}
    bob = {"x-api-key": OTHER_KEY}
    with (
        engine() as upstream,
        gateway_before(upstream.url, tmp_path, keys=keys, max_in_flight=2, max_queued=2) as gateway,
        ThreadPoolExecutor(8) as pool,
    ):
        hold = {"act": "hold"}
        running = [pool.submit(gateway.ask, hold, headers=bob) for _ in range(2)]
        upstream.next_seen()
        # Bob's second waits for his first, and not for a slot: Alice gets that.
        running.append(pool.submit(gateway.ask, hold))
        upstream.next_seen()
        assert gauges(gateway)["fable_gateway_in_flight"] == 2
        running.append(pool.submit(gateway.ask, hold))
        while gauges(gateway)["fable_gateway_queued"] < 2:
            pass
        status, headers, body = gateway.ask(hold)
        assert (status, json.loads(body)["error"]["code"]) == (429, "queue_full")
        assert int(headers["retry-after"]) > 0
        upstream.release.set()
        assert [one.result()[0] for one in running] == [200] * 4
        assert upstream.most_running == 2


def test_a_drain_serves_who_is_connected_and_sends_them_on(tmp_path: Path) -> None:
    with engine() as upstream, gateway_before(upstream.url, tmp_path) as gateway:
        waiting = gateway.open_raw({"act": "hold"})
        upstream.next_seen()
        silent = [gateway.connect() for _ in range(2)]
        for connection in silent:
            connection.connect()
        silent[1].request("GET", "/health")
        silent[1].getresponse().read()
        gateway.process.terminate()
        line = gateway.wait_for(lambda line: line["event"] == "stopping")
        assert line["in_flight_beside_next"] == 1
        for connection in silent:
            connection.request("GET", "/ready")
            answer = connection.getresponse()
            assert (answer.status, answer.getheader("Connection")) == (503, "close")
            assert json.loads(answer.read())["draining"] is True
        upstream.release.set()
        response = http.client.HTTPResponse(waiting)
        response.begin()
        assert (response.status, response.getheader("Connection")) == (200, "close")
        assert response.read()
        waiting.close()
        assert gateway.process.wait(PATIENCE_S) == 0


def test_metrics_and_journal_count_what_the_engine_counts(tmp_path: Path) -> None:
    usage = {"prompt_tokens": 7, "completion_tokens": 11, "total_tokens": 18}
    choice = {"index": 0, "delta": {"content": "hi"}, "finish_reason": "length"}
    events = [{"choices": [choice]}, {"choices": [], "usage": usage}]
    chunks = [f"data: {json.dumps(event)}\n\n".encode().hex() for event in events]
    chunks.append(b"data: [DONE]\n\n".hex())
    with engine() as upstream, gateway_before(upstream.url, tmp_path) as gateway:
        asked = {"act": "events", "stream": True, "model": "fable-27b", "chunks": chunks}
        status, _, body = gateway.ask(asked, headers={"x-api-key": KEY, "X-Request-Id": "one"})
        assert (status, b"usage" in body) == (200, False)
        assert json.loads(upstream.next_seen().body)["stream_options"] == {"include_usage": True}
        asked["stream_options"] = {"include_usage": True}
        assert b'"usage"' in gateway.ask(asked)[2]
        line = gateway.wait_for(lambda line: line.get("id") == "one")
        found = {name: line[name] for name in ("model", "prompt_tokens", "completion_tokens")}
        assert found == {"model": "fable-27b", "prompt_tokens": 7, "completion_tokens": 11}
        assert line["finish_reason"] == "length"
        gateway.ask({"model": "a secret prompt"}, headers={"x-api-key": KEY, "X-Request-Id": "two"})
        assert gateway.wait_for(lambda line: line.get("id") == "two")["model"] == "unknown"
        gateway.ask(headers={})
        samples = gauges(gateway)
        assert samples['fable_gateway_tokens_total{key="alice",kind="completion"}'] == 22
        assert samples['fable_gateway_requests_total{key="alice",status="200"}'] == 3
        assert samples['fable_gateway_requests_total{key="none",status="401"}'] == 1
        assert samples["fable_gateway_in_flight"] == 0
        assert "secret" not in gateway.text


def test_a_soak_with_restarts_of_the_engine_and_reloads_loses_no_request(tmp_path: Path) -> None:
    keys = {"alice": digest(KEY)}
    with engine() as upstream, gateway_before(upstream.url, tmp_path, keys=keys) as gateway:
        stop = threading.Event()

        def ask(number: int) -> list[tuple[int, bool]]:
            ends = []
            while not stop.is_set():
                try:
                    status, _, body = gateway.ask({"stream": number % 2 == 0})
                    named = status == 200 or bool(json.loads(body)["error"]["message"])
                except http.client.IncompleteRead as cut:
                    status, named = 0, b"stream_cut" in cut.partial
                ends.append((status, named))
            return ends

        with ThreadPoolExecutor(12) as pool:
            running = [pool.submit(ask, number) for number in range(12)]
            for number in range(4):
                time.sleep(0.2)
                upstream.stop()
                upstream.start()
                gateway.reload(json.dumps(keys | {f"more{number}": digest(f"more{number}")}))
            stop.set()
            ends = [end for one in running for end in one.result(PATIENCE_S)]
        assert len(ends) > 50
        assert all(named for _, named in ends)
        assert {status for status, _ in ends} <= {0, 200, 502}
        assert upstream.most_running <= 8
        wait_until_idle(gateway)
        assert gauges(gateway)["fable_gateway_in_flight"] == 0
