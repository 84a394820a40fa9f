"""`ckpt` as it runs on a host: fetch, verify, census, status, and everything it refuses."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from lab import checkpoint as miniature

FILES = Path(__file__).resolve().parents[2] / "files"
FIRST_SHARD = "model-00001-of-00003.safetensors"
SHARD = "model-00003-of-00003.safetensors"
INDEX = "model.safetensors.index.json"
WAIT_S = 60.0
NOBODY = 65534


@dataclass
class Host:
    """A folder laid out as on a host: the tools, and a place for checkpoints."""

    tools: Path
    data: Path

    @property
    def root(self) -> Path:
        return self.data / "checkpoints"

    @property
    def link(self) -> Path:
        return self.data / "current"

    def command(self, *arguments: str | Path) -> list[str]:
        return [str(self.tools / "bin/ckpt"), *map(str, arguments)]

    def place(self, sha256: str) -> list[str]:
        return ["--root", str(self.root), "--link", str(self.link), "--manifest-sha256", sha256]

    def run(self, *arguments: str | Path, **how: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*arguments),
            capture_output=True,
            text=True,
            timeout=WAIT_S,
            check=False,
            **how,
        )

    def fetch(self, source: str | Path, sha256: str) -> subprocess.CompletedProcess[str]:
        return self.run("fetch", source, *self.place(sha256))

    def status(self, sha256: str) -> dict[str, Any]:
        done = self.run("status", *self.place(sha256))
        assert done.returncode == 0, done.stderr
        answer: dict[str, Any] = json.loads(done.stdout)
        return answer

    def folder(self, sha256: str) -> Path:
        return self.root / sha256[:16]


def lay_out_tools(folder: Path) -> Path:
    """The packages and the launcher merged into one folder, as the deploy lays them down."""
    shutil.copytree(FILES / "checkpoint/bin", folder / "bin")
    shutil.copytree(FILES / "checkpoint/checkpoint", folder / "checkpoint")
    shutil.copytree(FILES / "hostlib/hostlib", folder / "hostlib")
    return folder


def assert_refused(done: subprocess.CompletedProcess[str], code: int, *named: str | Path) -> None:
    """One line that names things, perhaps details below it, the exit code, no traceback."""
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    progress = ("fetching", "hashing", "laying out", "comparing")
    lines = [line for line in done.stderr.splitlines() if not line.startswith(progress)]
    assert lines[0].startswith("ckpt: ")
    for line in lines[1:]:
        assert line.startswith("  ")
    for name in named:
        assert str(name) in done.stderr


def assert_whole(folder: Path) -> None:
    """Every file is as the manifest says, by coreutils' word."""
    files = json.loads((folder / "manifest.json").read_text())["files"]
    lines = "".join(f"{entry['sha256']}  {name}\n" for name, entry in files.items())
    subprocess.run(["sha256sum", "--check", "--strict", "--quiet"], input=lines, text=True,
                   cwd=folder, check=True, timeout=WAIT_S)  # fmt: skip


def snapshot(folder: Path) -> dict[str, tuple[int, int, int]]:
    """Inode, size and change time of everything below `folder`."""
    return {
        str(path.relative_to(folder)): (
            path.lstat().st_ino,
            path.lstat().st_size,
            path.lstat().st_ctime_ns,
        )
        for path in sorted(folder.rglob("*"))
    }


def changed_source(
    source: miniature.CheckpointInfo, to: Path, change: Callable[[Path], object]
) -> tuple[Path, str]:
    """A copy of the miniature, changed, with a manifest that vouches for the change."""
    shutil.copytree(source.folder, to)
    change(to)
    path = to / "manifest.json"
    listed = json.loads(path.read_text())
    listed["files"] = {
        file.name: {
            "size": file.stat().st_size,
            "sha256": hashlib.sha256(file.read_bytes()).hexdigest(),
        }
        for file in sorted(to.iterdir())
        if file != path
    }
    return to, write_manifest(path, listed)


def write_manifest(path: Path, listed: object) -> str:
    path.write_text(json.dumps(listed))
    return hashlib.sha256(path.read_bytes()).hexdigest()


def edit_json(path: Path, change: Callable[[Any], object]) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def flip(path: Path) -> None:
    with path.open("r+b") as stream:
        stream.seek(-1, os.SEEK_END)
        last = stream.read(1)[0]
        stream.seek(-1, os.SEEK_END)
        stream.write(bytes([last ^ 1]))


