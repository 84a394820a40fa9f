"""The engine stand-in over HTTP, as the gateway, a bench and systemd meet it."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any

import openai
import pytest
from engine_standin.simulation import Engine, replay
from engine_standin.timing import load

from tests.unit.standin_support import NAMES, Standin, cards_used, standin, wait_until

HELD_MIB = 17613  # 17.2 GB at GMU 0.50
ENDLESS = {"prompt": "an essay", "max_tokens": 100_000, "ignore_eos": True, "stream": True}
HELLO = [{"role": "user", "content": "hello"}]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
                "required": ["city", "days"],
            },
        },
    }
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standin]:
    with standin(tmp_path_factory.mktemp("engine")) as running:
        yield running.ready()


@pytest.fixture(scope="module")
def client(server: Standin) -> openai.OpenAI:
    url = f"http://127.0.0.1:{server.port}/v1"
    return openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=20)


@pytest.fixture(scope="module", autouse=True)
def idle_connection(server: Standin) -> Iterator[HTTPConnection]:
    """A kept-alive connection that does nothing while the other tests run."""
    connection = server.open("/health")
    response = connection.getresponse()
    response.read()
    assert response.getheader("Connection") != "close"
    yield connection
    connection.close()


def idle(server: Standin) -> bool:
    gauges = ("vllm:num_requests_running", "vllm:num_requests_waiting")
    return all(server.metric(name) == 0 for name in gauges)


def first_event(response: HTTPResponse) -> bytes:
    return response.readline()


# Protocol


def test_three_names_and_one_in_the_answer(server: Standin, client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == NAMES
    for name in NAMES:
        answer = client.chat.completions.create(model=name, messages=HELLO)  # type: ignore[arg-type]
        assert answer.model == NAMES[0]
    assert server.ask("/health")[0] == 200


def test_thinking_is_kept_apart(client: openai.OpenAI) -> None:
    def ask(thinking: bool) -> Any:
        return client.chat.completions.create(
            model=NAMES[0],
            messages=HELLO,  # type: ignore[arg-type]
            extra_body={"chat_template_kwargs": {"enable_thinking": thinking}},
        ).choices[0]

    choice = ask(True)
    assert choice.finish_reason == "stop"
    assert choice.message.content.startswith("\n\n")
    assert choice.message.reasoning
    plain = ask(False)
    assert plain.message.reasoning is None
    assert not plain.message.content.startswith("\n")


def test_stream_says_the_same_with_several_tokens_an_event(client: openai.OpenAI) -> None:
    request: Any = {"model": NAMES[2], "messages": HELLO, "temperature": 0}
    whole = client.chat.completions.create(**request)
    chunks = list(
        client.chat.completions.create(
            **request, stream=True, stream_options={"include_usage": True}
        )
    )
    *events, last = chunks
    deltas: list[Any] = [chunk.choices[0].delta for chunk in events]
    message: Any = whole.choices[0].message
    assert "".join(d.content or "" for d in deltas) == message.content
    assert "".join(getattr(d, "reasoning", None) or "" for d in deltas) == message.reasoning
    assert [c.choices[0].finish_reason for c in events if c.choices[0].finish_reason] == ["stop"]
    assert last.choices == []
    assert last.usage == whole.usage
    assert whole.usage is not None
    # The trap: events are far fewer than tokens.
    assert len(events) < whole.usage.completion_tokens / 2


def test_completions_stop_at_max_tokens(client: openai.OpenAI) -> None:
    request: Any = {"model": NAMES[1], "prompt": "an essay on habit"}
    for limit in (1, 2, 17, 384):
        answer = client.completions.create(**request, max_tokens=limit)
        assert answer.usage is not None
        assert answer.usage.completion_tokens == limit
        assert answer.choices[0].finish_reason == "length"
        assert len(answer.choices[0].text.split()) == limit
    parts = list(client.completions.create(**request, max_tokens=384, stream=True))
    assert "".join(part.choices[0].text for part in parts) == answer.choices[0].text


def test_tool_call_streamed_and_not(client: openai.OpenAI) -> None:
    request: Any = {
        "model": NAMES[0],
        "messages": [{"role": "user", "content": "please call weather"}],
        "tools": TOOLS,
    }
    choice = client.chat.completions.create(**request).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content in (None, "\n\n")
    (call,) = choice.message.tool_calls or []
    assert call.type == "function"
    assert call.function.name == "weather"
    arguments = json.loads(call.function.arguments)
    assert isinstance(arguments["city"], str)
    assert isinstance(arguments["days"], int)
    with client.chat.completions.stream(**request) as stream:
        final: Any = stream.get_final_completion().choices[0]
    assert final.finish_reason == "tool_calls"
    assert json.loads(final.message.tool_calls[0].function.arguments) == arguments
    quiet = client.chat.completions.create(**request, tool_choice="none").choices[0]
    assert quiet.finish_reason == "stop"


def test_hermes_does_not_know_the_models_calls(tmp_path: Path) -> None:
    with standin(tmp_path, tool_call_parser="hermes") as server:
        server.ready()
        messages = [{"role": "user", "content": "call weather"}]
        body = {"messages": messages, "tools": TOOLS}
        status, answer = server.ask("/v1/chat/completions", body)
    assert status == 200
    message = answer["choices"][0]["message"]
    assert message["tool_calls"] == []
    assert "<function=weather>" in message["content"]


@pytest.mark.parametrize(
    ("path", "body", "status", "parts"),
    [
        ("/v1/chat/completions", b"{", 400, ["JSON"]),
        ("/v1/chat/completions", b"[]", 400, ["JSON"]),
        ("/v1/chat/completions", b"\xff\xfe", 400, ["JSON"]),
        ("/v1/chat/completions", {}, 400, ["messages"]),
        ("/v1/chat/completions", {"messages": ["hello"]}, 400, ["message"]),
        ("/v1/chat/completions", {"messages": HELLO, "max_tokens": 0}, 400, ["0"]),
        ("/v1/chat/completions", {"messages": HELLO, "tools": [1]}, 400, ["tools"]),
        ("/v1/completions", {"prompt": {}}, 400, ["prompt"]),
        ("/v1/completions", {"prompt": "a " * 135200}, 400, ["135168", "135200"]),
        ("/v1/completions", {"prompt": "a", "max_tokens": 135168}, 400, ["135168", "1 input"]),
        ("/v1/completions", {"prompt": "a", "model": "gpt"}, 404, ["gpt"]),
        ("/v1/completions", {"prompt": "a", "model": "gpt", "stream": True}, 404, ["gpt"]),
    ],
)
def test_refusals(server: Standin, path: str, body: object, status: int, parts: list[str]) -> None:
    got, answer = server.ask(path, body)
    assert got == status
    assert answer["error"]["code"] == status
    assert all(part in answer["error"]["message"] for part in parts)


def test_unknown_path_and_method(server: Standin) -> None:
    assert server.ask("/v2/models") == (404, {"detail": "Not Found"})
    assert server.ask("/v1/completions") == (405, {"detail": "Method Not Allowed"})


def test_request_id_is_kept(server: Standin) -> None:
    connection = server.open("/health")
    connection.getresponse().read()
    body = json.dumps({"messages": HELLO, "max_tokens": 1})
    connection.request("POST", "/v1/chat/completions", body, {"X-Request-Id": "abc"})
    assert json.loads(connection.getresponse().read())["id"] == "chatcmpl-abc"
    connection.close()


# Scheduling and counting


def test_eight_on_two_slots_and_the_counters(server: Standin) -> None:
    wait_until(lambda: idle(server), "idle")
    domains = {"essay": "an essay", "code": "python code", "prose": "a story", "chinese": "山水"}
    requests = [*domains.items()] * 2
    names = {
        "drafts": "vllm:spec_decode_num_drafts_total",
        "accepted": "vllm:spec_decode_num_accepted_tokens_total",
        "positions": "vllm:spec_decode_num_accepted_tokens_per_pos_total",
        "generated": "vllm:generation_tokens_total",
    }
    before = {key: server.metric(name) for key, name in names.items()}
    busiest = 0.0

    def ask(prompt: str) -> int:
        body = {"prompt": prompt, "max_tokens": 256}
        return int(server.ask("/v1/completions", body)[1]["usage"]["completion_tokens"])

    with ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(ask, prompt) for _, prompt in requests]
        while not all(answer.done() for answer in answers):
            busiest = max(busiest, server.metric("vllm:num_requests_running"))
    assert [answer.result() for answer in answers] == [256] * 8
    assert busiest == 2
    fresh = {key: server.metric(name) - before[key] for key, name in names.items()}
    truth = Engine(load(), 7, 2)
    replay(truth, [(20, 256, domain) for domain, _ in requests])
    assert fresh["generated"] == 8 * 256
    assert fresh["drafts"] == truth.counters.drafts
    assert fresh["accepted"] == fresh["positions"] == truth.counters.accepted_tokens
    lengths = [load().length(7, domain) for domain in domains]
    expected = 4 / sum(1 / length for length in lengths)  # equal tokens each: the harmonic mean
    assert 1 + fresh["accepted"] / fresh["drafts"] == pytest.approx(expected, rel=0.03)


def test_queued_request_has_its_headers_and_leaves_on_close(server: Standin) -> None:
    wait_until(lambda: idle(server), "idle")
    running = [server.open("/v1/completions", ENDLESS) for _ in range(2)]
    responses = [connection.getresponse() for connection in running]
    assert all(first_event(response).startswith(b"data: ") for response in responses)
    queued = server.open("/v1/completions", ENDLESS)
    response = queued.getresponse()
    assert response.status == 200
    assert response.getheader("Content-Type", "").startswith("text/event-stream")
    assert server.metric("vllm:num_requests_waiting") == 1
    assert 0 < server.metric("vllm:kv_cache_usage_perc") < 1
    running.pop().close()
    responses.pop().close()
    assert first_event(response).startswith(b"data: ")  # scheduled as soon as one has left
    assert server.metric("vllm:num_requests_running") == 2
    for connection, answer in zip([*running, queued], [*responses, response], strict=True):
        connection.close()
        answer.close()
    wait_until(lambda: idle(server), "all aborted")
    assert server.metric("vllm:request_success_total", finished_reason="abort") >= 3


def test_unary_client_that_leaves_is_aborted(server: Standin) -> None:
    wait_until(lambda: idle(server), "idle")
    connection = server.open("/v1/completions", ENDLESS | {"stream": False})
    wait_until(lambda: server.metric("vllm:num_requests_running") == 1, "running")
    connection.close()
    wait_until(lambda: idle(server), "aborted")


def test_cache_config(server: Standin) -> None:
    pool = {"kv_cache_size_tokens": "351436", "cache_dtype": "auto"}
    assert server.metric("vllm:cache_config_info", **pool) == 1


def test_idle_connection_is_closed(idle_connection: HTTPConnection) -> None:
    assert idle_connection.sock.recv(1) == b""


# Life and death


def test_port_is_refused_until_ready_and_memory_is_held(tmp_path: Path) -> None:
    with standin(tmp_path, scale=0.5) as server:
        wait_until(lambda: len(server.children()) == 5, "engine core and four workers")
        assert not server.listening()
        assert "Application startup complete" not in server.log
        server.ready()
        assert server.cards_used() == [HELD_MIB] * 4
        assert len(server.children()) == 5
        server.process.send_signal(signal.SIGTERM)
        assert server.wait() == 0
        assert server.children() == []
        assert server.cards_used() == [0] * 4


def test_second_server_may_share_the_port(tmp_path: Path) -> None:
    with standin(tmp_path / "a") as first:
        first.ready()
        with standin(tmp_path / "b", port=first.port) as second:
            wait_until(lambda: "Application startup complete" in second.log, "second is up")
            assert first.process.poll() is None


def test_port_of_a_server_that_does_not_share(tmp_path: Path) -> None:
    with socket.socket() as stranger:
        stranger.bind(("127.0.0.1", 0))
        stranger.listen()
        with standin(tmp_path, port=stranger.getsockname()[1]) as server:
            assert server.wait() == 1
            assert "Address already in use" in server.err_path.read_text()
            assert server.children() == []


def test_sigterm_with_a_deadline_drains(tmp_path: Path) -> None:
    with standin(tmp_path, shutdown_timeout="20", scale=0.2) as server:
        server.ready()
        body = {"prompt": "an essay", "max_tokens": 256, "stream": True}
        connection = server.open("/v1/completions", body)
        response = connection.getresponse()
        first_event(response)
        server.process.send_signal(signal.SIGTERM)

        def refused() -> bool:
            status, answer = server.ask("/v1/chat/completions", {"messages": HELLO})
            message = "cannot schedule new futures after shutdown"
            return status == 500 and answer["error"]["message"] == message

        wait_until(refused, "new requests refused")
        assert server.ask("/health")[0] == 200
        assert len(server.children()) == 5
        assert response.read().endswith(b"data: [DONE]\n\n")
        connection.close()
        assert server.wait() == 0
        assert server.children() == []
        assert server.cards_used() == [0] * 4


def test_sigterm_without_a_deadline_leaves_the_stream_silent(tmp_path: Path) -> None:
    with standin(tmp_path) as server:
        server.ready()
        connection = server.open("/v1/completions", ENDLESS)
        response = connection.getresponse()
        first_event(response)
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: not server.children(), "engine gone")
        wait_until(lambda: not server.listening(), "port closed")
        server.process.send_signal(signal.SIGTERM)  # does nothing
        connection.sock.settimeout(0.5)
        with pytest.raises(TimeoutError):  # open and silent, once what was sent has been read
            while connection.sock.recv(65536):
                pass
        assert server.process.poll() is None
        response.close()
        connection.close()
        assert server.wait() == 0


def test_dead_worker_ends_streams_with_an_error_and_exit_0(tmp_path: Path) -> None:
    with standin(tmp_path, scale=0.3) as server:
        server.ready()
        connection = server.open("/v1/completions", ENDLESS)
        response = connection.getresponse()
        first_event(response)
        worker = int(server.log.partition("Worker_TP2 pid=")[2].partition(")")[0])
        os.kill(worker, signal.SIGKILL)
        *_, error, done = [line for line in response.read().split(b"\n\n") if line]
        assert json.loads(error.strip().removeprefix(b"data: "))["error"]["code"] == 500
        assert done == b"data: [DONE]"
        assert server.ask("/health")[0] == 503
        assert server.wait() == 0
        assert server.children() == []


def test_killed_server_leaves_workers_that_hold_memory(tmp_path: Path) -> None:
    with standin(tmp_path) as server:
        server.ready()
        server.process.kill()
        server.process.wait(timeout=20)
        assert not server.listening()
        time.sleep(1.0)  # longer than the core takes to notice
        assert len(server.children()) == 5
        assert server.cards_used() == [HELD_MIB] * 4
    assert cards_used(tmp_path / "gpu") == [0] * 4  # entries of dead processes do not count


# Faults asked for


def test_unknown_fault_is_refused(tmp_path: Path) -> None:
    with standin(tmp_path, faults="fail-gate-12") as server:
        assert server.wait() == 1
        message = server.err_path.read_text()
    assert "fail-gate-12" in message
    assert message.count("\n") == 1


def test_faults_from_a_file(tmp_path: Path) -> None:
    wanted = tmp_path / "faults.json"
    with standin(tmp_path, faults=str(wanted)) as server:
        server.ready()  # no file, no fault
    wanted.write_text('["exit-after-boot"]')
    with standin(tmp_path, faults=str(wanted)) as server:
        assert server.wait() == 0
        assert "Maximum concurrency" in server.log
        assert server.cards_used() == [0] * 4


def test_never_listens(tmp_path: Path) -> None:
    with standin(tmp_path, faults="never-listen") as server:
        server.booted()
        time.sleep(0.5)
        assert not server.listening()
        assert server.process.poll() is None
        server.process.send_signal(signal.SIGTERM)
        assert server.wait() == 0


def test_dies_in_warmup(tmp_path: Path) -> None:
    with standin(tmp_path, faults="die-in-warmup") as server:
        server.ready()
        assert server.ask("/v1/chat/completions", {"messages": HELLO})[0] == 500
        assert server.wait() == 0


def test_hangs_on_sigterm(tmp_path: Path) -> None:
    with standin(tmp_path, faults="hang-on-sigterm") as server:
        server.ready()
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.5)
        assert server.ask("/health")[0] == 200


def test_worker_left_behind(tmp_path: Path) -> None:
    with standin(tmp_path, faults="orphan-worker") as server:
        server.ready()
        server.process.send_signal(signal.SIGTERM)
        assert server.wait() == 0
        assert len(server.children()) == 1
        assert server.cards_used() == [0, 0, 0, HELD_MIB]
