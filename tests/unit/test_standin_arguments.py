"""The engine stand-in's command line is the production line, and nothing beside it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from engine_standin.arguments import parse

from tests.unit.standin_support import ENGINE, SPECULATIVE, model_folder, production_line


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return model_folder(tmp_path / "model")


def refusal(line: list[str], capfd: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as caught:
        parse(line)
    assert caught.value.code == 2
    message = capfd.readouterr().err
    assert message.startswith("api_server.py: error: ")
    assert message.count("\n") == 1
    return message


def test_production_line_is_accepted(model: Path) -> None:
    arguments = parse(production_line(model))
    assert arguments.served_names == ("qwen38-27b", "qwen3.8-27b", "fable-27b")
    assert (arguments.depth, arguments.max_num_seqs, arguments.tensor_parallel) == (7, 2, 4)
    assert arguments.gpu_memory_utilization == 0.5
    assert (arguments.max_model_len, arguments.max_num_batched_tokens) == (135168, 4096)


def test_speculation_may_be_absent(model: Path) -> None:
    assert parse(production_line(model, speculative_config=None)).depth == 0


@pytest.mark.parametrize("depth", [1, 3, 15])
def test_depths_up_to_15(model: Path, depth: int) -> None:
    config = json.dumps(SPECULATIVE | {"num_speculative_tokens": depth})
    assert parse(production_line(model, speculative_config=config)).depth == depth


@pytest.mark.parametrize(
    "extra",
    [
        ["--swap-space", "4"],
        ["--enable-reasoning"],
        ["--num-speculative-tokens", "7"],
        ["--tool-parser", "qwen3_coder"],  # no such flag, an abbreviation that vLLM takes
        ["--max-model", "135168"],
        ["--tensor-parallel", "4"],
        ["--trust"],
        ["stray"],
    ],
)
def test_unknown_and_abbreviated_flags(
    model: Path, extra: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    assert extra[0] in refusal([*production_line(model), *extra], capfd)


@pytest.mark.parametrize(
    ("flag", "value", "named"),
    [
        ("dtype", "fp16", "fp16"),
        ("attention_backend", "FLASH_ATTN_V1000", "FLASH_ATTN_V1000"),
        ("gpu_memory_utilization", "0", "(0, 1]"),
        ("gpu_memory_utilization", "1.01", "(0, 1]"),
        ("gpu_memory_utilization", "nan", "(0, 1]"),
        ("max_model_len", "132k", "132k"),
        ("max_model_len", "262145", "262144 positions"),
        ("max_num_seqs", "0", "1 or more"),
        ("max_num_batched_tokens", "1", "--max-num-seqs"),
        ("port", "65536", "65535"),
        ("shutdown_timeout", "-1", "0 or more"),
        ("tensor_parallel_size", "3", "does not divide"),
        ("tool_call_parser", "qwen", "qwen"),
        ("tool_call_parser", None, "--tool-call-parser"),
        ("reasoning_parser", "qwen4", "qwen4"),
        ("limit_mm_per_prompt", "{image:0}", "not JSON"),
        ("limit_mm_per_prompt", '{"images":0}', "images"),
        ("default_chat_template_kwargs", '{"enable_thinking":"yes"}', "enable_thinking"),
        ("compilation_config", "[8, 16]", "not a JSON object"),
        ("compilation_config", '{"cudagraph_capture_sizes":[8,"16"]}', "capture_sizes"),
        ("compilation_config", '{"capture_sizes":[8]}', "capture_sizes"),
        ("speculative_config", '{"method":"mtp"}', "num_speculative_tokens"),
        ("speculative_config", '{"method":"mtp","num_speculative_tokens":16}', "16"),
        ("speculative_config", '{"method":"mtp","num_speculative_tokens":0}', "0"),
        ("speculative_config", '{"method":"mtp","num_speculative_tokens":true}', "True"),
        ("speculative_config", '{"method":"eagle","num_speculative_tokens":7}', "eagle"),
        (
            "speculative_config",
            '{"method":"mtp","num_speculative_token":7}',
            "num_speculative_token",
        ),
    ],
)
def test_values_are_checked(
    model: Path, flag: str, value: str | None, named: str, capfd: pytest.CaptureFixture[str]
) -> None:
    changes: dict[str, Any] = {flag: value}
    message = refusal(production_line(model, **changes), capfd)
    assert named in message
    assert f"--{flag.replace('_', '-')}" in message


def test_model_must_be_the_wrapper(
    model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert "nowhere/config.json" in refusal(production_line(tmp_path / "nowhere"), capfd)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"architectures": ["Qwen3ForCausalLM"]}))
    assert "Qwen3ForCausalLM" in refusal(production_line(model), capfd)
    del config["text_config"]["head_dim"]
    (model / "config.json").write_text(json.dumps(config))
    assert "head_dim" in refusal(production_line(model), capfd)
    (model / "config.json").write_text("{")
    assert "not JSON" in refusal(production_line(model), capfd)


def test_module_path_of_the_production_line(model: Path, tmp_path: Path) -> None:
    line = [*production_line(model), "--swap-space", "4"]
    answer = subprocess.run(
        [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *line],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ENGINE)},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert answer.returncode == 2
    assert "unrecognized arguments: --swap-space 4" in answer.stderr
    assert "Traceback" not in answer.stderr
