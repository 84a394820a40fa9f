"""The checkpoint's role and lock: what the host is asked to run, carried out on this machine."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from checkpoint.manifest import parse
from hostlib.errors import HostError

from lab.checkpoint import Family, build_family
from stack import hub, locks
from stack.artifacts import CheckpointArtifacts, CheckpointTree
from stack.managed import Owner
from stack.places import EnginePlaces
from stack.release import render_release
from stack.roles import checkpoint as role
from stack.settings import EngineHost
from tests.unit.test_checkpoint_fetch import assert_whole, lay_out_tools
from tests.unit.test_settings import load

COMMIT = "554ebba9b5f1b79dc11246341960360e6ef05ef4"


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Family:
    return build_family(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def locked(family: Family) -> CheckpointArtifacts:
    return CheckpointArtifacts(
        **{
            name: CheckpointTree(source=str(folder), manifest=str(folder / "manifest.json"))
            for name, folder in asdict(family).items()
        }
    )


def settings_at(root: Path, how: str) -> EngineHost:
    settings: EngineHost = load(
        "v100",
        storage__mount=str(root),
        storage__root=str(root),
        toolkit__link=str(root / "cuda"),
        checkpoint__link=str(root / "model"),
        checkpoint__source=how,
    )
    return settings


def carry_out(settings: EngineHost, locked: CheckpointArtifacts) -> list[str]:
    """What the deploy lays down and runs; the last command's output."""
    root = Path(settings.storage.root)
    if not (root / "tools").exists():
        lay_out_tools(root / "tools")
        (root / "tools/specs").mkdir()
    for entry in role.manifest_files(settings, locked, Owner("me", "me")):
        Path(entry.path).write_bytes(entry.content)
    said = []
    for command in role.commands(settings, locked):
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        said.append(done.stdout)
    return said


@pytest.mark.parametrize("how", ["fetch", "assemble"])
def test_either_way_ends_in_the_same_checkpoint(
    tmp_path: Path, how: str, family: Family, locked: CheckpointArtifacts
) -> None:
    settings = settings_at(tmp_path, how)
    carry_out(settings, locked)
    folder = Path(role.resolved_path(EnginePlaces(settings.storage), locked.whole))
    assert (tmp_path / "model").resolve() == folder
    assert (folder / "manifest.json").read_bytes() == (family.whole / "manifest.json").read_bytes()
    assert_whole(folder)
    trees = {path.name for path in (tmp_path / "checkpoints").iterdir() if path.name[0] != "."}
    assert len(trees) == (1 if how == "fetch" else 3)
    inodes = [path.stat().st_ino for path in sorted(folder.iterdir())]
    again = carry_out(settings, locked)
    assert all("unchanged" in text for text in again[:2])
    assert [path.stat().st_ino for path in sorted(folder.iterdir())] == inodes


def test_what_stands_needs_no_source(tmp_path: Path, locked: CheckpointArtifacts) -> None:
    settings = settings_at(tmp_path, "fetch")
    bare = locked.whole.model_copy(update={"source": None})
    nowhere = locked.model_copy(update={"whole": bare})
    with pytest.raises(AssertionError, match="no source is known"):
        carry_out(settings, nowhere)
    carry_out(settings, locked)
    assert "unchanged" in carry_out(settings, nowhere)[0]


def test_another_manifest_is_another_release(
    tmp_path: Path, family: Family, locked: CheckpointArtifacts
) -> None:
    settings = settings_at(tmp_path, "fetch")
    changed = tmp_path / "changed.json"
    text = (family.whole / "manifest.json").read_text()
    changed.write_text(text.replace('"origin": "assembled"', '"origin": "elsewhere"'))
    other = locked.whole.model_copy(update={"manifest": str(changed)})
    names = {
        render_release(
            settings, venv="/v", toolkit="/t",
            checkpoint=role.resolved_path(EnginePlaces(settings.storage), tree),
        )["name"]
        for tree in (locked.whole, other)
    }  # fmt: skip
    assert len(names) == 2


