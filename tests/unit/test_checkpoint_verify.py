"""`ckpt verify` and `ckpt census`: what they find, and what a failure leaves behind."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from checkpoint import verify
from checkpoint.dimensions import architecture
from checkpoint.serving import fused_modules
from engine_standin.checkpoint import shape_of
from hostlib.errors import HostError
from hypothesis import given
from hypothesis import strategies as st

from lab.checkpoint import Pair
from tests.unit.checkpoint_support import (
    edit_header,
    full_sized,
    raw_header,
    shards,
)
from tests.unit.standin_support import production_config
from tests.unit.test_checkpoint_assemble import assembled
from tests.unit.test_checkpoint_census import FULL
from tests.unit.test_checkpoint_fetch import Host, assert_refused, flip

INDEX = "model.safetensors.index.json"


def test_a_failed_deep_verify_takes_the_stamp(host: Host, pair: Pair) -> None:
    folder = assembled(host, pair)
    stamp, path = folder / "stamp.json", shards(folder)[0]
    sha256 = json.loads(stamp.read_text())["manifest_sha256"]
    times = path.stat()
    flip(path)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert host.status(sha256)["installed"] is True
    assert_refused(host.run("verify", "--deep", folder), 1, path.name, "sha256 differs")
    assert not stamp.exists()
    assert host.status(sha256)["installed"] is False
    assert_refused(host.run("verify", folder), 1, "stamp.json", "missing", "verify --deep")
    flip(path)
    assert host.run("verify", "--deep", folder).returncode == 0
    assert host.status(sha256)["installed"] is True
    assert host.run("verify", folder).returncode == 0


@pytest.mark.parametrize("name", [".stamp.json.a1b2c3d_", ".manifest.json.a1b2c3d_"])
def test_a_verify_killed_while_it_wrote_its_stamp_is_no_fault(
    host: Host, pair: Pair, name: str
) -> None:
    folder = assembled(host, pair)
    sha256 = hashlib.sha256((folder / "manifest.json").read_bytes()).hexdigest()
    (folder / name).write_text("half of it")
    assert host.status(sha256)["installed"] is True
    assert host.run("verify", folder).returncode == 0
    assert host.run("verify", "--deep", folder).returncode == 0
    (folder / ".other.json.a1b2c3d_").write_text("not ours")
    assert_refused(host.run("verify", folder), 1, ".other.json")


def test_many_deep_verifies_at_once_agree(host: Host, pair: Pair) -> None:
    folder = assembled(host, pair)
    running = [
        subprocess.Popen(host.command("verify", "--deep", folder), stderr=subprocess.PIPE)
        for _ in range(8)
    ]
    said = [process.communicate(timeout=60)[1] for process in running]
    assert [process.returncode for process in running] == [0] * 8, said
    assert host.run("verify", folder).returncode == 0


def test_what_is_written_while_it_is_hashed_shows_as_touched(
    host: Host, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = assembled(host, pair)
    hash_all = verify.check_digests

    def hash_and_flip(*given: object) -> None:
        hash_all(*given)  # type: ignore[arg-type]
        flip(shards(folder)[0])

    monkeypatch.setattr(verify, "check_digests", hash_and_flip)
    verify.deep(folder)
    with pytest.raises(HostError, match=f"{shards(folder)[0].name}: touched"):
        verify.quick(folder)


def test_against_names_each_tensor_that_is_not_the_parents(
    host: Host, pair: Pair, tmp_path: Path
) -> None:
    folder = assembled(host, pair)
    done = host.run("verify", "--against", pair.trunk, folder)
    assert done.returncode == 0, done.stderr
    assert "95 tensors" in done.stdout
    other = tmp_path / "trunk"
    shutil.copytree(pair.trunk, other)
    path = shards(other)[-1]
    header = json.loads(raw_header(path))
    last = max((n for n in header if n != "__metadata__"), key=lambda n: header[n]["data_offsets"])
    flip(path)
    named = last.replace("model.", "model.language_model.")
    assert_refused(host.run("verify", "--against", other, folder), 1,
                   "trunk is not that of", f"1 with other bytes: {named}")  # fmt: skip
    edit_header(path, lambda h: h[last].update(dtype="I8"))
    assert_refused(host.run("verify", "--against", other, folder), 1, f"1 differing: {named}")
    assert_refused(host.run("verify", "--against", pair.base, folder), 1, "95 with other bytes")
    assert host.run("verify", "--against", folder, folder).returncode == 0


def test_full_architecture_is_counted_and_verified(host: Host) -> None:
    folder = full_sized(host.data / "full", FULL)
    done = host.run("census", folder)
    assert done.returncode == 0, done.stderr
    assert "2,194 = 1,445 trunk + 333 vision + 15 MTP + 401 input scales" in done.stdout
    assert host.run("verify", folder).returncode == 0
    path = shards(folder)[1]
    text = raw_header(path)
    name = json.loads(text).popitem()[0]
    changed = text.replace(name.encode(), b"o" * len(name))
    with path.open("r+b") as stream:
        stream.seek(8)
        stream.write(changed)
    index = folder / INDEX
    index.write_text(index.read_text().replace(f'"{name}"', f'"{"o" * len(name)}"'))
    assert_refused(host.run("census", folder), 1, f"1 missing: {name}", "1 extra: ooo")


def test_a_trunk_alone_has_a_census(host: Host, pair: Pair) -> None:
    done = host.run("census", pair.trunk)
    assert done.returncode == 0, done.stderr
    assert "95 = 95 trunk, as" in done.stdout


def test_one_file_needs_no_index(host: Host, tmp_path: Path) -> None:
    folder = full_sized(tmp_path / "one", FULL, count=1)
    (folder / INDEX).unlink()
    shards(folder)[0].rename(folder / "model.safetensors")
    assert host.run("census", folder).returncode == 0
    with (folder / "model.safetensors").open("r+b") as stream:
        stream.truncate(10_000_000_000)
    assert_refused(host.run("census", folder), 1, "model.safetensors", "cut off")


@given(st.fixed_dictionaries({
    "num_attention_heads": st.sampled_from([4, 8, 24]),
    "num_key_value_heads": st.sampled_from([4, 8]),
    "head_dim": st.sampled_from([8, 16, 64, 96]),
    "hidden_size": st.sampled_from([64, 80, 96, 128]),
    "linear_num_key_heads": st.sampled_from([4, 8]), "linear_num_value_heads": st.just(12),
    "linear_key_head_dim": st.sampled_from([16, 32, 48]),
    "linear_value_head_dim": st.sampled_from([16, 64, 128]),
}))  # fmt: skip
def test_predicts_the_gate_that_the_stand_in_prints(sizes: dict[str, int]) -> None:
    config = copy.deepcopy(FULL) | {"architectures": production_config()["architectures"]}
    config["text_config"] |= sizes
    found = fused_modules(architecture(config, "config.json").text)
    printed = shape_of(config, 4).fused
    assert len(found) == 128
    assert [(m.name, m.width, m.slices) for m in found] == [
        (f.layer, f.k, f.widths) for f in printed
    ]
    assert [bool(m.refusal()) for m in found] == [bool(f.refusal) for f in printed]


def test_production_passes_the_gate() -> None:
    modules = fused_modules(architecture(FULL, "config.json").text)
    assert {(m.name.split(".")[-1], sum(m.slices), m.width) for m in modules} == {
        ("in_proj_qkvz", 4096, 5120), ("out_proj", 5120, 1536),
        ("qkv_proj", 3584, 5120), ("o_proj", 5120, 1536),
    }  # fmt: skip
    assert not any(module.refusal() for module in modules)


def test_a_deep_verify_of_what_cannot_be_written_tells_what_it_found(
    host: Host, pair: Pair
) -> None:
    folder = assembled(host, pair)

    def deep() -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["unshare", "--mount", "--map-root-user", "sh", "-c",
             'mount --bind "$0" "$0" && mount -o remount,ro,bind "$0" && exec "$@"', str(folder),
             *host.command("verify", "--deep", folder)],
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip

    assert_refused(deep(), 2, folder, "every digest is right", "Read-only")
    assert host.run("verify", folder).returncode == 0
    flip(shards(folder)[0])
    assert_refused(deep(), 1, shards(folder)[0].name, "sha256 differs", "cannot be removed")
