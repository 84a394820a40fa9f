"""The expected census, and the miniature that is built from it."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
from checkpoint.census import (
    compare,
    count,
    expected_tensors,
    quantised_modules,
)
from checkpoint.dimensions import architecture
from checkpoint.header import Tensor
from hostlib.errors import HostError
from hypothesis import given
from hypothesis import strategies as st

from lab import checkpoint as miniature

TP = 4
FULL: dict[str, Any] = {
    "model_type": "qwen3_5",
    "quantization_config": {"quant_method": "modelopt"},
    "text_config": {
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "num_hidden_layers": 64,
        "vocab_size": 248320,
        "full_attention_interval": 4,
        "num_attention_heads": 24,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 48,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "mtp_num_hidden_layers": 1,
    },
    "vision_config": {
        "depth": 27,
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "patch_size": 16,
        "temporal_patch_size": 2,
        "spatial_merge_size": 2,
        "num_position_embeddings": 2304,
        "in_channels": 3,
        "out_hidden_size": 5120,
    },
}


def tensors_of(config: dict[str, Any]) -> dict[str, Tensor]:
    return expected_tensors(architecture(config, "config.json"))


def test_full_architecture() -> None:
    census = count(tensors_of(FULL))
    assert census.tensors == 2194
    assert census.groups == {"trunk": 1445, "vision": 333, "mtp": 15, "input_scale": 401}
    assert census.dtypes == {"U8": 193, "F8_E4M3": 401, "F32": 802, "BF16": 798}
    assert census.bytes == 21_921_428_072
    algorithms = list(quantised_modules(architecture(FULL, "config.json")).values())
    assert (algorithms.count("NVFP4"), algorithms.count("FP8")) == (193, 208)


@pytest.mark.parametrize(
    ("name", "dtype", "shape"),
    [
        ("lm_head.weight", "U8", (248320, 2560)),
        ("lm_head.weight_scale", "F8_E4M3", (248320, 320)),
        ("model.language_model.layers.0.mlp.down_proj.weight", "U8", (5120, 8704)),
        ("model.language_model.layers.63.mlp.up_proj.weight_scale_2", "F32", ()),
        ("model.language_model.layers.3.self_attn.q_proj.weight", "F8_E4M3", (12288, 5120)),
        ("model.language_model.layers.3.self_attn.o_proj.input_scale", "F32", ()),
        ("model.language_model.layers.3.self_attn.k_norm.weight", "BF16", (256,)),
        ("model.language_model.layers.0.linear_attn.conv1d.weight", "BF16", (10240, 1, 4)),
        ("model.language_model.layers.0.linear_attn.A_log", "BF16", (48,)),
        ("model.language_model.layers.0.linear_attn.norm.weight", "BF16", (128,)),
        ("mtp.fc.weight", "BF16", (5120, 10240)),
        ("mtp.layers.0.self_attn.v_proj.weight", "BF16", (1024, 5120)),
        ("model.visual.patch_embed.proj.weight", "BF16", (1152, 3, 2, 16, 16)),
        ("model.visual.merger.linear_fc2.weight", "BF16", (5120, 4608)),
    ],
)
def test_full_architecture_has(name: str, dtype: str, shape: tuple[int, ...]) -> None:
    assert tensors_of(FULL)[name] == Tensor(dtype, shape)


def test_full_architecture_has_no_kv_scales_and_four_layers_to_a_full_one() -> None:
    tensors = tensors_of(FULL)
    assert not [name for name in tensors if name.endswith(("k_scale", "v_scale"))]
    full = {int(name.split(".")[3]) for name in tensors if ".layers." in name and "q_proj" in name
            and name.startswith("model.")}  # fmt: skip
    assert full == set(range(3, 64, 4))


@given(st.lists(st.sampled_from(["full_attention", "linear_attention"]), min_size=1, max_size=9),
       st.integers(1, 5))  # fmt: skip
def test_count_follows_layers(layer_types: list[str], blocks: int) -> None:
    config = copy.deepcopy(FULL)
    config["text_config"] |= {"layer_types": layer_types, "num_hidden_layers": len(layer_types)}
    config["vision_config"]["depth"] = blocks
    full = layer_types.count("full_attention")
    expected = 14 * len(layer_types) + 14 * full + 15 * (len(layer_types) - full) + 12 * blocks + 30
    assert len(tensors_of(config)) == expected


@pytest.mark.parametrize(
    ("path", "value", "pattern"),
    [
        (("model_type",), "llama", "another kind of model"),
        (("quantization_config", "quant_method"), "compressed-tensors", "compressed-tensors.*fast"),
        (("text_config", "hidden_size"), None, "text_config.hidden_size"),
        (("text_config", "hidden_size"), 5121, "multiple of 16"),
        (("text_config", "head_dim"), 2.5, "text_config.head_dim"),
        (("text_config", "num_hidden_layers"), 10**9, "num_hidden_layers"),
        (("text_config", "layer_types"), ["full_attention"], "layer_types"),
        (("vision_config", "depth"), 10**9, "vision_config.depth"),
        (("vision_config",), None, "vision_config"),
    ],
)
def test_refuses_config(path: tuple[str, ...], value: object, pattern: str) -> None:
    config = copy.deepcopy(FULL)
    part = config
    for key in path[:-1]:
        part = part[key]
    part[path[-1]] = value
    with pytest.raises(HostError, match=f"^config.json: .*{pattern}"):
        tensors_of(config)


def test_compare_names_what_differs() -> None:
    expected = {"a": Tensor("U8", (4,)), "b": Tensor("U8", (4,)), "c": Tensor("U8", (4,))}
    found = {"a": Tensor("U8", (4,)), "b": Tensor("U8", (2, 2)), "d": Tensor("F32", ())}
    difference = compare(found, expected)
    assert (difference.missing, difference.extra) == (["c"], ["d"])
    assert difference.differing == ["b (U8 [2, 2] instead of U8 [4])"]
    many = compare({}, {f"t{n}": Tensor("U8", ()) for n in range(9)}).lines()
    assert many == ["9 missing: t0, t1, t2, t3, t4 and 4 more"]
    assert not compare(expected, expected)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return miniature.build(tmp_path_factory.mktemp("cache")).folder


def test_miniature_read_back_by_the_library(folder: Path) -> None:
    found: dict[str, Tensor] = {}
    for shard in sorted(folder.glob("*.safetensors")):
        with safetensors.safe_open(shard, framework="numpy") as opened:
            for name in opened.keys():  # noqa: SIM118 - it is no dictionary
                part = opened.get_slice(name)
                assert name not in found
                found[name] = Tensor(part.get_dtype(), tuple(part.get_shape()))
    config = json.loads((folder / "config.json").read_text())
    assert found == tensors_of(config)
    assert len(found) == 157
    assert sum(name.endswith(".input_scale") for name in found) == 26
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == found.keys()
    assert len(set(index["weight_map"].values())) == 3


def test_miniature_holds_finite_numbers(folder: Path) -> None:
    for shard in sorted(folder.glob("*.safetensors")):
        tensors = safetensors.deserialize(shard.read_bytes())  # type: ignore[no-untyped-call]
        for name, tensor in tensors:
            raw = np.frombuffer(tensor["data"], dtype=np.uint8)
            if tensor["dtype"] == "F32":
                assert (raw.view(np.float32) > 0).all(), name
            elif tensor["dtype"] == "BF16":
                values = (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
                assert np.isfinite(values).all(), name
                assert (np.abs(values) < 1).all(), name
            elif tensor["dtype"] == "F8_E4M3":
                assert not ((raw & 0x7F) == 0x7F).any(), name


def test_miniature_suits_four_ranks_and_the_fast_kernels(folder: Path) -> None:
    """Each rank's slice: in-dims multiples of 64, out-dims of 32, a five-digit vocabulary."""
    config = json.loads((folder / "config.json").read_text())
    text = config["text_config"]
    for heads in ("num_attention_heads", "num_key_value_heads", "linear_num_key_heads",
                  "linear_num_value_heads"):  # fmt: skip
        assert text[heads] % TP == 0
    assert text["vocab_size"] // TP >= 10_000
    for name, tensor in tensors_of(config).items():
        if not name.endswith(".weight") or tensor.dtype not in ("U8", "F8_E4M3"):
            continue
        out, width = tensor.shape
        width *= 2 if tensor.dtype == "U8" else 1
        if name.removesuffix(".weight").endswith(("o_proj", "out_proj", "down_proj")):
            width //= TP
        else:
            out //= TP
        assert width % 64 == 0, name
        assert out % 32 == 0, name
    key_slice = text["linear_num_key_heads"] * text["linear_key_head_dim"] // TP
    value_slice = text["linear_num_value_heads"] * text["linear_value_head_dim"] // TP
    assert key_slice % 32 == value_slice % 32 == 0


def test_miniature_names_its_quantised_modules(folder: Path) -> None:
    quantisation = json.loads((folder / "config.json").read_text())["quantization_config"]
    layers = quantisation["quantized_layers"]
    assert len(layers) == 26
    assert layers["lm_head"]["quant_algo"] == "NVFP4"
    assert layers["model.language_model.layers.0.linear_attn.in_proj_qkv"]["quant_algo"] == "FP8"
    assert "mtp*" in quantisation["ignore"]
    other = json.loads((folder / "hf_quant_config.json").read_text())["quantization"]
    assert other["quantized_layers"] == layers
    assert "mtp*" in other["exclude_modules"]


def test_miniature_is_the_same_each_time_and_rebuilt_when_damaged(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = miniature.build(folder.parent)
    again = miniature.build(tmp_path)
    assert again.manifest_sha256 == first.manifest_sha256
    shard = next(again.folder.glob("*.safetensors"))
    good = shard.read_bytes()
    shard.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    assert miniature.build(tmp_path) == again
    assert shard.read_bytes() == good
    assert shard.name in capsys.readouterr().err
    assert sum(path.stat().st_size for path in again.folder.iterdir()) < 40_000_000
    assert [path.name for path in tmp_path.iterdir()] == [again.folder.name]
