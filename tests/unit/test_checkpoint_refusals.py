"""What `ckpt assemble` refuses: one line with the culprit's name, nothing written or changed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lab import checkpoint_config
from lab.checkpoint import Pair, build_pair
from tests.unit.checkpoint_support import (
    SMALL,
    edit_header,
    entries,
    raw_header,
    set_header,
    shards,
)
from tests.unit.test_checkpoint_assemble import arguments, assembled
from tests.unit.test_checkpoint_fetch import (
    Host,
    assert_refused,
    edit_json,
    snapshot,
)

INDEX = "model.safetensors.index.json"
Change = Callable[[Pair], object]


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory, ckpt_tools: Path, pair: Pair) -> Host:
    """A host on which a good checkpoint stands."""
    host = Host(ckpt_tools, tmp_path_factory.mktemp("data"))
    assembled(host, pair)
    return host


def first(pair: Pair) -> Path:
    return shards(pair.trunk)[0]


def last(pair: Pair) -> Path:
    return shards(pair.base)[-1]


def move(header: dict[str, Any], place: int, begin: int, end: int) -> None:
    """Shift the offsets of the tensor at `place`."""
    entry = list(entries(header))[place][1]
    entry["data_offsets"] = [entry["data_offsets"][0] + begin, entry["data_offsets"][1] + end]


def unsort(header: dict[str, Any]) -> None:
    name = next(entries(header))[0]
    header[name] = header.pop(name)


def rename(header: dict[str, Any], change: Callable[[str], str]) -> None:
    renamed = {change(name): entry for name, entry in header.items()}
    header.clear()
    header.update(renamed)


def rename_everywhere(folder: Path, change: Callable[[str], str]) -> None:
    for path in shards(folder):
        edit_header(path, lambda header: rename(header, change))
    edit_json(folder / INDEX, lambda index: rename(index["weight_map"], change))


def double_key(path: Path) -> None:
    text = raw_header(path)
    name, entry = next(entries(json.loads(text)))
    set_header(path, b'{"%s":%s,' % (name.encode(), json.dumps(entry).encode()) + text[1:])


def double_index_key(path: Path) -> None:
    text = path.read_text()
    name, shard = next(iter(json.loads(text)["weight_map"].items()))
    path.write_text(text.replace('"weight_map": {', f'"weight_map": {{ "{name}": "{shard}",'))


def in_two_shards(folder: Path) -> None:
    one, other = shards(folder)[:2]
    name = next(entries(json.loads(raw_header(one))))[0]
    edit_header(other, lambda h: rename(h, lambda n: name if n == next(entries(h))[0] else n))


def packed(name: str) -> str:
    return name.replace("down_proj.weight", "down_proj.weight_packed")


def lose(folder: Path, name: str) -> None:
    """Take a tensor's name out of the index and give its data another."""
    edit_json(folder / INDEX, lambda i: rename(i["weight_map"], lambda n: n.replace(name, "odd")))
    for path in shards(folder):
        edit_header(path, lambda h: rename(h, lambda n: n.replace(name, "odd")))


def escape(path: Path) -> None:
    outside = path.parent.parent / f"outside-{path.name}"
    path.rename(outside)
    path.symlink_to(outside)


def become_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 10)


def replace(folder: Path, other: Path) -> None:
    shutil.rmtree(folder)
    shutil.copytree(other, folder)


def claim_length(path: Path, length: int) -> None:
    with path.open("r+b") as stream:
        stream.write(length.to_bytes(8, "little"))


def hostile_size(path: Path) -> None:
    with path.open("r+b") as stream:
        stream.write((90_000_000).to_bytes(8, "little"))
        stream.truncate(100_000_000)


def without_draft(key: str, unquantised: str) -> Callable[[Any], object]:
    def change(config: Any) -> None:
        config[key][unquantised].remove("mtp*")

    return change


def swap_algorithms(config: Any) -> None:
    layers = config["quantization_config"]["quantized_layers"]
    other = next(name for name in layers if layers[name]["quant_algo"] == "FP8")
    layers["lm_head"], layers[other] = layers[other], layers["lm_head"]