class Server(ThreadingHTTPServer):
    """Serves one folder with byte ranges, as slowly as asked; remembers the offsets asked for."""

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.folder = folder
        self.pause_s = 0.0
        self.offsets: list[tuple[str, int]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        path = self.server.folder / self.path.lstrip("/")
        offset = int(self.headers.get("Range", "bytes=0-")[6:].rstrip("-"))
        self.server.offsets.append((path.name, offset))
        content = path.read_bytes()[offset:]
        self.send_response(206 if offset else 200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        try:
            for begin in range(0, len(content), 1 << 16):
                self.wfile.write(content[begin : begin + (1 << 16)])
                time.sleep(self.server.pause_s)
        except ConnectionError:
            pass

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server(source: miniature.CheckpointInfo) -> Iterator[Server]:
    with Server(source.folder) as running:
        threading.Thread(target=running.serve_forever, args=(0.02,), daemon=True).start()
        yield running
        running.shutdown()


def test_fetch_then_nothing_to_do(
    host: Host, server: Server, source: miniature.CheckpointInfo
) -> None:
    sha256 = source.manifest_sha256
    before = host.status(sha256)
    assert (before["installed"], before["link_ok"]) == (False, False)
    assert "no such folder" in before["reason"]
    assert not host.root.exists()

    done = host.fetch(server.url, sha256)
    assert done.returncode == 0, done.stderr
    assert "installed" in done.stdout
    assert_whole(host.folder(sha256))
    assert host.link.resolve() == host.folder(sha256)
    assert host.status(sha256) == {
        "path": str(host.folder(sha256)), "installed": True, "link_ok": True, "reason": "",
    }  # fmt: skip
    assert host.run("verify", host.link).returncode == 0
    assert {path.name for path in host.root.iterdir()} == {".lock", sha256[:16]}

    requests, laid_down = len(server.offsets), snapshot(host.folder(sha256))
    again = host.fetch(server.url, sha256)
    assert again.returncode == 0
    assert "unchanged" in again.stdout
    assert len(server.offsets) == requests
    assert snapshot(host.folder(sha256)) == laid_down

    host.link.unlink()
    assert host.status(sha256)["link_ok"] is False
    assert host.fetch(server.url, sha256).returncode == 0
    assert host.link.resolve() == host.folder(sha256)


@pytest.mark.parametrize("form", ["folder", "url"])
def test_fetch_from_a_folder(host: Host, source: miniature.CheckpointInfo, form: str) -> None:
    place = str(source.folder) if form == "folder" else source.folder.as_uri()
    assert host.fetch(place, source.manifest_sha256).returncode == 0
    assert_whole(host.folder(source.manifest_sha256))


def test_killed_fetch_is_resumed(
    host: Host, server: Server, source: miniature.CheckpointInfo
) -> None:
    sha256 = source.manifest_sha256
    largest = max(source.folder.glob("*.safetensors"), key=lambda path: path.stat().st_size)
    partial = host.root / f".staging-{sha256[:16]}" / f"{largest.name}.partial"
    server.pause_s = 0.02
    for wanted in (1 << 20, 3 << 20):
        running = subprocess.Popen(
            host.command("fetch", server.url, *host.place(sha256)),
            stderr=subprocess.DEVNULL,
        )
        deadline = time.monotonic() + WAIT_S
        while not partial.exists() or partial.stat().st_size < wanted:
            assert running.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.01)
        running.kill()
        running.wait(timeout=WAIT_S)
        assert not host.folder(sha256).exists()
        assert not host.link.exists()
    server.pause_s = 0.0
    done = host.fetch(server.url, sha256)
    assert done.returncode == 0, done.stderr
    assert_whole(host.folder(sha256))
    assert max(offset for name, offset in server.offsets if name == largest.name) >= 3 << 20
    assert not partial.parent.exists()


def test_damage_in_staging_is_fetched_again(host: Host, source: miniature.CheckpointInfo) -> None:
    staging = host.root / f".staging-{source.manifest_sha256[:16]}"
    staging.mkdir(parents=True)
    shutil.copy(source.folder / SHARD, staging)
    flip(staging / SHARD)
    (staging / "stranger.py").write_text("")
    (staging / f"{INDEX}.partial").write_text("{")
    assert host.fetch(source.folder, source.manifest_sha256).returncode == 0
    assert_whole(host.folder(source.manifest_sha256))
    assert not (host.folder(source.manifest_sha256) / "stranger.py").exists()


def test_two_at_once(host: Host, server: Server, source: miniature.CheckpointInfo) -> None:
    server.pause_s = 0.002
    command = host.command("fetch", server.url, *host.place(source.manifest_sha256))
    both = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        for _ in range(2)
    ]
    said = [running.communicate(timeout=WAIT_S)[0] for running in both]
    assert [running.returncode for running in both] == [0, 0]
    assert sorted(word for text in said for word in ("installed", "unchanged") if word in text) == [
        "installed",
        "unchanged",
    ]
    assert len(server.offsets) == len(list(source.folder.iterdir()))


