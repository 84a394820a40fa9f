"""`ckpt assemble` as it runs on a host: the result against the format's own library."""

from __future__ import annotations

import hashlib
import json
import random
import resource
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

import pytest
from checkpoint import parents
from checkpoint.header import read_shard
from hostlib.errors import HostError

from lab.checkpoint import Pair
from tests.unit.checkpoint_support import content, data_begin, shards, small_pair
from tests.unit.test_checkpoint_fetch import (
    Host,
    assert_refused,
    assert_whole,
    flip,
    snapshot,
)

KILLS = 50
COPIED = ("config.json", "hf_quant_config.json", "tokenizer_config.json", "chat_template.jinja")


def arguments(host: Host, pair: Pair, *more: str) -> list[str]:
    return ["assemble", "--trunk", str(pair.trunk), "--base", str(pair.base), "--out",
            str(host.link), *more]  # fmt: skip


def assembled(host: Host, pair: Pair, *more: str) -> Path:
    done = host.run(*arguments(host, pair, *more))
    assert done.returncode == 0, done.stderr
    return host.link.resolve()


def digest_of(folder: Path) -> str:
    return hashlib.sha256((folder / "manifest.json").read_bytes()).hexdigest()


def wrapper_name(name: str) -> str:
    return "model.language_model." + name[6:] if name.startswith("model.") else name


def test_every_tensor_is_the_right_parents(host: Host, pair: Pair) -> None:
    folder = assembled(host, pair)
    trunk, base, found = content(pair.trunk), content(pair.base), content(folder)
    expected = base | {wrapper_name(name): tensor for name, tensor in trunk.items()}
    assert found == expected
    assert len(found) == 157
    assert len(trunk) == 157 - 21 - 15 - 26
    assert any(found[wrapper_name(name)] != base[wrapper_name(name)] for name in trunk)

    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(len(data) for _, _, data in found.values())
    assert index["weight_map"] == {
        name: path.name for path in shards(folder) for name in read_shard(path).tensors
    }
    for name in COPIED:
        assert (folder / name).read_bytes() == (pair.base / name).read_bytes()
    assert {path.name for path in folder.iterdir()} == {
        *COPIED, "model.safetensors.index.json", "manifest.json", "stamp.json",
        *(path.name for path in shards(folder)),
    }  # fmt: skip


def test_manifest_names_every_file_and_both_parents(host: Host, pair: Pair) -> None:
    folder = assembled(host, pair)
    assert folder == host.root / digest_of(folder)[:16]
    assert_whole(folder)
    listed = json.loads((folder / "manifest.json").read_text())
    assert listed["census"]["groups"] == {"trunk": 95, "vision": 21, "mtp": 15, "input_scale": 26}
    for role, parent in (("trunk", pair.trunk), ("base", pair.base)):
        names = [path.name for path in shards(parent)]
        printed = subprocess.run(["sha256sum", *names], cwd=parent, capture_output=True, check=True)
        digest = hashlib.sha256(printed.stdout).hexdigest()
        assert listed["provenance"][f"{role}_shards_sha256"] == digest
    assert host.run("verify", "--against", pair.trunk, host.link).returncode == 0
    assert {path.name for path in host.root.iterdir()} == {".lock", folder.name}


def test_same_parents_give_the_same_checkpoint(host: Host, pair: Pair, tmp_path: Path) -> None:
    folder = assembled(host, pair)
    before = snapshot(folder)
    moved = Pair(tmp_path / "a", tmp_path / "b")
    shutil.copytree(pair.trunk, moved.trunk)
    shutil.copytree(pair.base, moved.base)
    assert assembled(host, moved, "--manifest-sha256", digest_of(folder)) == folder
    assert snapshot(folder) == before
    assert_refused(host.run(*arguments(host, pair, "--manifest-sha256", "0" * 64)), 1,
                   "not the one asked for", digest_of(folder))  # fmt: skip
    assert {path.name for path in host.root.iterdir()} == {".lock", folder.name}


def test_nothing_is_read_when_the_result_stands(host: Host, pair: Pair) -> None:
    folder = assembled(host, pair)
    host.link.unlink()
    gone = Pair(host.data / "no-trunk", host.data / "no-base")
    assert assembled(host, gone, "--manifest-sha256", digest_of(folder)) == folder
    host.link.unlink()
    host.link.mkdir()
    assert_refused(host.run(*arguments(host, pair)), 1, host.link, "move it away")


def test_data_keeps_its_place_in_its_block(host: Host, pair: Pair) -> None:
    folder = assembled(host, pair)
    for old, new in zip(shards(pair.trunk), shards(folder), strict=False):
        assert data_begin(old) % 4096 == data_begin(new) % 4096
        assert old.read_bytes()[data_begin(old) :] == new.read_bytes()[data_begin(new) :]


