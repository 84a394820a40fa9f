"""The expected census: which tensors a checkpoint of this architecture holds.

Everything follows from the dimensions in config.json: Qwen3_5ForConditionalGeneration with NVFP4
MLPs and output head, FP8 attention, and BF16 for the rest (norms, embeddings, MTP, vision).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from checkpoint.dimensions import FULL, NVFP4_BLOCK, Architecture, Text, Vision
from checkpoint.header import Tensor
from checkpoint.strict import few

TRUNK = "model.language_model."
VISION = "model.visual."
MTP = "mtp."
BARE_TRUNK = "model."  # what a quantiser's export has where the wrapper has TRUNK
INPUT_SCALE = ".input_scale"
GROUPS = ("trunk", "vision", "mtp", "input_scale")
Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Census:
    """Counts of a set of tensors: by group, by dtype, and bytes of data."""

    tensors: int
    bytes: int
    groups: dict[str, int]
    dtypes: dict[str, int]

    def as_json(self) -> dict[str, object]:
        """The form in which a manifest records it."""
        return {
            "tensors": self.tensors,
            "bytes": self.bytes,
            "groups": self.groups,
            "dtypes": self.dtypes,
        }


@dataclass(frozen=True)
class Difference:
    """Names of tensors that are missing, not expected, or of another dtype or shape."""

    missing: list[str] = field(default_factory=list)
    extra: list[str] = field(default_factory=list)
    differing: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.missing or self.extra or self.differing)

    def lines(self) -> list[str]:
        """One line for each kind of difference: a count and the first names."""
        kinds = (("missing", self.missing), ("extra", self.extra), ("differing", self.differing))
        return [f"{len(names)} {kind}: {few(names)}" for kind, names in kinds if names]


def expected_tensors(arch: Architecture) -> Tensors:
    """Every tensor of a complete checkpoint, or of a trunk alone, by name."""
    if arch.vision is None:
        return {
            bare(name): tensor
            for name, tensor in _trunk(arch.text).items()
            if group_of(name) == "trunk"
        }
    return {**_trunk(arch.text), **_mtp(arch.text), **_vision(arch.vision)}


def nested(name: str) -> str:
    """A trunk's tensor as the wrapper names it: `model.X` becomes `model.language_model.X`."""
    return TRUNK + name[len(BARE_TRUNK) :] if name.startswith(BARE_TRUNK) else name


def bare(name: str) -> str:
    """A tensor of the wrapper's trunk as a quantiser's export names it."""
    return BARE_TRUNK + name[len(TRUNK) :] if name.startswith(TRUNK) else name


def quantised_modules(arch: Architecture) -> dict[str, str]:
    """The quantised modules and their algorithm, NVFP4 or FP8, by name without `.weight`."""
    return {
        name.removesuffix(".weight"): "NVFP4" if tensor.dtype == "U8" else "FP8"
        for name, tensor in expected_tensors(arch).items()
        if name.endswith(".weight") and tensor.dtype in ("U8", "F8_E4M3")
    }


def draft_modules(arch: Architecture) -> list[str]:
    """The matrices of the MTP draft head, by name without `.weight`: none may be quantised."""
    return [
        name.removesuffix(".weight")
        for name, tensor in _mtp(arch.text).items()
        if len(tensor.shape) == 2
    ]


def group_of(name: str) -> str:
    """The group that a tensor is counted in, one of GROUPS."""
    if name.startswith(VISION):
        return "vision"
    if name.startswith(MTP):
        return "mtp"
    return "input_scale" if name.endswith(INPUT_SCALE) else "trunk"


def count(tensors: Mapping[str, Tensor]) -> Census:
    """The census of `tensors`."""
    groups = Counter(group_of(name) for name in tensors)
    dtypes = Counter(tensor.dtype for tensor in tensors.values())
    return Census(
        tensors=len(tensors),
        bytes=sum(tensor.nbytes for tensor in tensors.values()),
        groups={group: groups[group] for group in GROUPS},
        dtypes=dict(sorted(dtypes.items())),
    )


