"""The dimensions in a config.json, from which every tensor of a checkpoint follows.

Two layouts: the wrapper (Qwen3_5ForConditionalGeneration, what the engine serves), and the trunk
alone as a quantiser exports it (text dimensions at the top level, no vision tower).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hostlib.errors import HostError

from checkpoint.strict import as_count, as_object

WRAPPER, TEXT_ONLY = "qwen3_5", "qwen3_5_text"  # the two values of model_type
NVFP4_BLOCK = 16  # elements that share one F8_E4M3 scale
REPEATS = ("depth", "mtp_num_hidden_layers")  # how often a block repeats, not how large it is
MOST_LAYERS = 4096
MOST_SIZE = 1 << 24
FULL, LINEAR = "full_attention", "linear_attention"


@dataclass(frozen=True)
class Text:
    """Dimensions of the language model, named as in config.json's text_config."""

    hidden_size: int
    intermediate_size: int
    vocab_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_conv_kernel_dim: int
    mtp_num_hidden_layers: int
    layer_types: tuple[str, ...]


@dataclass(frozen=True)
class Vision:
    """Dimensions of the vision tower, named as in config.json's vision_config."""

    depth: int
    hidden_size: int
    intermediate_size: int
    patch_size: int
    temporal_patch_size: int
    spatial_merge_size: int
    num_position_embeddings: int
    in_channels: int
    out_hidden_size: int


@dataclass(frozen=True)
class Architecture:
    """The dimensions that determine every tensor of a checkpoint; no vision: the trunk alone."""

    text: Text
    vision: Vision | None


def architecture(config: Mapping[str, object], where: str) -> Architecture:
    """The dimensions in a config.json.

    Raises:
        HostError: another kind of model or quantisation, or a dimension missing or impossible.
    """
    kind = config.get("model_type")
    if kind not in (WRAPPER, TEXT_ONLY):
        raise HostError(
            f"{where}: model_type is not {WRAPPER} or {TEXT_ONLY}; this is another kind of model"
        )
    quantisation = as_object(config.get("quantization_config"), f"{where}: quantization_config")
    method = quantisation.get("quant_method")
    if method != "modelopt":
        raise HostError(
            f"{where}: a {str(method)[:100]!r} export: the engine has no fast FP8 path for it;"
            " use the modelopt export"
        )
    if kind == TEXT_ONLY:
        return Architecture(_text(config, f"{where}: "), None)
    vision = as_object(config.get("vision_config"), f"{where}: vision_config")
    return Architecture(
        _text(
            as_object(config.get("text_config"), f"{where}: text_config"), f"{where}: text_config."
        ),
        Vision(
            **{
                key: _size(vision, key, f"{where}: vision_config.")
                for key in Vision.__annotations__
            }
        ),
    )


def _text(part: Mapping[str, object], where: str) -> Text:
    sizes = {key: _size(part, key, where) for key in Text.__annotations__ if key != "layer_types"}
    for key in ("hidden_size", "intermediate_size"):
        if sizes[key] % NVFP4_BLOCK:
            raise HostError(f"{where}{key} is not a multiple of {NVFP4_BLOCK}")
    return Text(**sizes, layer_types=_layer_types(part, where))


def _size(part: Mapping[str, object], key: str, where: str) -> int:
    most = MOST_LAYERS if key in REPEATS else MOST_SIZE
    return as_count(part.get(key), f"{where}{key}", least=1, most=most)


def _layer_types(text: Mapping[str, object], where: str) -> tuple[str, ...]:
    layers = as_count(
        text.get("num_hidden_layers"), f"{where}num_hidden_layers", least=1, most=MOST_LAYERS
    )
    listed = text.get("layer_types")
    if listed is None:
        interval = as_count(
            text.get("full_attention_interval"), f"{where}full_attention_interval", least=1
        )
        return tuple(LINEAR if (n + 1) % interval else FULL for n in range(layers))
    if (
        not isinstance(listed, list)
        or len(listed) != layers
        or any(kind not in (FULL, LINEAR) for kind in listed)
    ):
        raise HostError(f"{where}layer_types: wants {layers} of {FULL!r} or {LINEAR!r}")
    return tuple(listed)
