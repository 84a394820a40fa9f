"""The production command line, as the engine's page gives it, from the settings."""

from __future__ import annotations

import json
from typing import Any

import pytest
from enginectl.release import parse_release

from stack.release import capture_sizes, engine_arguments, render_release
from tests.unit.test_settings import load

PATHS = {
    "venv": "/mnt/data/nvfp4/venvs/v",
    "toolkit": "/mnt/data/nvfp4/toolkits/t",
    "checkpoint": "/mnt/data/nvfp4/checkpoints/c",
}


def flags(arguments: list[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for word in arguments:
        if word.startswith("--"):
            found[word] = []
        else:
            found[list(found)[-1]].append(word)
    return found


def test_production_arguments() -> None:
    found = flags(engine_arguments(load("v100"), "/model"))
    plain = {key: values for key, values in found.items() if not values or values[0][0] not in "{["}
    assert plain == {
        "--model": ["/model"],
        "--served-model-name": ["qwen38-27b", "qwen3.8-27b", "fable-27b"],
        "--trust-remote-code": [],
        "--dtype": ["float16"],
        "--attention-backend": ["FLASH_ATTN_V100"],
        "--tensor-parallel-size": ["4"],
        "--gpu-memory-utilization": ["0.50"],
        "--max-model-len": ["135168"],
        "--max-num-seqs": ["2"],
        "--max-num-batched-tokens": ["4096"],
        "--reasoning-parser": ["qwen3"],
        "--enable-auto-tool-choice": [],
        "--tool-call-parser": ["qwen3_coder"],
        "--host": ["198.19.77.21"],
        "--port": ["8601"],
        "--shutdown-timeout": ["120"],
    }
    objects = {key: json.loads(found[key][0]) for key in found.keys() - plain.keys()}
    assert objects == {
        "--limit-mm-per-prompt": {"image": 0, "video": 0},
        "--default-chat-template-kwargs": {"enable_thinking": True},
        "--compilation-config": {"cudagraph_capture_sizes": [8, 16]},
        "--speculative-config": {
            "method": "mtp",
            "num_speculative_tokens": 7,
            "draft_sample_method": "greedy",
            "use_local_argmax_reduction": True,
        },
    }


@pytest.mark.parametrize(
    ("k", "sequences", "given", "expected"),
    [
        (7, 1, None, [8, 16]),
        (7, 2, None, [8, 16]),
        (3, 4, None, [4, 8, 12, 16]),
        (0, 2, None, [1, 2]),
        (7, 4, [8, 16], [8, 16]),
    ],
)
def test_capture_sizes(k: int, sequences: int, given: Any, expected: list[int]) -> None:
    changed = {
        "num_speculative_tokens": k,
        "max_num_seqs": sequences,
        "cudagraph_capture_sizes": given,
    }
    engine = load("v100", **{f"engine__{key}": value for key, value in changed.items()}).engine
    assert capture_sizes(engine) == expected


def test_without_draft_tokens_no_speculation_is_asked_for() -> None:
    settings = load("v100", engine__num_speculative_tokens=0)
    assert "--speculative-config" not in engine_arguments(settings, "/model")


def test_a_fine_memory_fraction_is_not_rounded_away() -> None:
    settings = load("v100", engine__gpu_memory_utilization=0.875)
    found = flags(engine_arguments(settings, "/model"))
    assert float(found["--gpu-memory-utilization"][0]) == 0.875


def test_the_host_accepts_the_rendered_release() -> None:
    rendered = render_release(load("v100"), **PATHS)
    release = parse_release(rendered, "release.json")
    assert release.name == rendered["name"]
    assert release.argv[0] == "/usr/bin/numactl"
    assert release.env["CUDA_HOME"] == PATHS["toolkit"]
    assert release.env["PATH"].split(":")[0] == f"{PATHS['toolkit']}/bin"


def test_every_setting_of_the_engine_makes_another_release() -> None:
    base = render_release(load("v100"), **PATHS)["name"]
    changes: dict[str, Any] = {
        "gpu_memory_utilization": 0.505,
        "num_speculative_tokens": 3,
        "max_num_seqs": 4,
        "max_model_len": 32768,
        "max_num_batched_tokens": 2048,
        "numa_node": None,
        "drain_seconds": 60,
        "environment": {},
        "enable_thinking": False,
        "vocabulary_rows": 40960,
    }
    names = {
        render_release(load("v100", **{f"engine__{key}": value}), **PATHS)["name"]
        for key, value in changes.items()
    }
    assert len(names) == len(changes)
    assert base not in names
    assert render_release(load("v100"), **PATHS)["name"] == base
