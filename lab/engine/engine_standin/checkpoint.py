"""What the stand-in reads of a checkpoint: the dimensions in config.json."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FULL_ATTENTION = "full_attention"


@dataclass(frozen=True)
class Fused:
    """A fused FP8 module on one rank: y[N] = W[N, K] x, W being stacked from `widths` rows."""

    layer: str
    k: int
    n: int
    widths: tuple[int, ...]

    @property
    def refusal(self) -> str | None:
        """Why the QPN8 kernel cannot take it (K in 64s, every slice in 32s), or None."""
        if self.k % 64:
            return f"K%64={self.k % 64}"
        uneven = [width for width in self.widths if width % 32]
        return f"slice%32={uneven[0] % 32}" if uneven else None


@dataclass(frozen=True)
class Shape:
    """Per-rank dimensions of a Qwen3.5-family checkpoint."""

    layers: int
    hidden: int
    vocabulary: int  # rows of lm_head on one rank
    intermediate: int  # MLP columns on one rank
    queries_per_kv: int
    positions: int
    fp8_kv_directive: bool
    fused: tuple[Fused, ...]


def _share(total: int, ranks: int, what: str) -> int:
    if total % ranks:
        raise ValueError(f"--tensor-parallel-size {ranks} does not divide {what} ({total})")
    return total // ranks


def shape_of(config: dict[str, Any], ranks: int) -> Shape:
    """Per-rank dimensions from a wrapper's config.json.

    Raises:
        KeyError: a field is missing.
        ValueError: `ranks` does not divide a dimension, or this is not the wrapper.
    """
    architectures = config.get("architectures", [])
    if "Qwen3_5ForConditionalGeneration" not in architectures:
        raise ValueError(
            f"architectures {architectures} is not supported: expected the vision-language "
            "wrapper Qwen3_5ForConditionalGeneration"
        )
    text = config["text_config"]
    layers, hidden, head = text["num_hidden_layers"], text["hidden_size"], text["head_dim"]
    heads, kv_heads = text["num_attention_heads"], text["num_key_value_heads"]
    interval = text.get("full_attention_interval", 4)
    kinds = text.get("layer_types") or [
        "linear_attention" if (index + 1) % interval else FULL_ATTENTION for index in range(layers)
    ]
    query = _share(heads, ranks, "the attention heads") * head
    key_value = max(1, kv_heads // ranks) * head
    gdn_key = _share(text["linear_num_key_heads"], ranks, "the GDN key heads")
    gdn_key *= text["linear_key_head_dim"]
    gdn_value = _share(text["linear_num_value_heads"], ranks, "the GDN value heads")
    gdn_value *= text["linear_value_head_dim"]
    fused: list[Fused] = []
    stacked: tuple[int, ...]
    for index, kind in enumerate(kinds):
        place = f"language_model.model.layers.{index}"
        if kind == FULL_ATTENTION:
            # q_proj carries query and gate: twice the heads.
            stacked, width, name = (2 * query, key_value, key_value), query, "self_attn"
            entry, leave = "qkv_proj", "o_proj"
        else:
            stacked, width, name = (
                (gdn_key, gdn_key, gdn_value, gdn_value),
                gdn_value,
                "linear_attn",
            )
            entry, leave = "in_proj_qkvz", "out_proj"
        fused.append(Fused(f"{place}.{name}.{entry}", hidden, sum(stacked), stacked))
        fused.append(Fused(f"{place}.{name}.{leave}", width, hidden, (hidden,)))
    return Shape(
        layers=layers,
        hidden=hidden,
        vocabulary=_share(text["vocab_size"], ranks, "the vocabulary"),
        intermediate=_share(text["intermediate_size"], ranks, "the MLP"),
        queries_per_kv=heads // kv_heads,
        positions=text.get("max_position_embeddings", 262144),
        fp8_kv_directive="kv_cache_scheme" in config.get("quantization_config", {}),
        fused=tuple(fused),
    )


def read_shape(model: str, ranks: int) -> Shape:
    """Read `model`/config.json.

    Raises:
        ValueError: the folder, the file or a field is missing or wrong; the message names it.
    """
    path = Path(model) / "config.json"
    try:
        return shape_of(json.loads(path.read_text()), ranks)
    except OSError as error:
        raise ValueError(f"--model: cannot read {path}: {error.strerror}") from error
    except KeyError as error:
        raise ValueError(f"--model: {path} has no field {error}") from error
    except (TypeError, AttributeError) as error:
        raise ValueError(f"--model: {path} is not a model configuration: {error}") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"--model: {path} is not JSON: {error}") from error
    except ValueError as error:
        raise ValueError(f"--model: {path}: {error}") from error