REFUSED: dict[str, tuple[Change, list[str]]] = {
    "truncated shard": (lambda p: cut(first(p)), ["trunk/model-00001", "cut off"]),
    "truncated base shard": (lambda p: cut(last(p)), ["base/model-0", "cut off"]),
    "empty shard": (lambda p: os.truncate(first(p), 0), ["model-00001", "too few"]),
    "header longer than the file": (
        lambda p: claim_length(first(p), first(p).stat().st_size), ["model-00001", "longer than"]),
    "header of hostile size": (lambda p: hostile_size(first(p)), ["model-00001", "over the limit"]),
    "header of hostile length": (
        lambda p: claim_length(first(p), 2**64 - 1), ["model-00001", "over the limit"]),
    "header of hostile depth": (
        lambda p: set_header(first(p), b'{"a":' * 100_000 + b"1" + b"}" * 100_000),
        ["model-00001", "nested too deeply"]),
    "index of hostile size": (
        lambda p: os.truncate(p.trunk / INDEX, 50_000_000), [INDEX, "larger than"]),
    "config of hostile depth": (
        lambda p: (p.trunk / "config.json").write_text("[" * 100_000), ["config.json"]),
    "overlapping offsets": (
        lambda p: edit_header(last(p), lambda h: move(h, 3, -1, -1)), ["tensor", "overlaps"]),
    "unsorted": (lambda p: edit_header(last(p), unsort), ["tensor", "gap"]),
    "gap": (lambda p: edit_header(last(p), lambda h: move(h, 3, 1, 1)), ["tensor", "gap"]),
    "not dtype times shape": (
        lambda p: edit_header(last(p), lambda h: move(h, 3, 0, 1)), ["tensor", "bytes of data"]),
    "unknown dtype": (
        lambda p: edit_header(first(p), lambda h: next(entries(h))[1].update(dtype="F4")),
        ["tensor", "unknown dtype 'F4'"]),
    "key twice in a header": (lambda p: double_key(first(p)), ["model-00001", "stands twice"]),
    "key twice in an index": (
        lambda p: double_index_key(p.trunk / INDEX), [INDEX, "stands twice"]),
    "index names a missing shard": (
        lambda p: first(p).unlink(), ["trunk/model-00001", "missing"]),
    "tensor in two shards": (
        lambda p: in_two_shards(p.trunk), ["stands in model-00001", "in model-00002"]),
    "no index": (lambda p: (p.base / INDEX).unlink(), [INDEX, "missing"]),
    "assembled twice": (
        lambda p: rename_everywhere(
            p.trunk, lambda n: n.replace("model.", "model.language_model.", 1)),
        ["assembled before", "model.language_model."]),
    "whole checkpoint as trunk": (
        lambda p: replace(p.trunk, p.base),
        ["assembled before", "model.language_model."]),
    "trunk as base": (
        lambda p: replace(p.base, p.trunk),
        ["base", "a trunk alone"]),
    "compressed-tensors by config": (
        lambda p: edit_json(p.trunk / "config.json", lambda c: c["quantization_config"].update(
            quant_method="compressed-tensors")),
        ["config.json", "compressed-tensors", "no fast FP8 path"]),
    "compressed-tensors by name": (
        lambda p: rename_everywhere(p.trunk, packed),
        ["compressed-tensors", "no fast FP8 path", "down_proj.weight_packed"]),
    "ignore lacks the draft head": (
        lambda p: edit_json(
            p.base / "config.json", without_draft("quantization_config", "ignore")),
        ["config.json", "ignore", "mtp.fc"]),
    "exclude_modules lacks the draft head": (
        lambda p: edit_json(
            p.base / "hf_quant_config.json", without_draft("quantization", "exclude_modules")),
        ["hf_quant_config.json", "exclude_modules", "mtp.fc"]),
    "quantised layer left out": (
        lambda p: edit_json(p.base / "config.json", lambda c: c["quantization_config"][
            "quantized_layers"].pop("lm_head")), ["quantized_layers", "lm_head (missing)"]),
    "algorithms of two modules swapped": (
        lambda p: edit_json(p.base / "config.json", swap_algorithms),
        ["config.json", "quantized_layers", "2 modules", "lm_head (FP8 instead of NVFP4)"]),
    "draft head quantised": (
        lambda p: edit_json(p.base / "hf_quant_config.json", lambda c: c["quantization"][
            "quantized_layers"].update({"mtp.fc": {"quant_algo": "FP8"}})),
        ["hf_quant_config.json", "mtp.fc (FP8 instead of none)"]),
    "ignore covers a quantised module": (
        lambda p: edit_json(p.base / "config.json", lambda c: c["quantization_config"][
            "ignore"].append("lm_*")), ["config.json", "ignore", "covers", "lm_head"]),
    "shard that no index names": (
        lambda p: shutil.copy(first(p), p.trunk / "model-00004.safetensors"),
        ["trunk", "model-00004.safetensors", "index does not name"]),
    "heads that four cards cannot share": (
        lambda p: edit_json(p.base / "config.json", lambda c: c["text_config"].update(
            num_attention_heads=22)), ["num_attention_heads is 22", "4 cards"]),
    "another size": (
        lambda p: edit_json(p.base / "config.json", lambda c: c["text_config"].update(
            vocab_size=1024)), ["base", "differing", "lm_head.weight"]),
    "trunk lacks a tensor": (
        lambda p: lose(p.trunk, "model.layers.1.mlp.up_proj.weight_scale_2"),
        ["1 missing", "layers.1.mlp.up_proj.weight_scale_2", "1 extra", "odd"]),
    "trunk of another dtype": (
        lambda p: edit_header(last(Pair(p.trunk, p.trunk)), lambda h: [
            entry.update(dtype="I8") for _, entry in entries(h) if entry["dtype"] == "U8"]),
        ["differing", "I8"]),
    "symlink that leaves the folder": (
        lambda p: escape(first(p)), ["trunk/model-00001", "not a regular file"]),
    "config that leaves the folder": (
        lambda p: escape(p.base / "tokenizer_config.json"), ["tokenizer_config.json", "not a reg"]),
    "shard outside": (
        lambda p: edit_json(p.trunk / INDEX, lambda i: i["weight_map"].update(
            {"lm_head.weight": "../base/model-00001-of-00003.safetensors"})),
        [INDEX, "plain file name"]),
    "pipe": (lambda p: become_pipe(first(p)), ["model-00001", "not a regular file"]),
    "no tokenizer": (
        lambda p: (p.base / "tokenizer_config.json").unlink(),
        ["tokenizer_config.json", "missing"]),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refused(host: Host, pair: Pair, tmp_path: Path, case: str) -> None:
    change, named = REFUSED[case]
    wrong = Pair(tmp_path / "trunk", tmp_path / "base")
    shutil.copytree(pair.trunk, wrong.trunk)
    shutil.copytree(pair.base, wrong.base)
    change(wrong)
    before = snapshot(host.data)
    assert_refused(host.run(*arguments(host, wrong)), 1, *named)
    assert snapshot(host.data) == before


@pytest.mark.parametrize(
    ("sizes", "module", "why"),
    [
        ({"linear_value_head_dim": 40}, "layers.0.linear_attn.in_proj_qkvz", "slice of 120 rows"),
        ({"linear_key_head_dim": 48}, "layers.0.linear_attn.in_proj_qkvz", "slice of 48 rows"),
        ({"linear_value_head_dim": 32}, "layers.0.linear_attn.out_proj", "in-width 96"),
        ({"head_dim": 16}, "layers.3.self_attn.qkv_proj", "slice of 16 rows"),
    ],
)  # fmt: skip
def test_refuses_what_would_fail_gate_10(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    sizes: dict[str, int], module: str, why: str,
) -> None:  # fmt: skip
    """A pair that is right in itself, of dimensions that the fast kernel does not take."""
    for key, value in sizes.items():
        monkeypatch.setitem(checkpoint_config.TEXT_CONFIG, key, value)
    wrong = build_pair(tmp_path, SMALL)
    before = snapshot(host.data)
    assert_refused(host.run(*arguments(host, wrong)), 1, "gate 10", module, why)
    assert snapshot(host.data) == before


@pytest.mark.parametrize("key", [
    "num_attention_heads", "num_key_value_heads", "linear_num_key_heads", "linear_num_value_heads",
])  # fmt: skip
def test_refuses_heads_that_four_cards_cannot_share(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    monkeypatch.setitem(checkpoint_config.TEXT_CONFIG, key, 6)
    wrong = build_pair(tmp_path, SMALL)
    before = snapshot(host.data)
    assert_refused(host.run(*arguments(host, wrong)), 1, f"{key} is 6", "4 cards")
    assert snapshot(host.data) == before


def test_no_such_parent(host: Host, pair: Pair) -> None:
    gone = Pair(pair.trunk, host.data / "nothing")
    assert_refused(host.run(*arguments(host, gone)), 2, gone.base, "no such folder")
    assert_refused(host.run(*arguments(host, pair, "--base-manifest-sha256", "x")), 2, "--base-man")


def test_no_space(host: Host, pair: Pair, tmp_path: Path) -> None:
    """A file system of one megabyte, in a mount namespace of its own."""
    small = tmp_path / "small"
    small.mkdir()
    elsewhere = Host(host.tools, small)
    done = subprocess.run(
        ["unshare", "--mount", "--map-root-user",
         "sh", "-c", 'mount -t tmpfs -o size=1m none "$0" && exec "$@"', str(small),
         *elsewhere.command(*arguments(elsewhere, pair))],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert_refused(done, 2, small, "needed", "free")