def compare(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> Difference:
    """Where `found` differs from `expected`."""
    return Difference(
        missing=[name for name in expected if name not in found],
        extra=[name for name in found if name not in expected],
        differing=[
            f"{name} ({found[name]} instead of {tensor})"
            for name, tensor in expected.items()
            if name in found and found[name] != tensor
        ],
    )


def _bf16(name: str, *shape: int) -> Tensors:
    return {name: Tensor("BF16", shape)}


def _bf16_with_bias(name: str, out: int, *rest: int) -> Tensors:
    return _bf16(f"{name}.weight", out, *rest) | _bf16(f"{name}.bias", out)


def _scalars(name: str, *kinds: str) -> Tensors:
    return {f"{name}.{kind}": Tensor("F32", ()) for kind in kinds}


def _nvfp4(name: str, out: int, width: int) -> Tensors:
    """Two 4-bit weights a byte, a scale a block, one scale over all, one for the input."""
    return {
        f"{name}.weight": Tensor("U8", (out, width // 2)),
        f"{name}.weight_scale": Tensor("F8_E4M3", (out, width // NVFP4_BLOCK)),
        **_scalars(name, "weight_scale_2", "input_scale"),
    }


def _fp8(name: str, out: int, width: int) -> Tensors:
    return {
        f"{name}.weight": Tensor("F8_E4M3", (out, width)),
        **_scalars(name, "weight_scale", "input_scale"),
    }


def _attention_projections(text: Text) -> dict[str, tuple[int, int]]:
    """Shapes [out, in] of an attention layer's projections; q holds query and gate."""
    heads = text.num_attention_heads * text.head_dim
    kv_heads = text.num_key_value_heads * text.head_dim
    return {
        "q_proj": (2 * heads, text.hidden_size),
        "k_proj": (kv_heads, text.hidden_size),
        "v_proj": (kv_heads, text.hidden_size),
        "o_proj": (text.hidden_size, heads),
    }


def _mlp_projections(text: Text) -> dict[str, tuple[int, int]]:
    return {
        "gate_proj": (text.intermediate_size, text.hidden_size),
        "up_proj": (text.intermediate_size, text.hidden_size),
        "down_proj": (text.hidden_size, text.intermediate_size),
    }


def _norms(layer: str, text: Text) -> Tensors:
    return _bf16(f"{layer}.input_layernorm.weight", text.hidden_size) | _bf16(
        f"{layer}.post_attention_layernorm.weight", text.hidden_size
    )


def _qk_norms(layer: str, text: Text) -> Tensors:
    return _bf16(f"{layer}.self_attn.q_norm.weight", text.head_dim) | _bf16(
        f"{layer}.self_attn.k_norm.weight", text.head_dim
    )


def _gated_delta_net(name: str, text: Text) -> Tensors:
    keys = text.linear_num_key_heads * text.linear_key_head_dim
    values = text.linear_num_value_heads * text.linear_value_head_dim
    qkv = 2 * keys + values
    tensors = _fp8(f"{name}.in_proj_qkv", qkv, text.hidden_size)
    tensors |= _fp8(f"{name}.in_proj_z", values, text.hidden_size)
    tensors |= _fp8(f"{name}.out_proj", text.hidden_size, values)
    for gate in ("in_proj_a", "in_proj_b"):
        tensors |= _bf16(f"{name}.{gate}.weight", text.linear_num_value_heads, text.hidden_size)
    for vector in ("A_log", "dt_bias"):
        tensors |= _bf16(f"{name}.{vector}", text.linear_num_value_heads)
    tensors |= _bf16(f"{name}.norm.weight", text.linear_value_head_dim)
    return tensors | _bf16(f"{name}.conv1d.weight", qkv, 1, text.linear_conv_kernel_dim)


def _trunk(text: Text) -> Tensors:
    tensors = _bf16(f"{TRUNK}embed_tokens.weight", text.vocab_size, text.hidden_size)
    for number, kind in enumerate(text.layer_types):
        layer = f"{TRUNK}layers.{number}"
        tensors |= _norms(layer, text)
        if kind == FULL:
            for name, (out, width) in _attention_projections(text).items():
                tensors |= _fp8(f"{layer}.self_attn.{name}", out, width)
            tensors |= _qk_norms(layer, text)
        else:
            tensors |= _gated_delta_net(f"{layer}.linear_attn", text)
        for name, (out, width) in _mlp_projections(text).items():
            tensors |= _nvfp4(f"{layer}.mlp.{name}", out, width)
    tensors |= _bf16(f"{TRUNK}norm.weight", text.hidden_size)
    return tensors | _nvfp4("lm_head", text.vocab_size, text.hidden_size)


def _mtp(text: Text) -> Tensors:
    hidden = text.hidden_size
    tensors = _bf16("mtp.fc.weight", hidden, 2 * hidden)
    for norm in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
        tensors |= _bf16(f"mtp.{norm}.weight", hidden)
    for number in range(text.mtp_num_hidden_layers):
        layer = f"mtp.layers.{number}"
        tensors |= _norms(layer, text) | _qk_norms(layer, text)
        for name, shape in _attention_projections(text).items():
            tensors |= _bf16(f"{layer}.self_attn.{name}.weight", *shape)
        for name, shape in _mlp_projections(text).items():
            tensors |= _bf16(f"{layer}.mlp.{name}.weight", *shape)
    return tensors


def _vision(vision: Vision) -> Tensors:
    hidden, wide = vision.hidden_size, vision.intermediate_size
    merged = hidden * vision.spatial_merge_size**2
    patch = (vision.in_channels, vision.temporal_patch_size, vision.patch_size, vision.patch_size)
    tensors = _bf16_with_bias(f"{VISION}patch_embed.proj", hidden, *patch)
    tensors |= _bf16(f"{VISION}pos_embed.weight", vision.num_position_embeddings, hidden)
    for number in range(vision.depth):
        block = f"{VISION}blocks.{number}"
        tensors |= _bf16_with_bias(f"{block}.norm1", hidden)
        tensors |= _bf16_with_bias(f"{block}.norm2", hidden)
        tensors |= _bf16_with_bias(f"{block}.attn.qkv", 3 * hidden, hidden)
        tensors |= _bf16_with_bias(f"{block}.attn.proj", hidden, hidden)
        tensors |= _bf16_with_bias(f"{block}.mlp.linear_fc1", wide, hidden)
        tensors |= _bf16_with_bias(f"{block}.mlp.linear_fc2", hidden, wide)
    tensors |= _bf16_with_bias(f"{VISION}merger.norm", hidden)
    tensors |= _bf16_with_bias(f"{VISION}merger.linear_fc1", merged, merged)
    return tensors | _bf16_with_bias(f"{VISION}merger.linear_fc2", vision.out_hidden_size, merged)
