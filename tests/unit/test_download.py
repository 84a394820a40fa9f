"""Fetching: resumed, tried again, never trusted; against a server that misbehaves on order."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import http.server
import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hostlib import download
from hostlib.errors import HostError, run_main
from hostlib.progress import Progress

CONTENT = os.urandom(5_000_000)
SHA256 = hashlib.sha256(CONTENT).hexdigest()
Answer = Callable[["Handler", int], None]


class Server(http.server.ThreadingHTTPServer):
    """Answers each request by the next of `answers`, the last one for ever; notes the ranges."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.content = CONTENT
        self.answers: list[Answer] = [whole]
        self.ranges: list[str | None] = []
        self.over = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/file"


class Handler(http.server.BaseHTTPRequestHandler):
    """One request."""

    server: Server

    def do_GET(self) -> None:
        self.server.ranges.append(self.headers.get("Range"))
        answer = self.server.answers[0]
        if len(self.server.answers) > 1:
            self.server.answers.pop(0)
        answer(self, int((self.headers.get("Range") or "bytes=0-")[6:-1]))

    def send(self, code: int, length: int, content: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Length", str(length))
        self.end_headers()
        with contextlib.suppress(ConnectionError):  # a client that has what it wanted
            self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        pass


def cut_after(count: int | None) -> Answer:
    def answer(request: Handler, start: int) -> None:
        rest = request.server.content[start:]
        request.send(206 if start else 200, len(rest), rest[:count])

    return answer


whole = cut_after(None)


def no_ranges(request: Handler, start: int) -> None:
    request.send(200, len(request.server.content), request.server.content)


def status(code: int) -> Answer:
    return lambda request, start: request.send(code, 0, b"")


def dripping(request: Handler, start: int) -> None:
    """A byte now and then: never silent for long, never done."""
    request.send(206 if start else 200, len(request.server.content) - start, b"")
    with contextlib.suppress(ConnectionError):
        while not request.server.over.wait(0.02):
            request.wfile.write(b"x")
            request.wfile.flush()


def silent(request: Handler, start: int) -> None:
    request.server.over.wait(60)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(download, "BACKOFF_S", 0.001)
    with Server() as found:
        thread = threading.Thread(target=found.serve_forever, args=(0.01,))
        thread.start()
        yield found
        found.over.set()
        found.shutdown()
        thread.join()


def fetch(server: Server, target: Path) -> int:
    """Fetch; the bytes that the progress counted."""
    progress = Progress("test", len(CONTENT))
    download.fetch(server.url, target, SHA256, len(CONTENT), progress)
    told = subprocess.run(["sha256sum", target], capture_output=True, text=True, check=True).stdout
    assert told.split()[0] == SHA256
    assert list(target.parent.iterdir()) == [target]
    return progress.done_bytes


def test_a_transfer_that_breaks_goes_on_where_it_was(server: Server, tmp_path: Path) -> None:
    server.answers = [cut_after(1_500_000), cut_after(2_000_000), whole]
    assert fetch(server, tmp_path / "file") == len(CONTENT)
    assert server.ranges == [None, "bytes=1500000-", "bytes=3500000-"]


def test_many_breaks_are_borne_as_long_as_each_brings_something(
    server: Server, tmp_path: Path
) -> None:
    server.answers = [cut_after(1 << 20)]  # an attempt's worth and no more, for ever
    server.content = CONTENT * 3
    target, sha256 = tmp_path / "file", hashlib.sha256(server.content).hexdigest()
    download.fetch(server.url, target, sha256, len(server.content))
    assert len(server.ranges) > download.ATTEMPTS
    assert target.read_bytes() == server.content


def test_a_partial_file_of_an_earlier_run_is_resumed(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file.partial").write_bytes(CONTENT[:4_000_000])
    assert fetch(server, tmp_path / "file") == len(CONTENT)
    assert server.ranges == ["bytes=4000000-"]


@pytest.mark.parametrize("form", [str, Path.as_uri])
def test_a_file_of_this_host_is_resumed_too(tmp_path: Path, form: Callable[[Path], str]) -> None:
    source, target = tmp_path / "a file", tmp_path / "target"
    source.write_bytes(CONTENT)
    target.with_name("target.partial").write_bytes(CONTENT[:-5])
    source.write_bytes(bytes(len(CONTENT) - 5) + CONTENT[-5:])  # what is not read does not count
    download.fetch(form(source), target, SHA256, len(CONTENT))
    assert target.read_bytes() == CONTENT


def test_a_whole_partial_file_needs_no_server(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file.partial").write_bytes(CONTENT)
    assert fetch(server, tmp_path / "file") == len(CONTENT)
    assert server.ranges == []


@pytest.mark.parametrize("size", [4_000_000, len(CONTENT), len(CONTENT) + 1])
def test_a_damaged_partial_file_is_fetched_anew(server: Server, tmp_path: Path, size: int) -> None:
    (tmp_path / "file.partial").write_bytes(bytes(size))
    assert fetch(server, tmp_path / "file") == len(CONTENT)
    assert server.ranges[-1] is None


def test_a_server_without_ranges_sends_it_all_again(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file.partial").write_bytes(CONTENT[:4_000_000])
    server.answers = [no_ranges]
    assert fetch(server, tmp_path / "file") == len(CONTENT)
    assert server.ranges == ["bytes=4000000-"]


@pytest.mark.parametrize("code", [500, 503, 429, 408])
def test_a_busy_server_is_asked_again(server: Server, tmp_path: Path, code: int) -> None:
    server.answers = [status(code), status(code), whole]
    assert fetch(server, tmp_path / "file") == len(CONTENT)
    assert len(server.ranges) == 3


@pytest.mark.parametrize(("code", "requests"), [(404, 1), (403, 1), (503, download.ATTEMPTS)])
def test_what_cannot_be_had_is_given_up(
    server: Server, tmp_path: Path, code: int, requests: int
) -> None:
    server.answers = [status(code)]
    with pytest.raises(HostError, match="cannot be fetched") as refused:
        download.fetch(server.url, tmp_path / "file", SHA256, len(CONTENT))
    assert refused.value.exit_code == 2
    assert len(server.ranges) == requests
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("size", "words"), [(len(CONTENT), "sha256 differs"), (len(CONTENT) - 1, "bytes instead of")]
)
def test_another_file_than_the_locked_one_is_refused(
    server: Server, tmp_path: Path, size: int, words: str
) -> None:
    (tmp_path / "file.partial").write_bytes(CONTENT[:1000])
    with pytest.raises(HostError, match=words):
        download.fetch(server.url, tmp_path / "file", "0" * 64, size)
    assert list(tmp_path.iterdir()) == []


def test_the_tail_is_read_alone_or_not_at_all(server: Server, tmp_path: Path) -> None:
    size = len(CONTENT)
    assert download.read_tail(server.url, size, 100) == CONTENT[-100:]
    assert server.ranges == [f"bytes={size - 100}-"]
    server.answers = [no_ranges]
    assert download.read_tail(server.url, size, 100) is None
    (tmp_path / "file").write_bytes(CONTENT)
    assert download.read_tail(str(tmp_path / "file"), size, 100) == CONTENT[-100:]
    assert download.read_tail((tmp_path / "file").as_uri(), 50, 100) == CONTENT[:100]
    assert download.read_tail(str(tmp_path / "nothing"), size, 100) is None


@pytest.mark.parametrize("answer", [dripping, silent])
def test_a_server_that_stalls_is_given_up(
    server: Server, tmp_path: Path, answer: Answer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, "TIMEOUT_S", 0.1)
    server.answers = [answer]
    with pytest.raises(HostError, match="cannot be fetched") as refused:
        download.fetch(server.url, tmp_path / "file", SHA256, len(CONTENT))
    assert refused.value.exit_code == 2
    assert len(server.ranges) == download.ATTEMPTS
    with pytest.raises(HostError, match="cannot be fetched"):
        download.read_bytes(server.url)
    assert download.read_tail(server.url, len(CONTENT), 100) is None


def test_a_source_that_is_wrong_and_breaks_off_is_refused_in_the_end(
    server: Server, tmp_path: Path
) -> None:
    server.answers = [cut_after(3_000_000)]
    with pytest.raises(HostError, match="sha256 differs"):
        download.fetch(server.url, tmp_path / "file", "0" * 64, len(CONTENT))
    assert server.ranges == [None, "bytes=3000000-"] * 2
    assert list(tmp_path.iterdir()) == []


def test_what_is_lost_and_comes_again_is_no_gain(server: Server, tmp_path: Path) -> None:
    """A server without ranges that breaks off now early, now late: it would never end."""

    def again(request: Handler, start: int) -> None:
        late = len(request.server.ranges) % 2
        request.send(200, len(CONTENT), CONTENT[: 3_000_000 if late else 1_500_000])

    server.answers = [again]
    with pytest.raises(HostError, match="cut off after"):
        download.fetch(server.url, tmp_path / "file", SHA256, len(CONTENT))
    assert len(server.ranges) == download.ATTEMPTS


def test_a_small_file_is_tried_again_too(server: Server) -> None:
    server.answers = [status(503), cut_after(1000), whole]
    assert download.read_bytes(server.url) == CONTENT
    assert len(server.ranges) == 3
    with pytest.raises(HostError, match="larger than 1000 bytes"):
        download.read_bytes(server.url, 1000)


def test_a_full_disk_is_not_blamed_on_the_network(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file.partial").symlink_to("/dev/full")
    with pytest.raises(HostError, match=r"file\.partial: No space left.*; free space there"):
        download.fetch(server.url, tmp_path / "file", SHA256, len(CONTENT))


def test_an_error_of_many_lines_is_told_in_one(server: Server, tmp_path: Path) -> None:
    def around(request: Handler, start: int) -> None:
        request.send_response(302)
        request.send_header("Location", request.path)
        request.send_header("Content-Length", "0")
        request.end_headers()

    server.answers = [around]
    with pytest.raises(HostError, match="infinite loop") as refused:
        download.read_bytes(server.url)
    assert "\n" not in refused.value.message


@pytest.mark.parametrize(
    ("number", "way_out"), [(errno.ENOSPC, "free space"), (errno.EROFS, "make it writable")]
)
def test_a_disks_refusal_names_the_way_out(
    number: int, way_out: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def main() -> int:
        raise OSError(number, os.strerror(number), "/place")

    assert run_main("program", main) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"program: /place: {os.strerror(number)}; {way_out}")
    assert said.count("\n") == 1
