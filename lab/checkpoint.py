"""A faithful miniature of the engine's checkpoint: same names, dtypes and layout, small sizes.

`build` makes it once and keeps it in a cache; `python -m lab.checkpoint --cache DIR` prints where.
The weights are random but finite, from a fixed seed, so that the manifest's digest is always the
same. Every dimension that four ranks share divides by four, and what is left of each stays a
multiple of 64 (in) or 32 (out), as the engine's fast kernels want it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import shutil
import struct
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from checkpoint import census, manifest, verify
from checkpoint.header import DTYPE_BYTES, Tensor
from hostlib.atomic import publish_dir
from hostlib.download import sha256_file
from hostlib.errors import HostError, run_main

SEED = "miniature"
SHARDS = 3
FULL_ATTENTION_INTERVAL = 4
LAYERS = 4

# 40960 entries are 10240 a rank: the engine's log tells the output head from other modules by a
# size of five digits or more.
TEXT_CONFIG = {
    "model_type": "qwen3_5_text",
    "dtype": "bfloat16",
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_hidden_layers": LAYERS,
    "vocab_size": 40960,
    "full_attention_interval": FULL_ATTENTION_INTERVAL,
    "layer_types": [
        census.LINEAR if (n + 1) % FULL_ATTENTION_INTERVAL else census.FULL for n in range(LAYERS)
    ],
    "num_attention_heads": 24,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 12,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
    "mtp_num_hidden_layers": 1,
    "max_position_embeddings": 262144,
    "attn_output_gate": True,
    "attention_bias": False,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "mamba_ssm_dtype": "float32",
    "tie_word_embeddings": False,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10_000_000,
        "partial_rotary_factor": 0.25,
        "mrope_interleaved": True,
        "mrope_section": [3, 3, 2],
    },
}
VISION_CONFIG = {
    "model_type": "qwen3_5",
    "depth": 1,
    "hidden_size": 64,
    "intermediate_size": 256,
    "num_heads": 4,
    "hidden_act": "gelu_pytorch_tanh",
    "patch_size": 16,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "num_position_embeddings": 2304,
    "in_channels": 3,
    "out_hidden_size": 128,
    "deepstack_visual_indexes": [],
}
TOKENIZER_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "model_max_length": 262144,
    "pad_token": "<|endoftext|>",
    "eos_token": "<|im_end|>",
    "clean_up_tokenization_spaces": False,
}
CHAT_TEMPLATE = """\
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking -%}
<think>

</think>

{% else -%}
<think>
{% endif -%}
{%- endif -%}
"""
NOT_QUANTISED = ["mtp*", "model.visual*", "model.language_model.embed_tokens"]


@dataclass(frozen=True)
class CheckpointInfo:
    """A built checkpoint: its folder, and the sha256 of the manifest in it."""

    folder: Path
    manifest_sha256: str


def build(cache: Path) -> CheckpointInfo:
    """Build the miniature in folder `cache`, or take the one that stands there whole."""
    folder = cache / f"checkpoint-{_recipe_digest()}"
    if folder.exists():
        try:
            listed = manifest.read(folder)
            verify.check_names(folder, listed)
            verify.check_digests(folder, listed)
            return CheckpointInfo(folder, listed.sha256)
        except HostError as error:
            print(f"{error.message}: built again", file=sys.stderr)
            shutil.rmtree(folder)
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".checkpoint-", dir=cache) as beside:
        staged = Path(beside) / "checkpoint"
        staged.mkdir()
        _write(staged)
        publish_dir(staged, folder)
    return CheckpointInfo(folder, manifest.read(folder).sha256)


def config() -> dict[str, object]:
    """The miniature's config.json, in the form that transformers and the engine read."""
    base: dict[str, object] = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": census.MODEL_TYPE,
        "tie_word_embeddings": False,
        "image_token_id": 2,
        "video_token_id": 3,
        "vision_start_token_id": 4,
        "vision_end_token_id": 5,
        "text_config": TEXT_CONFIG,
        "vision_config": VISION_CONFIG,
        "quantization_config": {"quant_method": "modelopt"},
    }
    return base | {
        "quantization_config": {
            "quant_method": "modelopt",
            "quant_algo": "MIXED_PRECISION",
            "kv_cache_scheme": {"num_bits": 8, "type": "float"},
            "ignore": NOT_QUANTISED,
            "quantized_layers": _quantized_layers(base),
        }
    }


