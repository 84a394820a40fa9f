"""The production command line, strictly: no unknown flag, no abbreviation, every value checked.

Stricter than vLLM where leniency would hide a mistake: abbreviated flags and suffixed numbers
(132k is 132,000 there, 132K is 135,168) are refused, and a wrong parser name or speculative key
ends the program at once, not after a part of the boot.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from engine_standin.checkpoint import Shape, read_shape

PROGRAM = "api_server.py"
MAX_DEPTH = 15  # 16 draft tokens and more gave corrupt output
DTYPES = ("auto", "bfloat16", "float", "float16", "float32", "half")
BACKENDS = ("FLASH_ATTN_V100", "TRITON_ATTN")
REASONING_PARSERS = ("deepseek_r1", "qwen3")
TOOL_PARSERS = ("hermes", "qwen3_coder", "qwen3_xml")
Json = dict[str, Any]


@dataclass(frozen=True)
class Arguments:
    """The validated command line. Lengths in tokens, times in seconds."""

    model: str
    served_names: tuple[str, ...]
    dtype: str
    attention_backend: str
    tensor_parallel: int
    gpu_memory_utilization: float
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    image_limit: int
    thinking: bool
    reasoning_parser: str | None
    tool_parser: str | None
    depth: int
    host: str
    port: int
    shutdown_timeout: int
    given: Mapping[str, object]
    shape: Shape


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def _whole(low: int, high: int | None = None) -> Callable[[str], int]:
    def convert(text: str) -> int:
        number = int(text) if text.isdecimal() else low - 1
        if number < low or (high is not None and number > high):
            bound = f"{low} or more" if high is None else f"{low} to {high}"
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of {bound}")
        return number

    return convert


def _utilization(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.0 < value <= 1.0:
        raise argparse.ArgumentTypeError(f"{text!r} is not in (0, 1]")
    return value


def _capture_sizes(value: object) -> bool:
    return isinstance(value, list) and all(type(size) is int and size > 0 for size in value)


def _one_of(*values: object) -> Callable[[object], bool]:
    return lambda value: value in values


def _count(value: object) -> bool:
    return type(value) is int and value >= 0


def _depth(value: object) -> bool:
    return type(value) is int and 1 <= value <= MAX_DEPTH


def _flag(value: object) -> bool:
    return isinstance(value, bool)


MM_KEYS = {"image": _count, "video": _count, "audio": _count}
TEMPLATE_KEYS = {"enable_thinking": _flag}
COMPILATION_KEYS = {
    "cudagraph_capture_sizes": _capture_sizes,
    "cudagraph_mode": _one_of(
        "NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"
    ),
    "mode": _one_of(0, 1, 2, 3),
}
SPECULATIVE_KEYS = {
    "method": _one_of("mtp", "qwen3_5_mtp"),
    "num_speculative_tokens": _depth,
    "draft_sample_method": _one_of("greedy", "probabilistic"),
    "use_local_argmax_reduction": _flag,
}


def _json_object(keys: Mapping[str, Callable[[object], bool]]) -> Callable[[str], Json]:
    def convert(text: str) -> Json:
        try:
            value = json.loads(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from error
        if not isinstance(value, dict):
            raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object")
        for key, entry in value.items():
            if key not in keys:
                raise argparse.ArgumentTypeError(f"unknown key {key!r}; known: {sorted(keys)}")
            if not keys[key](entry):
                raise argparse.ArgumentTypeError(f"{key}: {entry!r} is not valid")
        return value

    return convert


def make_parser() -> argparse.ArgumentParser:
    """The parser: exactly the flags of the production line."""
    parser = _Parser(prog=PROGRAM, allow_abbrev=False, description="Lab stand-in for the engine")
    add = parser.add_argument
    add("--model", required=True)
    add("--served-model-name", nargs="+")
    add("--trust-remote-code", action="store_true")
    add("--dtype", choices=DTYPES, default="auto")
    add("--attention-backend", choices=BACKENDS, default="FLASH_ATTN_V100")
    add("--tensor-parallel-size", type=_whole(1, 4), default=1)
    add("--gpu-memory-utilization", type=_utilization, default=0.9)
    add("--max-model-len", type=_whole(1))
    add("--max-num-seqs", type=_whole(1), default=256)
    add("--max-num-batched-tokens", type=_whole(1), default=8192)
    add("--limit-mm-per-prompt", type=_json_object(MM_KEYS), default={})
    add("--default-chat-template-kwargs", type=_json_object(TEMPLATE_KEYS), default={})
    add("--reasoning-parser", choices=REASONING_PARSERS)
    add("--enable-auto-tool-choice", action="store_true")
    add("--tool-call-parser", choices=TOOL_PARSERS)
    add("--compilation-config", type=_json_object(COMPILATION_KEYS), default={})
    add("--speculative-config", type=_json_object(SPECULATIVE_KEYS))
    add("--host", default="0.0.0.0")
    add("--port", type=_whole(1, 65535), default=8000)
    add("--shutdown-timeout", type=_whole(0), default=0)
    return parser


def parse(argv: Sequence[str]) -> Arguments:
    """Parse and check a command line; a mistake ends the program with exit code 2."""
    parser = make_parser()
    options = parser.parse_args(argv)
    given = {key: value for key, value in vars(options).items() if value != parser.get_default(key)}
    try:
        shape = read_shape(options.model, options.tensor_parallel_size)
        max_model_len = options.max_model_len or shape.positions
        if max_model_len > shape.positions:
            raise ValueError(
                f"--max-model-len {max_model_len} is above the model's {shape.positions} positions"
            )
        if options.max_num_batched_tokens < options.max_num_seqs:
            raise ValueError("--max-num-batched-tokens is below --max-num-seqs")
        if options.enable_auto_tool_choice and not options.tool_call_parser:
            raise ValueError("--enable-auto-tool-choice requires --tool-call-parser")
        speculative = options.speculative_config
        if speculative is not None and not {"method", "num_speculative_tokens"} <= set(speculative):
            raise ValueError("--speculative-config needs method and num_speculative_tokens")
    except ValueError as error:
        parser.error(str(error))
    return Arguments(
        model=options.model,
        served_names=tuple(options.served_model_name or (options.model,)),
        dtype=options.dtype,
        attention_backend=options.attention_backend,
        tensor_parallel=options.tensor_parallel_size,
        gpu_memory_utilization=options.gpu_memory_utilization,
        max_model_len=max_model_len,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        image_limit=options.limit_mm_per_prompt.get("image", 1),
        thinking=options.default_chat_template_kwargs.get("enable_thinking", True),
        reasoning_parser=options.reasoning_parser,
        tool_parser=options.tool_call_parser if options.enable_auto_tool_choice else None,
        depth=speculative["num_speculative_tokens"] if speculative else 0,
        host=options.host,
        port=options.port,
        shutdown_timeout=options.shutdown_timeout,
        given=given,
        shape=shape,
    )
