"""The miniature's config files, in the form that transformers and the engine read.

Every dimension that four ranks share divides by four, and what is left of each stays a multiple of
64 (in) or 32 (out), as the engine's fast kernels want it.
"""

from __future__ import annotations

from dataclasses import dataclass

from checkpoint import census, manifest
from checkpoint.census import Tensors
from checkpoint.dimensions import FULL, LINEAR, NVFP4_BLOCK, TEXT_ONLY, WRAPPER, architecture

FULL_ATTENTION_INTERVAL = 4
LAYERS = 4
HIDDEN = 128

TEXT_CONFIG: dict[str, object] = {
    "model_type": TEXT_ONLY,
    "dtype": "bfloat16",
    "num_hidden_layers": LAYERS,
    "full_attention_interval": FULL_ATTENTION_INTERVAL,
    "layer_types": [LINEAR if (n + 1) % FULL_ATTENTION_INTERVAL else FULL for n in range(LAYERS)],
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
VISION_CONFIG: dict[str, object] = {
    "model_type": WRAPPER,
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
class Size:
    """How large a miniature is: `scale` multiplies the hidden and the MLP's width."""

    scale: int = 1
    # 10240 entries a rank: the engine's log tells the output head from other modules by a size of
    # five digits or more.
    vocabulary: int = 40960

    @classmethod
    def of_bytes(cls, least_bytes: int) -> Size:
        """The smallest with at least so many bytes of tensors."""
        scale = 1
        while census.count(expected(config(cls(scale)))).bytes < least_bytes:
            scale += 1
        return cls(scale)


def config(size: Size = Size()) -> dict[str, object]:
    """The miniature's config.json, in the form that transformers and the engine read."""
    text = _text_config(size)
    base: dict[str, object] = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": WRAPPER,
        "tie_word_embeddings": False,
        "image_token_id": 2,
        "video_token_id": 3,
        "vision_start_token_id": 4,
        "vision_end_token_id": 5,
        "text_config": text,
        "vision_config": VISION_CONFIG | {"out_hidden_size": text["hidden_size"]},
    }
    return base | {"quantization_config": _quantisation(base, NOT_QUANTISED)}


def trunk_config(size: Size = Size()) -> dict[str, object]:
    """The config.json of the trunk alone, as the quantiser exports it."""
    base = {"architectures": ["Qwen3_5ForCausalLM"], **_text_config(size)}
    return base | {"quantization_config": _quantisation(base, ["model.embed_tokens"])}


def _text_config(size: Size) -> dict[str, object]:
    return TEXT_CONFIG | {
        "hidden_size": HIDDEN * size.scale,
        "intermediate_size": 4 * HIDDEN * size.scale,
        "vocab_size": size.vocabulary,
    }


def expected(settings: dict[str, object]) -> Tensors:
    """The tensors that this config.json asks for."""
    return census.expected_tensors(architecture(settings, manifest.CONFIG))


def _quantisation(base: dict[str, object], ignore: list[str]) -> dict[str, object]:
    """The `quantization_config` of the config.json that begins with `base`."""
    modules = census.quantised_modules(
        architecture(base | {"quantization_config": {"quant_method": "modelopt"}}, manifest.CONFIG)
    )
    return {
        "quant_method": "modelopt",
        "quant_algo": "MIXED_PRECISION",
        "kv_cache_scheme": {"num_bits": 8, "type": "float"},
        "ignore": ignore,
        "quantized_layers": {
            name: {"quant_algo": algo} | ({"group_size": NVFP4_BLOCK} if algo == "NVFP4" else {})
            for name, algo in modules.items()
        },
    }


def hf_quant_config(settings: dict[str, object]) -> dict[str, object]:
    """The hf_quant_config.json that goes with a config.json."""
    quantisation = settings["quantization_config"]
    assert isinstance(quantisation, dict)
    return {
        "producer": {"name": "modelopt", "version": "miniature"},
        "quantization": {
            "quant_algo": quantisation["quant_algo"],
            "kv_cache_quant_algo": "FP8",
            "exclude_modules": quantisation["ignore"],
            "quantized_layers": quantisation["quantized_layers"],
        },
    }