def drop_tensor(folder: Path) -> None:
    """Leave a tensor out of the last shard and of the index, properly."""
    path = folder / SHARD
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    name = max((n for n in header if n != "__metadata__"), key=lambda n: header[n]["data_offsets"])
    begin, end = header.pop(name)["data_offsets"]
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :][:begin])

    def without(index: Any) -> None:
        del index["weight_map"][name]
        index["metadata"]["total_size"] -= end - begin

    edit_json(folder / INDEX, without)


def lose_shard(index: Any) -> None:
    name = next(iter(index["weight_map"]))
    index["weight_map"][name] = "model-00009-of-00003.safetensors"


def climb_out(index: Any) -> None:
    name = next(iter(index["weight_map"]))
    index["weight_map"][name] = "../model.safetensors"


WRONG_SOURCES: list[tuple[str, Callable[[Path], object], tuple[str, ...]]] = [
    ("missing shard", lambda f: edit_json(f / INDEX, lose_shard),
     ("model-00009-of-00003.safetensors", "missing")),
    ("index climbs out", lambda f: edit_json(f / INDEX, climb_out), (INDEX, "plain file name")),
    ("index on another shard", lambda f: edit_json(
        f / INDEX, lambda i: i["weight_map"].update({"lm_head.weight": FIRST_SHARD})),
     (INDEX, "1 tensors", "lm_head.weight")),
    ("total size", lambda f: edit_json(f / INDEX, lambda i: i["metadata"].update(total_size=1)),
     (INDEX, "total_size")),
    ("tensor left out", drop_tensor, ("config.json", "1 missing")),
    ("another size", lambda f: edit_json(
        f / "config.json", lambda c: c["text_config"].update(head_dim=32)), ("differing",)),
    ("cut shard", lambda f: os.truncate(f / SHARD, (f / SHARD).stat().st_size - 100),
     (SHARD, "cut off")),
    ("stray header", lambda f: (f / SHARD).write_bytes(b"\xff" * 100), (SHARD, "header of")),
    ("compressed-tensors", lambda f: edit_json(
        f / "config.json",
        lambda c: c["quantization_config"].update(quant_method="compressed-tensors")),
     ("config.json", "compressed-tensors")),
    ("index twice", lambda f: (f / INDEX).write_text('{"weight_map": {}, "weight_map": {}}'),
     (INDEX, "twice")),
]  # fmt: skip


@pytest.mark.parametrize(
    ("change", "named"), [row[1:] for row in WRONG_SOURCES], ids=[row[0] for row in WRONG_SOURCES]
)
def test_wrong_source_leaves_the_good_checkpoint_alone(
    host: Host,
    source: miniature.CheckpointInfo,
    tmp_path: Path,
    change: Callable[[Path], object],
    named: tuple[str, ...],
) -> None:
    assert host.fetch(source.folder, source.manifest_sha256).returncode == 0
    good = snapshot(host.folder(source.manifest_sha256))
    wrong, sha256 = changed_source(source, tmp_path / "wrong", change)
    assert_refused(host.fetch(wrong, sha256), 1, *named)
    assert not host.folder(sha256).exists()
    assert snapshot(host.folder(source.manifest_sha256)) == good
    assert host.status(source.manifest_sha256)["link_ok"] is True


