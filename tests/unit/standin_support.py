"""Shared by the tests of the lab's stand-ins: a model folder, the production line, a server."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
ENGINE = ROOT / "lab" / "engine"
NVIDIA_SMI = ROOT / "lab" / "nvidia_smi" / "nvidia_smi.py"
NAMES = ["qwen38-27b", "qwen3.8-27b", "fable-27b"]
Change = str | list[str] | None
SPECULATIVE = {
    "method": "mtp",
    "num_speculative_tokens": 7,
    "draft_sample_method": "greedy",
    "use_local_argmax_reduction": True,
}


def production_config(layers: int = 64) -> dict[str, Any]:
    """config.json of the production architecture, with `layers` layers."""
    kinds = ["full_attention" if i % 4 == 3 else "linear_attention" for i in range(layers)]
    return {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "text_config": {
            "model_type": "qwen3_5_text",
            "num_hidden_layers": layers,
            "layer_types": kinds,
            "hidden_size": 5120,
            "intermediate_size": 17408,
            "vocab_size": 248320,
            "head_dim": 256,
            "num_attention_heads": 24,
            "num_key_value_heads": 4,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 48,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "max_position_embeddings": 262144,
        },
        "vision_config": {"depth": 27},
        "quantization_config": {
            "quant_method": "modelopt",
            "kv_cache_scheme": {"num_bits": 8, "type": "float"},
        },
    }


def model_folder(place: Path, layers: int = 64) -> Path:
    """A model folder that holds a config.json and nothing else."""
    place.mkdir(parents=True, exist_ok=True)
    (place / "config.json").write_text(json.dumps(production_config(layers)))
    return place


def production_line(model: Path, port: int = 8601, **changes: Change) -> list[str]:
    """The production arguments; `changes` replaces a flag's value (None drops the flag)."""
    flags: dict[str, Change] = {
        "model": str(model),
        "served_model_name": NAMES,
        "trust_remote_code": [],
        "dtype": "float16",
        "attention_backend": "FLASH_ATTN_V100",
        "tensor_parallel_size": "4",
        "gpu_memory_utilization": "0.50",
        "max_model_len": "135168",
        "max_num_seqs": "2",
        "max_num_batched_tokens": "4096",
        "limit_mm_per_prompt": '{"image":0,"video":0}',
        "default_chat_template_kwargs": '{"enable_thinking":true}',
        "reasoning_parser": "qwen3",
        "enable_auto_tool_choice": [],
        "tool_call_parser": "qwen3_coder",
        "compilation_config": '{"cudagraph_capture_sizes":[8,16]}',
        "speculative_config": json.dumps(SPECULATIVE),
        "host": "127.0.0.1",
        "port": str(port),
        "shutdown_timeout": "0",
    }
    flags.update(changes)
    line: list[str] = []
    for name, value in flags.items():
        if value is not None:
            line += [f"--{name.replace('_', '-')}", *([value] if isinstance(value, str) else value)]
    return line


def free_port() -> int:
    """A loopback port that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until(condition: Callable[[], bool], what: str, seconds: float = 20.0) -> None:
    """Poll; fails loudly with `what` after `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"still not: {what}"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    """Whether a process exists and is no zombie, as ps sees it."""
    answer = subprocess.run(
        ["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False
    )
    return answer.stdout.strip()[:1] not in ("", "Z")


class Standin:
    """A running engine stand-in; its own process group, so that nothing of it can be left."""

    def __init__(
        self,
        folder: Path,
        *,
        scale: float = 0.02,
        faults: str = "",
        layers: int = 4,
        port: int | None = None,
        **changes: Change,
    ) -> None:
        self.port = port or free_port()
        self.gpu_state = folder / "gpu"
        self.log_path = folder / "log"
        self.err_path = folder / "err"
        model = model_folder(folder / "model", layers)
        environment = {
            "PATH": "/usr/bin:/bin",
            "LAB_GPU_STATE": str(self.gpu_state),
            "LAB_ENGINE_TIME_SCALE": str(scale),
            "LAB_ENGINE_FAULTS": faults,
        }
        with self.log_path.open("wb") as log, self.err_path.open("wb") as errors:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "vllm.entrypoints.openai.api_server",
                    *production_line(model, self.port, **changes),
                ],
                cwd=ENGINE,
                env=environment,
                stdout=log,
                stderr=errors,
                start_new_session=True,
            )

    @property
    def log(self) -> str:
        """What it has logged so far."""
        return self.log_path.read_text()

    def booted(self) -> None:
        """Wait until the workers have loaded and the pool is known."""
        wait_until(
            lambda: "Maximum concurrency" in self.log, f"booted: {self.err_path.read_text()}"
        )

    def ready(self) -> Standin:
        """Wait until the port answers."""
        self._until(self.listening)
        return self

    def _until(self, condition: Callable[[], bool]) -> None:
        def settled() -> bool:
            return condition() or self.process.poll() is not None

        try:
            wait_until(settled, "up")
            assert condition()
        except AssertionError:
            tail = self.log.splitlines()[-5:]
            pytest.fail(f"did not come up: {self.err_path.read_text()} {tail} {self.children()}")

    def listening(self) -> bool:
        """Whether the port takes connections."""
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def children(self) -> list[int]:
        """All processes of the stand-in but the API server, by ps."""
        answer = subprocess.run(
            ["ps", "-s", str(self.process.pid), "-o", "pid="],
            capture_output=True,
            text=True,
            check=False,
        )
        pids = [int(word) for word in answer.stdout.split()]
        return [pid for pid in pids if pid != self.process.pid and alive(pid)]

    def open(self, path: str, body: object = None) -> http.client.HTTPConnection:
        """Send a request on a connection of its own, without waiting for the answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        connection.request("GET" if data is None else "POST", path, data)
        return connection

    def ask(self, path: str, body: object = None) -> tuple[int, Any]:
        """Status and body (JSON where it is) of one request."""
        with contextlib.closing(self.open(path, body)) as connection:
            response = connection.getresponse()
            data = response.read()
        is_json = "json" in response.getheader("Content-Type", "")
        return response.status, json.loads(data) if is_json else data.decode()

    def metric(self, name: str, **labels: str) -> float:
        """Sum of a metric's samples that carry `labels`."""
        _, page = self.ask("/metrics")
        marks = [f'{key}="{value}"' for key, value in labels.items()]
        rows = [line for line in page.splitlines() if line.startswith(name + "{")]
        return sum(float(r.split()[-1]) for r in rows if all(mark in r for mark in marks))

    def cards_used(self) -> list[int]:
        """Memory used a card [MiB], by the nvidia-smi stand-in."""
        return cards_used(self.gpu_state)

    def wait(self) -> int:
        """The exit code of the API server."""
        return self.process.wait(timeout=20)

    def end(self) -> None:
        """Kill what is left of it."""
        for pid in [*self.children(), self.process.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(timeout=20)


@contextlib.contextmanager
def standin(folder: Path, **options: Any) -> Iterator[Standin]:
    """A stand-in that is surely gone afterwards."""
    server = Standin(folder, **options)
    try:
        yield server
    finally:
        server.end()


def nvidia_smi(state: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the nvidia-smi stand-in."""
    return subprocess.run(
        [sys.executable, str(NVIDIA_SMI), *arguments],
        env={"LAB_GPU_STATE": str(state)},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


def cards_used(state: Path) -> list[int]:
    """Memory used a card [MiB]."""
    answer = nvidia_smi(state, "--query-gpu=memory.used", "--format=csv,noheader,nounits")
    return [int(line) for line in answer.stdout.split()]