def test_onto_another_file_system(host: Host, pair: Pair) -> None:
    """Where copy_file_range says EXDEV: the result is the same."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as other:
        if Path(other).stat().st_dev == pair.trunk.stat().st_dev:
            pytest.skip("/dev/shm is on the same file system as the tests' folder")
        elsewhere = Host(host.tools, Path(other))
        assert digest_of(assembled(elsewhere, pair)) == digest_of(assembled(host, pair))


def write_parent_manifest(folder: Path) -> str:
    files = {path.name: {"size": path.stat().st_size,
                         "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
             for path in sorted(folder.iterdir())}  # fmt: skip
    path = folder / "manifest.json"
    path.write_text(json.dumps({"format": 1, "files": files, "census": {}, "provenance": {}}))
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_parents_are_held_against_their_manifests_and_the_lock(
    host: Host, pair: Pair, tmp_path: Path
) -> None:
    plain = digest_of(assembled(host, pair))
    own = Pair(tmp_path / "trunk", tmp_path / "base")
    shutil.copytree(pair.trunk, own.trunk)
    shutil.copytree(pair.base, own.base)
    locked = ["--base-manifest-sha256", "0" * 64]
    assert_refused(host.run(*arguments(host, own, *locked)), 1, own.base, "missing", "adopt")
    locked[1:] = [write_parent_manifest(own.base), "--trunk-manifest-sha256",
                  write_parent_manifest(own.trunk)]  # fmt: skip
    assert digest_of(assembled(host, own, *locked)) == plain
    other = ["--base-manifest-sha256", "0" * 64]
    assert_refused(host.run(*arguments(host, own, *other)), 1, "base", "another revision", own.base)
    last = shards(own.base)[-1]
    flip(last)
    assert_refused(host.run(*arguments(host, own, *locked)), 1, last.name, "sha256 differs")
    flip(last)
    (own.base / "modeling.py").write_text("")
    assert_refused(host.run(*arguments(host, own, *locked)), 1, "modeling.py")
    assert host.link.resolve().name == plain[:16]


def test_code_beside_the_weights_is_not_taken(host: Host, pair: Pair, tmp_path: Path) -> None:
    own = Pair(pair.trunk, tmp_path / "base")
    shutil.copytree(pair.base, own.base)
    for name in ("modeling_qwen.py", "README.md", "pytorch_model.bin"):
        (own.base / name).write_text("x")
    assert digest_of(assembled(host, own)) == digest_of(assembled(host, pair))


def test_a_shard_that_changes_meanwhile_is_noticed(pair: Pair, tmp_path: Path) -> None:
    own = Pair(tmp_path / "trunk", pair.base)
    shutil.copytree(pair.trunk, own.trunk)
    trunk, _ = parents.read_pair(own.trunk, own.base)
    parents.check_unchanged(trunk)
    flip(shards(own.trunk)[0])
    with pytest.raises(HostError, match=f"{shards(own.trunk)[0].name}: touched"):
        parents.check_unchanged(trunk)


@pytest.mark.parametrize("locked", [True, False])
def test_a_damaged_earlier_result_is_replaced(host: Host, pair: Pair, locked: bool) -> None:
    folder = assembled(host, pair)
    digest = ["--manifest-sha256", digest_of(folder)] if locked else []
    flip(shards(folder)[0])
    with shards(folder)[0].open("rb") as served:
        before = served.read()
        assert host.run("verify", "--deep", folder).returncode == 1
        assert assembled(host, pair, *digest) == folder
        served.seek(0)
        assert served.read() == before
    assert_whole(folder)
    assert host.run("verify", folder).returncode == 0
    assert {path.name for path in host.root.iterdir()} == {".lock", folder.name}


def test_what_lies_in_a_damaged_result_and_is_not_of_it_is_not_lost(host: Host, pair: Pair) -> None:
    folder = assembled(host, pair)
    (folder / "notes.txt").write_text("mine")
    before = snapshot(folder)
    assert_refused(host.run(*arguments(host, pair)), 1, folder, "notes.txt", "move it out")
    assert snapshot(folder) == before
    assert host.link.resolve() == folder


def test_a_file_that_grows_too_large_leaves_nothing(host: Host, pair: Pair) -> None:
    """A full disk, as the write that meets it sees it."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))

    done = host.run(*arguments(host, pair), preexec_fn=limit)
    assert_refused(done, 2, "model-0000", "File too large", "nothing was changed")
    assert {path.name for path in host.root.iterdir()} == {".lock"}
    assert not host.link.is_symlink()


def test_kills_at_random_moments_leave_the_old_checkpoint_serving(
    host: Host, pair: Pair, tmp_path: Path
) -> None:
    """Over the time that one whole run takes; each next run finds what the killed one left."""
    other = small_pair(tmp_path / "other")
    flip(shards(other.trunk)[-1])
    old = assembled(host, other)
    kept = snapshot(old)
    began = time.monotonic()
    new = assembled(host, pair)
    whole_s = time.monotonic() - began
    at, in_the_middle, moments = host.link, 0, random.Random(4)
    for _ in range(KILLS):
        at.unlink()
        at.symlink_to(old)
        shutil.rmtree(new, ignore_errors=True)
        running = subprocess.Popen(
            host.command(*arguments(host, pair)),
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        time.sleep(moments.uniform(0, 1.1 * whole_s))
        running.send_signal(signal.SIGKILL)
        running.wait(timeout=60)
        in_the_middle += (host.root / ".staging-assembled").exists()
        assert at.resolve() in (old, new)
        assert snapshot(old) == kept
        if new.exists():
            assert_whole(new)
        serving = host.run("verify", at)
        assert serving.returncode == 0, serving.stderr
    assert in_the_middle
    assert_whole(old)
    assert assembled(host, pair) == new
    assert {path.name for path in host.root.iterdir()} == {".lock", old.name, new.name}
