"""`ckpt fetch` from everywhere: another host over ssh, the hub's layout, a manifest from the lock.

ssh is a stand-in on PATH: it notes its arguments and gives the command to a real shell, as the
other host's sshd does. Real sshd: tests/lab.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from checkpoint.source import as_source
from hostlib import ssh
from hostlib.errors import HostError
from hypothesis import given
from hypothesis import strategies as st

from lab import checkpoint as miniature
from lab.checkpoint import Pair
from tests.unit.checkpoint_support import small_pair
from tests.unit.test_checkpoint_fetch import (
    SHARD,
    Host,
    assert_refused,
    assert_whole,
    flip,
)

COMMIT = "554ebba9b5f1b79dc11246341960360e6ef05ef4"
HUB = "https://huggingface.co/org/name"
STANDIN_SSH = """\
#!/bin/sh
# A stand-in for ssh: what a real one sends to the other host's shell is run by this one.
printf '%s\\n' "$*" >>"$SSH_LOG"
for word; do command=$word; done
if [ -e "$SSH_LOG.refuse" ]; then echo 'Host key verification failed.' >&2; exit 255; fi
if [ -e "$SSH_LOG.cut" ]; then sh -c "$command" | head -c 3000000; exit 255; fi
exec sh -c "$command"
"""


@pytest.fixture
def ssh_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the stand-in notes what it was called with."""
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "ssh").write_text(STANDIN_SSH)
    (programs / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("SSH_LOG", str(tmp_path / "ssh.log"))
    return tmp_path / "ssh.log"


def test_over_ssh_nobody_is_asked_and_an_unknown_host_is_refused(
    host: Host, source: miniature.CheckpointInfo, ssh_log: Path
) -> None:
    sha256 = source.manifest_sha256
    done = host.fetch(f"ssh://mavis@v100:2222{source.folder}", sha256)
    assert done.returncode == 0, done.stderr
    assert_whole(host.folder(sha256))
    calls = ssh_log.read_text().splitlines()
    assert len(calls) == len(list(source.folder.iterdir()))
    for call in calls:
        assert "-o BatchMode=yes" in call
        assert "-o StrictHostKeyChecking=yes" in call
        assert " -p 2222 -l mavis -- v100 tail -c +1 -- " in call


def test_over_ssh_a_cut_file_is_resumed(
    host: Host, source: miniature.CheckpointInfo, ssh_log: Path
) -> None:
    cut = Path(f"{ssh_log}.cut")
    cut.touch()
    sha256 = source.manifest_sha256
    done = host.fetch(f"ssh://v100{source.folder}", sha256)
    assert_refused(done, 2, "cannot be fetched", "manifest.json")
    (host.data / "manifest.json").write_bytes((source.folder / "manifest.json").read_bytes())
    listed: list[str | Path] = ["--manifest", host.data / "manifest.json"]
    timer = threading.Timer(2, cut.unlink)  # three of each file's attempts
    timer.start()
    done = host.run("fetch", f"ssh://v100{source.folder}", *listed, *host.place(sha256))
    timer.join()
    assert done.returncode == 0, done.stderr
    assert_whole(host.folder(sha256))
    assert re.search(r"tail -c \+[1-9]\d{6} ", ssh_log.read_text())


def test_over_ssh_the_reason_is_told(
    host: Host, source: miniature.CheckpointInfo, ssh_log: Path
) -> None:
    done = host.fetch(f"ssh://v100{source.folder}/nothing", source.manifest_sha256)
    assert_refused(done, 2, "ssh://v100", "nothing/manifest.json", "No such file")
    Path(f"{ssh_log}.refuse").touch()
    done = host.fetch(f"ssh://v100{source.folder}", source.manifest_sha256)
    assert_refused(done, 2, "ssh://v100", "Host key verification failed")


NAMES = st.text(
    st.characters(blacklist_categories=["Cs"], blacklist_characters="\0\r\n"), max_size=40
)


@given(NAMES)
def test_no_path_is_more_than_a_path_to_the_other_hosts_shell(name: str) -> None:
    """What the shell makes of the last argument is tail's argv with that very path."""
    words = ssh.command(f"ssh://v100/{name}", 0)
    seen = subprocess.run(
        ["sh", "-c", f"tail() {{ printf '%s\\0' \"$@\"; }}; {words[-1]}"],
        capture_output=True, check=True, timeout=20,
    ).stdout  # fmt: skip
    assert seen.split(b"\0")[:-1] == [b"-c", b"+1", b"--", f"/{name}".encode()]


@pytest.mark.parametrize("address", [
    "ssh://-oProxyCommand=x/path", "ssh://v100", "ssh://v100relative", "ssh://a b/path",
    "ssh://$(reboot)@v100/path", "ssh://v100:99999999/path", "v100:/mnt/data",
])  # fmt: skip
def test_no_address_is_an_option_or_a_command(host: Host, address: str) -> None:
    assert_refused(host.fetch(address, "0" * 64), 2, "ssh://[user@]host")


@pytest.mark.parametrize("address", [
    f"{HUB}/resolve/main", f"{HUB}/resolve/v1.0", f"{HUB}/resolve/{COMMIT[:12]}",
    f"{HUB}/resolve/refs%2Fpr%2F1", f"{HUB}/resolve/", HUB, f"{HUB}/tree/{COMMIT}",
    f"{HUB}/blob/main", f"http://127.0.0.1:1/mirror/resolve/{COMMIT.upper()}",
    HUB.replace("//", "//www."), HUB.replace(".co/", ".co./"),
])  # fmt: skip
def test_what_may_move_is_refused_before_anything_is_asked(host: Host, address: str) -> None:
    assert_refused(host.fetch(address, "0" * 64), 1, address, "resolve", "40 hex digits")
    assert not host.root.exists()


@pytest.mark.parametrize("climb", ["..", "%2e%2e", ".%2E"])
def test_no_address_climbs_from_a_commit_to_a_branch(host: Host, climb: str) -> None:
    address = f"{HUB}/resolve/{COMMIT}/{climb}/main"
    assert_refused(host.fetch(address, "0" * 64), 2, address, "without ..")


def test_an_address_with_a_secret_or_a_query_is_refused(host: Host) -> None:
    for address in ("https://me:secret@host/x", "https://host/x?download=1", "https://host/x#y"):
        assert_refused(host.fetch(address, "0" * 64), 2, "leave out")


@given(st.text(max_size=60))
def test_any_text_is_a_source_or_refused_in_one_line(text: str) -> None:
    try:
        as_source(text)
    except HostError as error:
        assert error.message.isprintable()


class Hub(ThreadingHTTPServer):
    """A stand-in for the hub: sends each file of `folder` on to another address."""

    daemon_threads = True
    folder: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/org/name/resolve/{COMMIT}"


class HubHandler(BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self) -> None:
        if "/resolve/" in self.path:
            self.send_response(302)
            self.send_header("Location", f"/store/{self.path.rsplit('/', maxsplit=1)[1]}")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        path = self.server.folder / self.path.removeprefix("/store/")
        if not path.exists():
            self.send_error(404)
            return
        offset = int((self.headers.get("Range") or "bytes=0-")[6:-1])
        content = path.read_bytes()[offset:]
        self.send_response(206 if offset else 200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub(("127.0.0.1", 0), HubHandler) as running:
        threading.Thread(target=running.serve_forever, args=(0.02,), daemon=True).start()
        yield running
        running.shutdown()


def test_a_parent_from_the_hub_by_the_locks_manifest(host: Host, hub: Hub, tmp_path: Path) -> None:
    """A trunk: the hub has no manifest of it, and it gets no link."""
    pair: Pair = small_pair(tmp_path / "pair")
    hub.folder = pair.trunk
    adopted = tmp_path / "copy"
    shutil.copytree(pair.trunk, adopted)
    assert host.run("adopt", adopted).returncode == 0
    listed = adopted / "manifest.json"
    digest = subprocess.run(["sha256sum", listed], capture_output=True, text=True, check=True)
    sha256 = digest.stdout.split()[0]
    place: list[str | Path] = ["--root", host.root, "--manifest-sha256", sha256]
    assert_refused(host.run("fetch", hub.url, *place), 2, "manifest.json", "404")
    done = host.run("fetch", hub.url, *place, "--manifest", listed)
    assert done.returncode == 0, done.stderr
    assert_whole(host.folder(sha256))
    assert not host.link.exists()
    said: dict[str, Any] = json.loads(host.run("status", *place).stdout)
    assert (said["installed"], said["link_ok"]) == (True, True)

    listed.write_text(listed.read_text() + " ")
    done = host.run("fetch", hub.url, *place, "--manifest", listed)
    assert_refused(done, 1, listed, "sha256 differs", sha256)


def test_after_a_failed_deep_verify_the_next_fetch_brings_what_is_damaged(
    host: Host, source: miniature.CheckpointInfo
) -> None:
    sha256 = source.manifest_sha256
    assert host.fetch(source.folder, sha256).returncode == 0
    folder = host.folder(sha256)
    before = {path.name: path.stat().st_ino for path in folder.iterdir()}
    with (folder / SHARD).open("rb") as served:
        old = served.read()
        flip(folder / SHARD)
        assert_refused(host.run("verify", "--deep", folder), 1, SHARD)
        assert host.status(sha256)["installed"] is False
        assert host.fetch(source.folder, sha256).returncode == 0
        served.seek(0)
        assert served.read() != old  # who has the damaged file open keeps it, and nothing else
    assert_whole(folder)
    assert host.status(sha256)["installed"] is True
    after = {path.name: path.stat().st_ino for path in folder.iterdir()}
    fetched = {name for name in after if after[name] != before.get(name)}
    assert fetched == {SHARD, "manifest.json", "stamp.json"}
    assert {path.name for path in host.root.iterdir()} == {".lock", sha256[:16]}


def test_what_is_not_the_checkpoints_is_not_lost(
    host: Host, source: miniature.CheckpointInfo
) -> None:
    sha256 = source.manifest_sha256
    assert host.fetch(source.folder, sha256).returncode == 0
    notes = host.folder(sha256) / "notes.txt"
    notes.write_text("by hand")
    assert host.status(sha256)["installed"] is False
    assert_refused(host.fetch(source.folder, sha256), 1, "notes.txt", "move it out")
    assert notes.read_text() == "by hand"
