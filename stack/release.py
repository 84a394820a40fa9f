"""Settings and resolved paths → the release: the engine's command line, environment and gates."""

from __future__ import annotations

import json
from typing import Any

from enginectl.release import FORMAT, release_name

from stack import memory
from stack.places import EnginePlaces
from stack.settings import Engine, EngineHost


def capture_sizes(engine: Engine) -> list[int]:
    """CUDA graph capture sizes in tokens.

    A running sequence steps k+1 tokens, so n sequences step n·(k+1). At least two are captured.
    """
    if engine.cudagraph_capture_sizes is not None:
        return list(engine.cudagraph_capture_sizes)
    step = engine.num_speculative_tokens + 1
    return [step * count for count in range(1, max(2, engine.max_num_seqs) + 1)]


def engine_arguments(settings: EngineHost, model: str) -> list[str]:
    """The engine's own arguments, without interpreter; `model` is the checkpoint's folder."""
    engine = settings.engine
    arguments = [
        "--model", model,
        "--served-model-name", *settings.serving.names,
        "--trust-remote-code",
        "--dtype", engine.dtype,
        "--attention-backend", engine.attention_backend,
        "--tensor-parallel-size", str(engine.tensor_parallel_size),
        "--gpu-memory-utilization", _fraction(engine.gpu_memory_utilization),
        "--max-model-len", str(engine.max_model_len),
        "--max-num-seqs", str(engine.max_num_seqs),
        "--max-num-batched-tokens", str(engine.max_num_batched_tokens),
        "--limit-mm-per-prompt", _json({"image": 0, "video": 0}),
        "--default-chat-template-kwargs", _json({"enable_thinking": engine.enable_thinking}),
        "--reasoning-parser", engine.reasoning_parser,
        "--enable-auto-tool-choice",
        "--tool-call-parser", engine.tool_call_parser,
        "--compilation-config", _json({"cudagraph_capture_sizes": capture_sizes(engine)}),
    ]  # fmt: skip
    if engine.num_speculative_tokens:
        speculation = {
            "method": "mtp",
            "num_speculative_tokens": engine.num_speculative_tokens,
            "draft_sample_method": "greedy",
            "use_local_argmax_reduction": True,
        }
        arguments += ["--speculative-config", _json(speculation)]
    arguments += ["--host", settings.address, "--port", str(settings.serving.port)]
    return [*arguments, "--shutdown-timeout", str(engine.drain_seconds)]


def render_release(
    settings: EngineHost, *, venv: str, toolkit: str, checkpoint: str
) -> dict[str, Any]:
    """The whole release, named by its content.

    Args:
        settings: of the engine's host.
        venv, toolkit, checkpoint: resolved content-addressed folders on the host.
    """
    engine = settings.engine
    python = f"{venv}/bin/python"
    pin = []
    if engine.numa_node is not None:
        node = engine.numa_node
        pin = ["/usr/bin/numactl", f"--cpunodebind={node}", f"--membind={node}"]
    caches = EnginePlaces(settings.storage).caches
    release: dict[str, Any] = {
        "format": FORMAT,
        "engine": engine.name,
        "user": settings.service.user,
        "working_directory": settings.storage.root,
        "argv": [
            *pin,
            python,
            "-m",
            "vllm.entrypoints.openai.api_server",
            *engine_arguments(settings, checkpoint),
        ],
        "env": {
            **engine.environment,
            "CUDA_HOME": toolkit,
            "PATH": f"{toolkit}/bin:{venv}/bin:/usr/local/bin:/usr/bin:/bin",
            "HOME": settings.service.home,
            "LANG": "C.UTF-8",
            "TORCH_EXTENSIONS_DIR": str(caches / "torch_extensions"),
            "VLLM_CACHE_ROOT": str(caches / "vllm"),
        },
        "listen": {"host": settings.address, "port": settings.serving.port},
        "served_names": list(settings.serving.names),
        "paths": {"venv": venv, "toolkit": toolkit, "checkpoint": checkpoint},
        "required_paths": [python, f"{toolkit}/bin/nvcc", f"{checkpoint}/config.json"],
        "address_wait_seconds": engine.address_wait_seconds,
        "boot_deadline_seconds": engine.boot_deadline_seconds,
        "cold_boot_deadline_seconds": engine.cold_boot_deadline_seconds,
        "failed_boots": engine.failed_boots,
        "drain_seconds": engine.drain_seconds,
        "memory": memory.verdict(engine),
        "gates": {
            "mtp_depth": engine.num_speculative_tokens,
            "tensor_parallel": engine.tensor_parallel_size,
            "census_modules_per_rank": engine.census_modules_per_rank,
            "vocab_rows": engine.vocabulary_rows,
        },
    }
    release["name"] = release_name(engine.name, release)
    return release


def _fraction(value: float) -> str:
    """Two decimals, as people write it, or all that it has."""
    short = f"{value:.2f}"
    return short if float(short) == value else repr(value)


def _json(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))
