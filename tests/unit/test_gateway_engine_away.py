"""An engine that is away, comes back, or breaks off: what is tried again and what is not."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from fable_gateway.patience import LONGEST_PAUSE_S, pause_seconds
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.gateway_support import PATIENCE_S, engine, gateway_before

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"


def test_a_request_waits_for_an_engine_that_refuses_connections(tmp_path: Path) -> None:
    with engine() as upstream, gateway_before(upstream.url, tmp_path) as gateway:
        upstream.stop()
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(gateway.ask, {"model": "fable-27b"})
            # The engine stays away until the request must have met it.
            with pytest.raises(TimeoutError):
                asked.result(0.5)
            upstream.start()
            status, _, body = asked.result(PATIENCE_S)
        assert (status, json.loads(body)["model"]) == (200, "fable-27b")
        assert upstream.seen.qsize() == 1


@pytest.mark.parametrize(
    "refusal",
    [(503, "loading"), (500, '{"message": "cannot schedule new futures after shutdown"}')],
    ids=["503", "shutting down"],
)
def test_a_request_waits_for_an_engine_that_declines(
    tmp_path: Path, refusal: tuple[int, str]
) -> None:
    with engine() as upstream, gateway_before(upstream.url, tmp_path) as gateway:
        upstream.refusals = [refusal, refusal]
        assert gateway.ask({"n": 1})[0] == 200
        bodies = [upstream.next_seen().body for _ in range(3)]
        assert bodies == [b'{"n": 1}'] * 3


@pytest.mark.parametrize("stopped", [True, False])
def test_beyond_the_hold_it_is_503_with_retry_after(tmp_path: Path, stopped: bool) -> None:
    with engine() as upstream, gateway_before(upstream.url, tmp_path, hold_seconds=0.3) as gateway:
        upstream.refusals = [(503, "")] * 1000
        if stopped:
            upstream.stop()
        status, headers, body = gateway.ask()
        assert status == 503
        assert int(headers["retry-after"]) > 0
        error = json.loads(body)["error"]
        assert (error["type"], error["code"]) == ("server_error", "engine_away")


class Closer:
    """An engine that answers `answers` requests a connection, then closes it without a word."""

    def __init__(self, answers: int) -> None:
        self._answers = answers
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.requests = 0
        self.connections = 0
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(PATIENCE_S)

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            threading.Thread(target=self._talk, args=(connection,), daemon=True).start()

    def _talk(self, connection: socket.socket) -> None:
        with connection, connection.makefile("rb") as stream:
            answered = 0
            while True:
                length = 0
                while (line := stream.readline()).strip():
                    if line.lower().startswith(b"content-length:"):
                        length = int(line.split(b":")[1])
                if not line:
                    return
                stream.read(length)
                self.requests += 1
                if answered == self._answers:
                    return
                answered += 1
                connection.sendall(ANSWER)


@contextmanager
def closer(answers: int) -> Iterator[Closer]:
    invented = Closer(answers)
    try:
        yield invented
    finally:
        invented.close()


def test_a_reused_connection_that_closes_is_tried_once_more(tmp_path: Path) -> None:
    with closer(answers=1) as upstream, gateway_before(upstream.url, tmp_path) as gateway:
        assert gateway.ask()[0] == 200
        assert (upstream.requests, upstream.connections) == (1, 1)
        assert gateway.ask()[0] == 200
        assert (upstream.requests, upstream.connections) == (3, 2)


def test_a_new_connection_that_closes_is_not_tried_again(tmp_path: Path) -> None:
    with closer(answers=0) as upstream, gateway_before(upstream.url, tmp_path) as gateway:
        status, _, body = gateway.ask()
        assert (status, json.loads(body)["error"]["code"]) == (502, "engine_failed")
        assert upstream.requests == 1


@given(st.integers(0, 10_000), st.floats(0, 1, exclude_max=True))
def test_pauses_are_never_nothing_and_never_long(attempt: int, chance: float) -> None:
    assert 0.05 <= pause_seconds(attempt, chance) <= LONGEST_PAUSE_S