class Hub(ThreadingHTTPServer):
    """A stand-in for the hub: its list of a commit's files, and the files."""

    folder: Path
    lies: dict[str, dict[str, Any]]

    @property
    def source(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/org/name/resolve/{COMMIT}"


class HubHandler(BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self) -> None:
        if self.path == f"/api/models/org/name/tree/{COMMIT}?recursive=true":
            content = json.dumps([self._entry(path) for path in self.server.folder.rglob("*")])
            self._send(content.encode())
        elif self.path.endswith(".safetensors"):
            self.send_error(500)  # no shard is read for its digest
        else:
            self._send((self.server.folder / self.path.rsplit("/", maxsplit=1)[1]).read_bytes())

    def _entry(self, path: Path) -> dict[str, Any]:
        name = str(path.relative_to(self.server.folder))
        if path.is_dir():
            return {"type": "directory", "oid": "0" * 40, "size": 0, "path": name}
        git = subprocess.run(["git", "hash-object", "--no-filters", path], capture_output=True,
                             text=True, check=True)  # fmt: skip
        size = path.stat().st_size
        entry = {"type": "file", "oid": git.stdout.strip(), "size": size, "path": name}
        if path.suffix == ".safetensors":
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            entry["lfs"] = {"oid": digest, "size": size, "pointerSize": 134}
        return entry | self.server.lies.get(name, {})

    def _send(self, content: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def published(family: Family, tmp_path: Path) -> Iterator[Hub]:
    """The base as its repository has it, with what people and machines need besides."""
    folder = tmp_path / "published"
    shutil.copytree(family.base, folder)
    for name in ("manifest.json", "stamp.json"):
        (folder / name).unlink()
    (folder / "README.md").write_text("# for people")
    (folder / ".gitattributes").write_text("*.safetensors filter=lfs")
    (folder / "modeling.py").write_text("code")
    (folder / "extra").mkdir()
    (folder / "extra/config.json").write_text("{}")
    with Hub(("127.0.0.1", 0), HubHandler) as running:
        running.folder, running.lies = folder, {}
        threading.Thread(target=running.serve_forever, args=(0.02,), daemon=True).start()
        yield running
        running.shutdown()


def test_the_hubs_list_gives_the_manifest_of_a_commit(published: Hub, family: Family) -> None:
    listed = parse(hub.manifest_at(published.source), "it")
    adopted = parse((family.base / "manifest.json").read_bytes(), "it")
    assert (listed.files, listed.census) == (adopted.files, adopted.census)
    assert listed.provenance["revision"] == COMMIT


def test_a_hub_that_is_not_consistent_is_refused(published: Hub) -> None:
    published.lies["config.json"] = {"oid": "0" * 40}
    with pytest.raises(HostError, match=r"config\.json: is not the blob"):
        hub.manifest_at(published.source)
    lie: object
    for lie in ({}, {"oid": "0" * 64}, [], {"oid": 1, "size": "x"}):
        published.lies = {"model-00001-of-00003.safetensors": {"lfs": lie}}
        with pytest.raises(HostError, match=r"is no list of files|model-00001"):
            hub.manifest_at(published.source)
    published.lies["config.json"] = {"path": 1}
    with pytest.raises(HostError, match="is no list of files"):
        hub.manifest_at(published.source)
    published.lies = {}
    (published.folder / "config.json").unlink()
    with pytest.raises(HostError, match=r"config\.json"):
        hub.manifest_at(published.source)
    with pytest.raises(HostError, match="40 hex digits"):
        hub.manifest_at(published.source.replace(COMMIT, "main"))


def test_script_lock_writes_the_bases_manifest_and_notices_other_files(
    published: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lock, manifest = tmp_path / "lock.yaml", tmp_path / "manifests/base.json"
    base = {"source": published.source, "manifest": str(manifest)}
    lock.write_text(yaml.safe_dump({"checkpoint": {"base": base}}))
    locks.refresh_base(lock)
    written = manifest.read_bytes()
    locks.refresh_base(lock)
    assert "agrees" in capsys.readouterr().out
    (published.folder / "tokenizer_config.json").write_text("{}")
    with pytest.raises(HostError, match="nothing was written"):
        locks.refresh_base(lock)
    assert manifest.read_bytes() == written
