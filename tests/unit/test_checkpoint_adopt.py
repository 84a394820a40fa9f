"""`ckpt adopt` and `ckpt collect`: what stands is taken in, and what nobody needs goes."""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from lab import checkpoint as miniature
from lab.checkpoint import Pair
from tests.unit.checkpoint_support import edit_header, shards
from tests.unit.test_checkpoint_assemble import arguments
from tests.unit.test_checkpoint_fetch import (
    Host,
    assert_refused,
    assert_whole,
    flip,
    snapshot,
)

KILLS = 12


@pytest.fixture
def by_hand(host: Host, pair: Pair) -> Path:
    """A whole checkpoint at the fixed path, which no program of ours put there."""
    shutil.copytree(pair.base, host.link)
    return host.link


def test_a_checkpoint_is_taken_in_as_it_is(host: Host, by_hand: Path) -> None:
    before = snapshot(by_hand)
    done = host.run("adopt", by_hand)
    assert done.returncode == 0, done.stderr
    digest = subprocess.run(["sha256sum", by_hand / "manifest.json"], capture_output=True,
                            text=True, check=True).stdout.split()[0]  # fmt: skip
    assert digest in done.stdout
    place = host.folder(digest)
    assert by_hand.is_symlink() and by_hand.resolve() == place
    after = snapshot(place)
    assert {name: after[name] for name in before} == before  # the same inodes, not even touched
    assert after.keys() - before.keys() == {"manifest.json", "stamp.json"}
    assert_whole(place)
    assert host.run("verify", "--deep", by_hand).returncode == 0
    assert host.status(digest) == {
        "path": str(place), "installed": True, "link_ok": True, "reason": "",
    }  # fmt: skip
    after = snapshot(place)
    again = host.run("adopt", by_hand)
    assert again.returncode == 0 and digest in again.stdout
    assert snapshot(place) == after


def test_the_manifest_is_the_same_wherever_it_is_made(host: Host, pair: Pair) -> None:
    manifests = []
    for name in ("here", "there"):
        (host.data / name).mkdir()
        shutil.copytree(pair.trunk, host.data / name / "trunk")
        assert host.run("adopt", host.data / name / "trunk").returncode == 0
        manifests.append((host.data / name / "trunk/manifest.json").read_bytes())
    assert manifests[0] == manifests[1]


def test_adopted_parents_are_assembled(host: Host, pair: Pair) -> None:
    digests = {}
    for role in ("trunk", "base"):
        shutil.copytree(getattr(pair, role), host.data / role)
        said = host.run("adopt", host.data / role).stdout
        digests[role] = said.partition("(sha256 ")[2].partition(")")[0]
    parents = Pair(host.folder(digests["trunk"]), host.folder(digests["base"]))
    locked = [word for role, digest in digests.items()
              for word in (f"--{role}-manifest-sha256", digest)]  # fmt: skip
    done = host.run(*arguments(host, parents), *locked)
    assert done.returncode == 0, done.stderr
    assert_whole(host.link)


def test_a_manifest_that_is_there_is_kept_if_it_is_true(
    host: Host, source: miniature.CheckpointInfo
) -> None:
    shutil.copytree(source.folder, host.link)
    assert host.run("adopt", host.link).returncode == 0
    assert host.link.resolve() == host.folder(source.manifest_sha256)

    other = host.data / "other"
    shutil.copytree(source.folder, other)
    flip(shards(other)[0])
    assert_refused(host.run("adopt", other), 1, shards(other)[0].name, "sha256 differs")
    assert not other.is_symlink()
    shutil.copy(shards(source.folder)[0], other)
    assert_refused(host.run("adopt", other), 1, "stands there already", other)
    assert not other.is_symlink()


def test_what_is_no_checkpoint_is_refused_and_left_as_it_was(
    host: Host, by_hand: Path, tmp_path: Path
) -> None:
    def refused(*named: str | Path) -> None:
        before = snapshot(host.data)
        assert_refused(host.run("adopt", by_hand), 1, *named)
        assert snapshot(host.data) == before
        assert not by_hand.is_symlink()

    for name in ("modeling.py", "pytorch_model.bin"):
        (by_hand / name).write_text("")
        refused(name, "code")
        (by_hand / name).unlink()
    shutil.copy(shards(by_hand)[0], by_hand / "consolidated.safetensors")
    refused("consolidated.safetensors", "index does not name")
    (by_hand / "consolidated.safetensors").unlink()
    (by_hand / ".cache").mkdir()
    refused(".cache", "move it out")
    (by_hand / ".cache").rmdir()
    shard = shards(by_hand)[0]
    shard.rename(tmp_path / "blob")
    shard.symlink_to(tmp_path / "blob")
    refused(shard.name, "not a regular file")
    shard.unlink()
    refused(shard.name, "missing")
    shutil.copy(tmp_path / "blob", shard)
    edit_header(shard, lambda header: header.update(x=header.pop(list(header)[-1])))
    refused("disagrees with the shards on 2 tensors")