def test_damaged_source_files(host: Host, source: miniature.CheckpointInfo, tmp_path: Path) -> None:
    """The manifest is right, a file behind it is not."""
    sha256 = source.manifest_sha256
    for change, code, named in (
        (flip, 1, "sha256 differs"),
        (lambda path: os.truncate(path, 1000), 1, "1000 bytes instead of"),
        (lambda path: path.open("ab").write(b"more"), 1, "bytes instead of"),
        (Path.unlink, 2, "cannot be fetched"),
    ):
        damaged = tmp_path / "damaged"
        shutil.copytree(source.folder, damaged)
        change(damaged / SHARD)
        assert_refused(host.fetch(damaged, sha256), code, SHARD, named)
        assert not host.folder(sha256).exists()
        assert not host.link.exists()
        shutil.rmtree(damaged)
    assert host.fetch(source.folder, sha256).returncode == 0


def test_a_source_of_pipes_is_refused(
    host: Host, source: miniature.CheckpointInfo, tmp_path: Path
) -> None:
    pipes, sha256 = tmp_path / "pipes", source.manifest_sha256
    for name in (SHARD, "manifest.json"):
        shutil.copytree(source.folder, pipes)
        (pipes / name).unlink()
        os.mkfifo(pipes / name)
        assert_refused(host.fetch(pipes, sha256), 2, pipes / name, "not a regular file")
        shutil.rmtree(pipes)
    assert not host.folder(sha256).exists()


def test_a_hostile_manifest_is_not_even_parsed(
    host: Host, source: miniature.CheckpointInfo, tmp_path: Path
) -> None:
    for text, named in (("[" * 100_000, "sha256 differs"), (" " * 5_000_000, "larger than")):
        (tmp_path / "manifest.json").write_text(text)
        done = host.fetch(tmp_path, source.manifest_sha256)
        assert_refused(done, 1, tmp_path / "manifest.json", named)


def test_wrong_manifest_digest(host: Host, source: miniature.CheckpointInfo) -> None:
    done = host.fetch(source.folder, "0" * 64)
    assert_refused(done, 1, "manifest.json", "0" * 64, source.manifest_sha256)
    assert list(host.root.iterdir()) == [host.root / ".lock"]
    assert_refused(host.fetch(source.folder, "abc"), 2, "--manifest-sha256")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda m: m["files"].update({"../x": {"size": 1, "sha256": "0" * 64}}), "'../x'"),
        (lambda m: m["files"].update({"/x": {"size": 1, "sha256": "0" * 64}}), "'/x'"),
        (lambda m: m["files"].update({".x": {"size": 1, "sha256": "0" * 64}}), "'.x'"),
        (lambda m: m["files"].update({"stamp.json": {"size": 1, "sha256": "0" * 64}}), "stamp"),
        (lambda m: m["files"][SHARD].update(size=-1), f"{SHARD}: size"),
        (lambda m: m["files"][SHARD].update(sha256="A" * 64), f"{SHARD}: sha256"),
        (lambda m: m["files"].pop(INDEX), INDEX),
        (lambda m: m.update(format=2), "format"),
        (lambda m: m.pop("census"), "census"),
        (lambda m: m["census"].update(tensors=1), "census"),
        (lambda m: m["provenance"].update(x=1), "provenance"),
    ],
)
def test_refuses_manifest(
    host: Host,
    source: miniature.CheckpointInfo,
    tmp_path: Path,
    change: Callable[[Any], object],
    named: str,
) -> None:
    wrong = tmp_path / "wrong"
    shutil.copytree(source.folder, wrong)
    edit_json(wrong / "manifest.json", change)
    sha256 = hashlib.sha256((wrong / "manifest.json").read_bytes()).hexdigest()
    assert_refused(host.fetch(wrong, sha256), 1, named)
    assert not host.folder(sha256).exists()


def test_a_folder_at_the_link_is_left_alone(host: Host, source: miniature.CheckpointInfo) -> None:
    host.link.mkdir()
    (host.link / "model.safetensors").write_text("by hand")
    before = snapshot(host.data)
    assert_refused(host.fetch(source.folder, source.manifest_sha256), 1, host.link, "move it away")
    assert snapshot(host.data) == before
    assert host.status(source.manifest_sha256)["link_ok"] is False


def test_no_space(host: Host, source: miniature.CheckpointInfo, tmp_path: Path) -> None:
    vast = tmp_path / "vast"
    shutil.copytree(source.folder, vast)
    edit_json(vast / "manifest.json", lambda m: m["files"][SHARD].update(size=10**18))
    sha256 = hashlib.sha256((vast / "manifest.json").read_bytes()).hexdigest()
    assert_refused(host.fetch(vast, sha256), 2, "needed", "free", host.root)
    assert not list(host.root.glob(".staging-*/*"))


