"""What the engine asks of a config before it boots: whole heads on each rank, the fast FP8 kernel
for every module that it fuses (gate 10 of a boot), and a draft head that is left unquantised.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass

from hostlib.errors import HostError

from checkpoint import census
from checkpoint.dimensions import FULL, Architecture, Text
from checkpoint.strict import as_object, as_text, few

# The cards of the engine's host. What suits four also suits two or one, as settings may say.
TENSOR_PARALLEL_SIZE = 4
# What the kernel gemm_qpn8 takes on one rank: in-width and each fused slice of the out-width.
QPN8_WIDTH, QPN8_SLICE = 64, 32
# Before a layer: in the wrapper, in a trunk alone, and as the loader itself names its modules.
LAYERS_BELOW = ("model.language_model.", "model.", "language_model.model.", "language_model.")
HEADS = (
    "num_attention_heads",
    "num_key_value_heads",
    "linear_num_key_heads",
    "linear_num_value_heads",
)


@dataclass(frozen=True)
class FusedModule:
    """FP8 projections that the engine stacks into one; sizes on one rank.

    Args:
        name: as the engine's log names it.
        width: in-dimension.
        slices: out-dimensions of the stacked parts.
    """

    name: str
    width: int
    slices: tuple[int, ...]

    def refusal(self) -> str | None:
        """Why gemm_qpn8 does not take it, or None."""
        if self.width % QPN8_WIDTH:
            return f"in-width {self.width} a rank is not a multiple of {QPN8_WIDTH}"
        for size in self.slices:
            if size % QPN8_SLICE:
                return f"slice of {size} rows a rank is not a multiple of {QPN8_SLICE}"
        return None


def fused_modules(text: Text, ranks: int = TENSOR_PARALLEL_SIZE) -> list[FusedModule]:
    """The two fused FP8 modules of each layer; every head count must divide by `ranks`."""
    hidden = text.hidden_size
    queries, kv_heads = (
        heads // ranks * text.head_dim
        for heads in (text.num_attention_heads, text.num_key_value_heads)
    )
    keys = text.linear_num_key_heads // ranks * text.linear_key_head_dim
    values = text.linear_num_value_heads // ranks * text.linear_value_head_dim
    modules: list[FusedModule] = []
    for number, kind in enumerate(text.layer_types):
        layer = f"language_model.model.layers.{number}"
        if kind == FULL:  # the query's rows hold its gate too
            modules += [
                FusedModule(
                    f"{layer}.self_attn.qkv_proj", hidden, (2 * queries, kv_heads, kv_heads)
                ),
                FusedModule(f"{layer}.self_attn.o_proj", queries, (hidden,)),
            ]
        else:
            modules += [
                FusedModule(
                    f"{layer}.linear_attn.in_proj_qkvz", hidden, (keys, keys, values, values)
                ),
                FusedModule(f"{layer}.linear_attn.out_proj", values, (hidden,)),
            ]
    return modules


def check_ranks(text: Text, where: str) -> None:
    """Raise HostError unless the cards share every head and gate 10 will pass."""
    for key in HEADS:
        if getattr(text, key) % TENSOR_PARALLEL_SIZE:
            raise HostError(
                f"{where}: {key} is {getattr(text, key)}, which {TENSOR_PARALLEL_SIZE} cards cannot"
                " share; this model cannot be served here"
            )
    modules = fused_modules(text)
    refused = [(module.name, why) for module in modules if (why := module.refusal())]
    if refused:
        raise HostError(
            f"{where}: gate 10 would fail: {len(refused)} of {len(modules)} fused modules are not"
            f" QPN8-eligible: {refused[0][0]} ({refused[0][1]})",
            *([few([name for name, _ in refused])] if len(refused) > 1 else []),
        )


def check_quantisation(
    settings: Mapping[str, object], unquantised_key: str, arch: Architecture, where: str
) -> None:
    """Raise HostError unless `settings` quantise what the tensors are quantised in, and not MTP.

    Args:
        settings: `quantization_config` of config.json, or `quantization` of hf_quant_config.json.
        unquantised_key: where it lists patterns of modules that are not quantised: `ignore` in
            the first, `exclude_modules` in the second.
    """
    listed = settings.get(unquantised_key)
    if not isinstance(listed, list):
        raise HostError(f"{where}: {unquantised_key}: missing, or not a list")
    patterns = [as_text(entry, f"{where}: {unquantised_key}") for entry in listed]
    quantised = census.quantised_modules(arch)
    draft = census.draft_modules(arch)
    modules = [*draft, *quantised]
    covered = {module for pattern in patterns for module in fnmatch.filter(modules, pattern)}
    uncovered = [module for module in draft if module not in covered]
    if uncovered:
        raise HostError(
            f"{where}: {unquantised_key} does not cover mtp*: {few(uncovered)}; the engine's loader"
            " would take the draft head as quantised and crash"
        )
    if covered & quantised.keys():
        raise HostError(
            f"{where}: {unquantised_key} covers what is quantised: "
            f"{few(sorted(covered & quantised.keys()))}; the engine's loader would crash"
        )
    layers = as_object(settings.get("quantized_layers"), f"{where}: quantized_layers")
    _check_layers(layers, quantised, f"{where}: quantized_layers")


def _check_layers(layers: Mapping[str, object], quantised: Mapping[str, str], where: str) -> None:
    wanted = {_below_wrapper(module): algorithm for module, algorithm in quantised.items()}
    wrong: list[str] = []
    for name, layer in layers.items():
        place = f"{where}: {name[:100]!r}"
        found = as_text(as_object(layer, place).get("quant_algo"), f"{place}: quant_algo")
        asked = wanted.get(_below_wrapper(name), "none")
        if found != asked:
            wrong.append(f"{name} ({found[:100]} instead of {asked})")
    missing = wanted.keys() - {_below_wrapper(name) for name in layers}
    wrong += [f"{module} (missing)" for module in sorted(missing)]
    if wrong:
        raise HostError(
            f"{where}: {len(wrong)} modules are not as the dimensions ask for: {few(wrong)}"
        )


def _below_wrapper(module: str) -> str:
    """The trunk's module without what stands before its layer: quantisers and loaders differ."""
    before, layers, rest = module.partition("layers.")
    return layers + rest if before in LAYERS_BELOW else module
