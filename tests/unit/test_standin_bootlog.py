"""The boot log: real boots, read with the gates' own patterns."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.unit.standin_support import Standin, standin

PREFIX = re.compile(
    r"\((APIServer|EngineCore_DP0|Worker_TP\d) pid=\d+\) (INFO|WARNING|ERROR) "
    r"\d\d-\d\d \d\d:\d\d:\d\d \[\w+\.py:\d+\] \S"
)
LOAD = re.compile(
    r"QPN8_CENSUS_LOAD n=(\d+) layer=(language_model\.model\.layers\.\d+\.\S+) "
    r"dtype=torch\.float8_e4m3fn K=(\d+) N=(\d+) widths=\[([\d, ]+)\] scales=\[[^]]+\] "
    r"split=\d+ nacc=\d+ eligible=YES$",
    re.MULTILINE,
)
# Gates 2 to 11: what must stand in the log, and what must not.
WANTED = {
    2: r"num_speculative_tokens\D+7\b",
    3: r"Skinny route map: M=8 N=62080 K=5120 -> qpn\w*",
    5: r"kv_cache_dtype=auto\b",
    6: r"Ignoring .*kv_cache quantization directive \(fp8_e4m3\)",
    8: r"FLASH_ATTN_V100 MTP verifier XQA path active \(rows=8, q_per_kv=6, partition_hint=256, "
    r"mtp5_dual_cta=False\)\.",
    9: r"Skinny route map: .*-> qpn2$",
    11: r"QPN8_CENSUS_RUN K=\d+ N=\d+ M=8 route=qpn8(-mt2)? ",
}
FORBIDDEN = {
    4: r"falling back to requant pack|packing from the model's own weights",
    7: r"scalar_paged",
    10: r"eligible=NO",
}
LAZY = {3, 8, 9, 11}
CHAT = {"messages": [{"role": "user", "content": "hello"}]}


def failing_gates(log: str, census: int) -> set[int]:
    failing = {gate for gate, p in WANTED.items() if not re.search(p, log, re.MULTILINE)}
    failing |= {gate for gate, p in FORBIDDEN.items() if re.search(p, log)}
    return failing | ({10} if len(LOAD.findall(log)) != census else set())


def failing_after_warmup(server: Standin, census: int) -> set[int]:
    status, answer = server.ask("/v1/chat/completions", CHAT)
    warm = status == 200 and isinstance(answer["choices"][0]["message"]["content"], str)
    return failing_gates(server.log, census) | (set() if warm else {1})


def test_production_boot(tmp_path: Path) -> None:
    with standin(tmp_path, layers=64) as server:
        server.ready()
        assert failing_gates(server.log, 512) == LAZY  # printed on first use only
        assert failing_after_warmup(server, 512) == set()
        log = server.log
    assert all(PREFIX.match(line) for line in log.splitlines())
    loads = LOAD.findall(log)
    shapes = {(layer.split(".", 4)[4], k, n, widths) for _, layer, k, n, widths in loads}
    assert shapes == {
        ("linear_attn.in_proj_qkvz", "5120", "4096", "512, 512, 1536, 1536"),
        ("linear_attn.out_proj", "1536", "5120", "5120"),
        ("self_attn.qkv_proj", "5120", "3584", "3072, 256, 256"),
        ("self_attn.o_proj", "1536", "5120", "5120"),
    }
    assert "Available KV cache memory: 6.67 GiB" in log
    assert "GPU KV cache size: 351,436 tokens" in log
    assert "Maximum concurrency for 135,168 tokens per request: 2.60x" in log


@pytest.mark.parametrize("gate", range(1, 12))
def test_each_gate_can_fail_alone(tmp_path: Path, gate: int) -> None:
    with standin(tmp_path, faults=f"fail-gate-{gate}") as server:
        server.ready()
        assert failing_after_warmup(server, 32) == {gate}


def test_refused_module_takes_the_place_of_its_line(tmp_path: Path) -> None:
    with standin(tmp_path, faults="refuse-module") as server:
        server.ready()
        assert len(LOAD.findall(server.log)) == 31
        assert len(re.findall(r"QPN8_CENSUS_LOAD layer=\S+ eligible=NO reason=", server.log)) == 1


def test_without_speculation_there_is_no_verifier(tmp_path: Path) -> None:
    with standin(tmp_path, speculative_config=None) as server:
        server.ready()
        assert failing_after_warmup(server, 32) == {2, 3, 8, 11}  # M=1 in place of M=8
        assert "Skinny route map: M=1 N=62080 K=5120 -> qpn2" in server.log
        assert server.metric("vllm:spec_decode_num_drafts_total") == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_num_batched_tokens": "131072"}, "No available memory for the cache blocks"),
        ({"gpu_memory_utilization": "0.40"}, "max seq len (135168)"),
        ({"dtype": "bfloat16"}, "compute capability 8.0"),
    ],
)
def test_boots_that_cannot_be(tmp_path: Path, changes: dict[str, str], message: str) -> None:
    with standin(tmp_path, **changes) as server:
        assert server.wait() == 1
        errors = [line for line in server.log.splitlines() if ") ERROR " in line]
        assert len(errors) == 1
        assert message in errors[0]
        assert server.children() == []
        assert server.cards_used() == [0, 0, 0, 0]


@pytest.mark.parametrize(
    ("utilization", "batched", "pool"),
    [("0.40", "4096", 126_670), ("0.50", "32768", 202_341)],
)
def test_pool_follows_the_measured_points(
    tmp_path: Path, utilization: str, batched: str, pool: int
) -> None:
    changes = {
        "gpu_memory_utilization": utilization,
        "max_num_batched_tokens": batched,
        "max_model_len": "32768",
    }
    with standin(tmp_path, **changes) as server:
        server.ready()
        assert f"GPU KV cache size: {pool:,} tokens" in server.log