def write_safetensors(path: Path, tensors: dict[str, Tensor], seed: str) -> None:
    """Write `tensors` with seeded data to `path`, the widest dtypes first so that all align."""
    ordered = sorted(tensors, key=lambda name: (-DTYPE_BYTES[tensors[name].dtype], name))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in ordered:
        tensor = tensors[name]
        begin, end = end, end + tensor.nbytes
        header[name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        for name in ordered:
            stream.write(random_data(name, tensors[name], seed))


def random_data(name: str, tensor: Tensor, seed: str) -> bytes:
    """Finite values for a tensor: BF16 around ±0.01, scales positive, no FP8 NaN."""
    source = random.Random(f"{seed}:{name}")
    if tensor.dtype == "F32":
        count = tensor.nbytes // 4
        return struct.pack(f"<{count}f", *(1e-5 + 9e-3 * source.random() for _ in range(count)))
    data = bytearray(source.randbytes(tensor.nbytes))
    if tensor.dtype == "BF16":  # little-endian: the second byte holds the sign and the exponent
        data[1::2] = data[1::2].translate(bytes(0x3C | (byte & 0x80) for byte in range(256)))
    elif tensor.dtype == "F8_E4M3":  # exponent and mantissa all ones is NaN
        sign = 0x00 if name.endswith("_scale") else 0x80
        data = data.translate(bytes((b & sign) | min(b & 0x7F, 0x7E) for b in range(256)))
    return bytes(data)


def _quantized_layers(base: dict[str, object]) -> dict[str, dict[str, object]]:
    modules = census.quantised_modules(census.architecture(base, manifest.CONFIG))
    return {
        name: {"quant_algo": algo} | ({"group_size": census.NVFP4_BLOCK} if algo == "NVFP4" else {})
        for name, algo in modules.items()
    }


def _hf_quant_config(base: dict[str, object]) -> dict[str, object]:
    return {
        "producer": {"name": "modelopt", "version": "miniature"},
        "quantization": {
            "quant_algo": "MIXED_PRECISION",
            "kv_cache_quant_algo": "FP8",
            "exclude_modules": NOT_QUANTISED,
            "quantized_layers": _quantized_layers(base),
        },
    }


def _write(folder: Path) -> None:
    settings = config()
    tensors = census.expected_tensors(census.architecture(settings, manifest.CONFIG))
    total = census.count(tensors).bytes
    shards: list[dict[str, Tensor]] = [{} for _ in range(SHARDS)]
    before = 0
    for name, tensor in tensors.items():
        shards[before * SHARDS // total][name] = tensor
        before += tensor.nbytes
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05}-of-{SHARDS:05}.safetensors"
        write_safetensors(folder / file, shard, SEED)
        weight_map |= dict.fromkeys(shard, file)
    _write_json(folder / manifest.CONFIG, settings)
    _write_json(folder / "hf_quant_config.json", _hf_quant_config(settings))
    _write_json(folder / "tokenizer_config.json", TOKENIZER_CONFIG)
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    _write_json(
        folder / manifest.INDEX,
        {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))},
    )
    files = {
        path.name: {"size": path.stat().st_size, "sha256": sha256_file(path)}
        for path in sorted(folder.iterdir())
    }
    _write_json(
        folder / manifest.MANIFEST,
        {
            "format": manifest.FORMAT,
            "files": files,
            "census": census.count(tensors).as_json(),
            "provenance": {"origin": "miniature made by lab/checkpoint.py", "seed": SEED},
        },
    )
    verify.check_tensors(folder, manifest.read(folder))


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def _recipe_digest() -> str:
    """Over the sources that determine the miniature, so that a change of them builds a new one."""
    digest = hashlib.sha256()
    for path in (Path(__file__), Path(census.__file__), Path(manifest.__file__)):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def main() -> int:
    """Build the miniature and print its folder and digest as one line of JSON."""
    parser = argparse.ArgumentParser(prog="lab.checkpoint", description=__doc__)
    parser.add_argument("--cache", required=True, type=Path, help="folder to keep it in")
    info = build(parser.parse_args().cache)
    print(json.dumps({"folder": str(info.folder), "manifest_sha256": info.manifest_sha256}))
    return 0


if __name__ == "__main__":
    sys.exit(run_main("lab.checkpoint", main))
