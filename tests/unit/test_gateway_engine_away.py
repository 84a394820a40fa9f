"""An engine that is away, comes back, or breaks off: what is tried again and what is not."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from fable_gateway.patience import LONGEST_PAUSE_S, Patience, pause_seconds
from hypothesis import given, settings
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
    """An engine that gives `answers` answers a connection, then closes it without a word."""

    def __init__(self, answers: int, answer: bytes) -> None:
        self._answers = answers
        self._answer = answer
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
                connection.sendall(self._answer)


@contextmanager
def closer(answers: int, answer: bytes = ANSWER) -> Iterator[Closer]:
    invented = Closer(answers, answer)
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


def test_while_the_engine_is_away_one_request_tries_and_then_all_go(tmp_path: Path) -> None:
    with engine() as upstream, gateway_before(upstream.url, tmp_path) as gateway:
        upstream.refusals, upstream.refusal_s = [(503, "loading")] * 12, 0.2
        with ThreadPoolExecutor(8) as pool:
            asked = [pool.submit(gateway.ask, {"n": number}) for number in range(8)]
            assert [one.result(PATIENCE_S)[0] for one in asked] == [200] * 8
        # Whoever was on the way when the news came is refused, too; after that, one at a time.
        assert upstream.at_refusal[8:] == [1] * 4
        assert upstream.seen.qsize() == 12 + 8
        gateway.stop()
        lines = [line for line in gateway.lines if line["event"] == "request"]
        assert sum(line.get("retries", 0) for line in lines) == 12


def test_who_tries_for_all_and_leaves_hands_the_turn_on() -> None:
    async def run() -> None:
        patience = Patience()
        patience.away(trying=False)
        far = asyncio.get_running_loop().time() + 60
        first = asyncio.create_task(patience.turn(far))
        second = asyncio.create_task(patience.turn(far))
        await asyncio.sleep(0)
        first.cancel()
        assert await second is True
        third = asyncio.create_task(patience.turn(far))
        await asyncio.sleep(0)
        assert not third.done()
        patience.back()
        assert await third is False

    asyncio.run(run())


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(["away", "back", "gone", "arrive"]), max_size=20))
def test_never_two_try_at_once(steps: list[str]) -> None:
    async def run() -> None:
        patience = Patience()
        patience.away(trying=False)
        far = asyncio.get_running_loop().time() + 600
        waiting: set[asyncio.Task[bool]] = set()
        trying: asyncio.Task[bool] | None = None

        for step in [*steps, "back"]:
            if step == "arrive" or not waiting:
                waiting.add(asyncio.create_task(patience.turn(far)))
            if patience.is_away and trying is None:
                done, waiting = await asyncio.wait(waiting, return_when="FIRST_COMPLETED")
                assert len(done) == 1
                trying = done.pop()
                assert trying.result() is True
            await asyncio.sleep(0)
            if trying is None:
                continue
            assert not any(task.done() for task in waiting)
            if step == "away":
                patience.away(trying=True)
            elif step == "back":
                patience.back()
            elif step == "gone":
                patience.gone(trying=True)
            if step != "arrive":
                trying = None
        if waiting:
            results = await asyncio.gather(*waiting)
            assert results == [False] * len(results)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fable_gateway.patience.FIRST_PAUSE_S", 0.001)
        patch.setattr("fable_gateway.patience.LONGEST_PAUSE_S", 0.002)
        asyncio.run(run())


def test_an_engine_that_says_later_than_the_hold_is_believed_at_once(tmp_path: Path) -> None:
    answer = b"HTTP/1.1 503 No\r\nRetry-After: 600\r\nContent-Length: 0\r\n\r\n"
    with closer(1, answer) as upstream, gateway_before(upstream.url, tmp_path) as gateway:
        status, headers, _ = gateway.ask()
        assert (status, headers["retry-after"]) == (503, "600")
        assert upstream.requests == 1


def test_a_slow_answer_does_not_keep_the_others_waiting(tmp_path: Path) -> None:
    """The one that tries may generate for minutes before its answer begins."""
    with engine() as upstream, gateway_before(upstream.url, tmp_path) as gateway:
        upstream.refusals = [(503, "loading")] * 2
        with ThreadPoolExecutor(2) as pool:
            slow = pool.submit(gateway.ask, {"act": "hold"})
            gateway_saw = [upstream.next_seen() for _ in range(3)]
            assert len(gateway_saw) == 3
            assert pool.submit(gateway.ask, {"n": 1}).result(PATIENCE_S)[0] == 200
            assert not slow.done()
            upstream.release.set()
            assert slow.result(PATIENCE_S)[0] == 200