def test_a_full_disk_leaves_it_as_it_was_and_names_the_file(host: Host, by_hand: Path) -> None:
    """A full disk, as the write that meets it sees it."""
    before = snapshot(by_hand)
    done = host.run(
        "adopt", by_hand,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000)),
    )  # fmt: skip
    assert_refused(done, 2, by_hand / "manifest.json", "File too large")
    assert snapshot(by_hand) == before
    assert not by_hand.is_symlink()


def test_many_adoptions_at_once_agree(host: Host, by_hand: Path) -> None:
    running = [
        subprocess.Popen(host.command("adopt", by_hand), stderr=subprocess.PIPE) for _ in range(6)
    ]
    said = [process.communicate(timeout=60)[1] for process in running]
    assert [process.returncode for process in running] == [0] * 6, said
    assert_whole(by_hand.resolve())


def test_places_that_cannot_be_adopted(host: Host, by_hand: Path) -> None:
    assert_refused(host.run("adopt", host.data / "nothing"), 1, "nothing", "is no folder")
    (host.data / "link").symlink_to(by_hand)
    assert_refused(host.run("adopt", host.data / "link"), 1, "is no folder")
    assert_refused(host.run("adopt", by_hand, "--root", by_hand / "in"), 1, "lies in")
    shm = Path("/dev/shm")
    if shm.stat().st_dev == host.data.stat().st_dev:
        pytest.skip("needs two file systems")
    root = shm / f"ckpt-{os.getpid()}"
    assert_refused(host.run("adopt", by_hand, "--root", root), 1, "another file system")
    assert not root.exists()


def test_killed_at_any_moment_the_path_leads_to_the_whole_checkpoint(
    host: Host, pair: Pair
) -> None:
    chance = random.Random(4)
    shutil.copytree(pair.base, host.data / "model")
    began = time.monotonic()
    assert host.run("adopt", host.data / "model").returncode == 0
    whole_run_s = time.monotonic() - began
    listed = json.loads((host.data / "model/manifest.json").read_text())["files"]
    moments = [whole_run_s * chance.random() for _ in range(KILLS)]
    for number, moment in enumerate(moments):
        data = host.data / f"run-{number}"
        data.mkdir()
        shutil.copytree(pair.base, data / "model", copy_function=os.link)
        running = subprocess.Popen(
            host.command("adopt", data / "model"),
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        time.sleep(moment)
        running.kill()
        running.wait()
        assert all(
            (data / "model" / name).stat().st_size == entry["size"]
            for name, entry in listed.items()
        )
        done = host.run("adopt", data / "model")
        assert done.returncode == 0, done.stderr
        assert (data / "model").resolve().parent == data / "checkpoints"
        assert_whole(data / "model")
        shutil.rmtree(data)


def test_collect_removes_what_nothing_names(
    host: Host, pair: Pair, source: miniature.CheckpointInfo
) -> None:
    assert host.fetch(source.folder, source.manifest_sha256).returncode == 0
    wanted = host.folder(source.manifest_sha256)
    for role in ("trunk", "base"):
        shutil.copytree(getattr(pair, role), host.data / role)
        assert host.run("adopt", host.data / role).returncode == 0
    trunk, base = ((host.data / role).resolve() for role in ("trunk", "base"))
    (host.root / ".staging-0123").mkdir()
    (host.root / ".removing.0123").mkdir()
    (host.root / "by-hand").mkdir()
    releases = host.data / "releases"
    (releases / "one").mkdir(parents=True)
    place: list[str | Path] = ["--root", host.root, "--link", host.link]

    assert_refused(host.run("collect", *place), 1, "--releases DIR or --keep PATH")
    assert_refused(host.run("collect", *place, "--releases", releases), 2, "release.json")
    assert_refused(host.run("collect", *place, "--keep", host.data / "no"), 1, "no folder")
    assert all(path.is_dir() for path in (wanted, trunk, base))

    (releases / "one/release.json").write_text(json.dumps({"paths": {"checkpoint": str(base)}}))
    done = host.run("collect", *place, "--releases", releases)
    assert done.returncode == 0, done.stderr
    assert f"removed {trunk}" in done.stdout and "1 trees removed" in done.stdout
    left = {path.name for path in host.root.iterdir()}
    assert left == {".lock", wanted.name, base.name, "by-hand"}
    assert_whole(wanted)
    assert_whole(base)
