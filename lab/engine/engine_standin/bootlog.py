"""The log lines that a boot leaves, as text. Pure, except for `emit`.

A line is (place, message), place being the source file and line number of vLLM's prefix.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterator, Mapping

from engine_standin.arguments import Arguments
from engine_standin.checkpoint import Fused
from engine_standin.simulation import Counters
from engine_standin.timing import Timing

Line = tuple[str, str]
GIB = 1 << 30


def emit(role: str, pid: int, line: Line, level: str = "INFO") -> None:
    """Write one line with vLLM's prefix to standard output, in one system call."""
    place, message = line
    stamp = time.strftime("%m-%d %H:%M:%S")
    text = f"({role} pid={pid}) {level} {stamp} [{place}] {message}\n"
    os.write(1, text.encode())


def server_lines(arguments: Arguments, faults: Collection[str]) -> Iterator[Line]:
    """What the API server prints first."""
    given = dict(arguments.given)
    if "fail-gate-2" in faults:
        given.pop("speculative_config", None)
    yield "api_server.py:1346", "vLLM API server version 1.2.2 (lab stand-in, no model is loaded)"
    yield "utils.py:263", f"non-default args: {given}"


def core_lines(arguments: Arguments, faults: Collection[str]) -> Iterator[Line]:
    """What the engine core prints before its workers load."""
    speculative = "None"
    if arguments.depth:
        speculative = f"SpeculativeConfig(method='mtp', num_spec_tokens={arguments.depth})"
    cache = "" if "fail-gate-5" in faults else " kv_cache_dtype=auto,"
    yield (
        "core.py:93",
        f"Initializing a V1 LLM engine with config: model='{arguments.model}', "
        f"speculative_config={speculative}, dtype={arguments.dtype}, "
        f"max_seq_len={arguments.max_model_len}, "
        f"tensor_parallel_size={arguments.tensor_parallel}, quantization=modelopt_mixed,{cache} "
        f"served_model_name={arguments.served_names[0]}",
    )


def census_load(number: int, module: Fused) -> Line:
    """The census line of one fused FP8 module on one rank."""
    head = "QPN8_CENSUS_LOAD"
    if module.refusal:
        return "modelopt.py:512", f"{head} layer={module.layer} eligible=NO reason={module.refusal}"
    scales = [0.0078125] * len(module.widths)
    return (
        "modelopt.py:512",
        f"{head} n={number} layer={module.layer} dtype=torch.float8_e4m3fn K={module.k} "
        f"N={module.n} widths={list(module.widths)} scales={scales} split=16 nacc=2 eligible=YES",
    )


def worker_lines(arguments: Arguments, rank: int, faults: Collection[str]) -> Iterator[Line]:
    """What the worker of one rank prints while it loads the checkpoint."""
    shape = arguments.shape
    yield "cuda.py:411", f"Using {arguments.attention_backend} backend."
    if shape.fp8_kv_directive and "fail-gate-6" not in faults:
        yield (
            "modelopt.py:188",
            "Ignoring the checkpoint's kv_cache quantization directive (fp8_e4m3): "
            "FP16 KV cache on sm_70",
        )
    if "fail-gate-4" in faults and rank == 0:
        yield "marlin.py:640", "lm_head: falling back to requant pack"
    modules = list(shape.fused)
    if "fail-gate-10" in faults and rank == 0:
        modules.pop()
    for number, module in enumerate(modules, start=1):
        if "refuse-module" in faults and rank == 0 and number == 1:
            reason = "no packed scales"
            yield (
                "modelopt.py:520",
                f"QPN8_CENSUS_LOAD layer={module.layer} eligible=NO {reason=!s}",
            )
        else:
            yield census_load(number, module)
    eligible = sum(module.refusal is None for module in modules)
    yield "modelopt.py:530", f"SM70 FP8 census: {eligible} of {len(modules)} fused modules on QPN8"
    if eligible:
        yield "modelopt.py:541", f"QPN8 prepack INVERTED and byte-identical: {eligible} modules"
    if "fail-gate-7" in faults and rank == 0:
        yield "flash_attn_v100.py:77", "decode falls back to scalar_paged"