def test_no_disk_and_no_source(host: Host, source: miniature.CheckpointInfo) -> None:
    sha256 = source.manifest_sha256
    assert_refused(host.fetch(host.data / "nothing", sha256), 2, "nothing/manifest.json")
    assert_refused(host.fetch("http://127.0.0.1:1", sha256), 2, "http://127.0.0.1:1/manifest.json")
    assert_refused(host.fetch("strange:/x y", sha256), 2, "strange:/x y")
    assert_refused(host.fetch("strange://x", sha256), 2, "strange://x")
    host.root.joinpath(".lock").unlink()
    host.root.rmdir()
    host.data.rmdir()
    assert_refused(host.fetch(source.folder, sha256), 2, host.data, "mount")
    assert not host.data.exists()


def test_no_permission(source: miniature.CheckpointInfo) -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        host = Host(lay_out_tools(Path(folder) / "tools"), Path(folder) / "data")
        host.data.mkdir(mode=0o555)
        who = {"user": NOBODY} if os.geteuid() == 0 else {}
        sha256 = source.manifest_sha256
        done = host.run("fetch", source.folder, *host.place(sha256), **who)
        assert_refused(done, 2, host.root, "Permission denied")
        assert not host.root.exists()


@pytest.fixture
def installed(host: Host, source: miniature.CheckpointInfo) -> Path:
    assert host.fetch(source.folder, source.manifest_sha256).returncode == 0
    return host.folder(source.manifest_sha256)


def test_verify_deep_finds_what_the_stamp_cannot(host: Host, installed: Path) -> None:
    path = installed / SHARD
    times = path.stat()
    flip(path)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert host.run("verify", installed).returncode == 0
    assert_refused(host.run("verify", "--deep", installed), 1, SHARD, "sha256 differs")


def test_verify_quick_sees_a_touched_file_and_deep_renews_the_stamp(
    host: Host, installed: Path, source: miniature.CheckpointInfo
) -> None:
    os.utime(installed / SHARD)
    assert_refused(host.run("verify", installed), 1, SHARD, "verify --deep")
    assert SHARD in host.status(source.manifest_sha256)["reason"]
    assert host.run("verify", "--deep", installed).returncode == 0
    assert host.run("verify", installed).returncode == 0
    assert host.status(source.manifest_sha256)["installed"] is True


@pytest.mark.parametrize("deep", [[], ["--deep"]], ids=["quick", "deep"])
def test_verify_refuses(host: Host, installed: Path, deep: list[str]) -> None:
    def refused(code: int, *named: str) -> None:
        assert_refused(host.run("verify", *deep, installed), code, *named)

    stranger = installed / "modeling.py"
    stranger.write_text("")
    refused(1, "modeling.py", "not in the manifest")
    stranger.unlink()

    os.truncate(installed / SHARD, 1000)
    refused(1, SHARD, "1000 bytes instead of")
    (installed / SHARD).unlink()
    refused(1, SHARD, "missing")
    (installed / SHARD).symlink_to("/etc/passwd")
    refused(1, SHARD, "not a regular file")
    (installed / "manifest.json").unlink()
    refused(1, "manifest.json", "missing")
    shutil.rmtree(installed)
    refused(2, "no such folder")


def test_census(host: Host, source: miniature.CheckpointInfo, tmp_path: Path) -> None:
    done = host.run("census", "--json", source.folder)
    assert done.returncode == 0
    said = json.loads(done.stdout)
    assert said["found"] == said["expected"]
    assert said["found"]["tensors"] == 157
    assert said["found"]["groups"]["input_scale"] == 26
    assert "157" in host.run("census", source.folder).stdout

    wrong, _ = changed_source(source, tmp_path / "wrong", drop_tensor)
    done = host.run("census", "--json", wrong)
    assert_refused(done, 1, "1 missing")
    said = json.loads(done.stdout)
    assert said["missing"]["count"] == 1
    assert said["missing"]["first"][0] in done.stderr
    assert_refused(host.run("census", tmp_path / "nothing"), 2, "no such folder")


def test_usage(host: Host) -> None:
    for arguments in ([], ["fetch"], ["strange"], ["verify"], ["status", "--roo", "x"]):
        done = host.run(*arguments)
        assert done.returncode == 2
        assert "Traceback" not in done.stderr
    assert host.run("--help").returncode == 0