def memory_lines(arguments: Arguments, timing: Timing) -> Iterator[Line]:
    """The KV pool, in vLLM's words.

    Raises:
        ValueError: the pool cannot hold one request of full length; the message is vLLM's.
    """
    tokens = timing.pool(arguments.gpu_memory_utilization, arguments.max_num_batched_tokens)
    if tokens <= 0:
        raise ValueError(
            "No available memory for the cache blocks. Try increasing `gpu_memory_utilization` "
            "when initializing the engine."
        )

    def card_gib(count: int) -> float:
        return count * timing.kv_bytes_per_token / arguments.tensor_parallel / GIB

    length = arguments.max_model_len
    if tokens < length:
        raise ValueError(
            f"To serve at least one request with the model's max seq len ({length}), "
            f"{card_gib(length):.2f} GiB KV cache is needed, which is larger than the available "
            f"KV cache memory ({card_gib(tokens):.2f} GiB). Try increasing "
            "`gpu_memory_utilization` or decreasing `max_model_len`."
        )
    yield "gpu_worker.py:355", f"Available KV cache memory: {card_gib(tokens):.2f} GiB"
    yield "kv_cache_utils.py:1229", f"GPU KV cache size: {tokens:,} tokens"
    yield (
        "kv_cache_utils.py:1234",
        f"Maximum concurrency for {length:,} tokens per request: {tokens / length:.2f}x",
    )


def first_use_lines(
    arguments: Arguments, environment: Mapping[str, str], faults: Collection[str]
) -> Iterator[Line]:
    """What a rank prints when the first request runs: routes, census of runs, attention path."""
    shape, rows = arguments.shape, arguments.depth + 1
    routes = [(2 * shape.intermediate, shape.hidden), (shape.hidden, shape.intermediate)]
    if "fail-gate-3" not in faults:
        routes.append((shape.vocabulary, shape.hidden))
    for n, k in routes:
        route = "qpn2" if "fail-gate-9" not in faults else "qpn1"
        yield "marlin.py:402", f"Skinny route map: M={rows} N={n} K={k} -> {route}"
    fast = "qpn8" if rows <= 8 else "qpn8-mt2"
    dims = dict.fromkeys((m.k, m.n) for m in shape.fused if not m.refusal)
    for k, n in dims:
        for m, route in ((64, "qpn8-prefill-reconstruct"), (rows, fast)):
            if route == fast and "fail-gate-11" in faults:
                continue
            run = f"QPN8_CENSUS_RUN K={k} N={n} M={m} route={route} split=16 nacc=2"
            yield "modelopt.py:588", run
    fast_attention = arguments.attention_backend == "FLASH_ATTN_V100"
    if arguments.depth and fast_attention and "fail-gate-8" not in faults:
        partition = environment.get("VLLM_FLASH_V100_DECODE_PARTITION_SIZE", "256")
        yield (
            "flash_attn_v100.py:214",
            f"FLASH_ATTN_V100 MTP verifier XQA path active (rows={rows}, "
            f"q_per_kv={shape.queries_per_kv}, partition_hint={partition}, mtp5_dual_cta=False).",
        )


def acceptance_line(counters: Counters) -> Line:
    """The running line on speculation; `counters` must hold at least one draft."""
    length = 1 + counters.accepted_tokens / counters.drafts
    positions = (count / counters.drafts for count in counters.accepted_per_position)
    return (
        "metrics.py:100",
        f"SpecDecoding metrics: Mean acceptance length: {length:.2f}, "
        f"Accepted: {counters.accepted_tokens} tokens, Drafted: {counters.draft_tokens} tokens, "
        f"Per-position acceptance rate: {', '.join(f'{rate:.3f}' for rate in positions)}, "
        f"Avg Draft acceptance rate: {counters.accepted_tokens / counters.draft_tokens:.1%}",
    )
