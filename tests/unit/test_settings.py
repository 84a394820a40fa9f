"""Settings: what is refused, with which words; what overrides do; what production says."""

from __future__ import annotations

import runpy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stack import settings
from stack.errors import StackError

INVENTORY = "inventory/lab.py"


def group_data(group: str) -> dict[str, Any]:
    data: dict[str, Any] = {"address": "198.19.77.21", "overrides": {}}
    for name in ("all", group):
        data |= runpy.run_path(f"group_data/{name}.py")
    if group == "v100":
        return data | {"access": {"consumers": []}}
    return data | {"gateway": data["gateway"] | {"keys": {"somebody": "0" * 64}}}


def load(group: str, **overrides: Any) -> Any:
    reader = settings.engine_host if group == "v100" else settings.gateway_host
    dotted = {key.replace("__", "."): value for key, value in overrides.items()}
    return reader(group_data(group) | {"overrides": dotted}, INVENTORY)


def test_committed_settings_are_the_production_ones() -> None:
    engine = load("v100").engine
    assert engine.gpu_memory_utilization == 0.50
    assert (engine.num_speculative_tokens, engine.max_num_seqs) == (7, 2)
    assert (engine.max_model_len, engine.max_num_batched_tokens) == (135168, 4096)
    assert engine.tensor_parallel_size == 4
    assert load("v100").serving.names == ["qwen38-27b", "qwen3.8-27b", "fable-27b"]
    assert load("dgx").gateway.max_in_flight == 8


@pytest.mark.parametrize(
    ("group", "key", "value"),
    [
        ("v100", "engine.gpu_memory_utilization", 0.0),
        ("v100", "engine.gpu_memory_utilization", 1.01),
        ("v100", "engine.gpu_memory_utilization", "0.5"),
        ("v100", "engine.num_speculative_tokens", 16),
        ("v100", "engine.tensor_parallel_size", 3),
        ("v100", "engine.tensor_parallel_size", 8),
        ("v100", "engine.max_num_seqs", 0),
        ("v100", "engine.max_num_seqs", 2.5),
        ("v100", "engine.python", "python2"),
        ("v100", "engine.drain_seconds", 500),
        ("v100", "access.consumers", ["nobody"]),
        ("v100", "serving.port", 0),
        ("v100", "serving.names", []),
        ("dgx", "gateway.port", 65536),
        ("dgx", "gateway.max_in_flight", True),
        ("dgx", "gateway.keys", {"one": "not a digest"}),
        ("dgx", "gateway.keys", {"one": {"sha256": "0" * 64, "expires": "2027-02-30"}}),
        ("dgx", "gateway.keys", {"one": {"sha256": "0" * 64, "max_in_flight": 0}}),
        ("dgx", "gateway.keys", {"one": {"sha256": "0" * 64, "rate": 1}}),
        ("dgx", "gateway.keys", {"a b": "0" * 64}),
        ("dgx", "gateway.max_queued", -1),
    ],
)
def test_a_wrong_value_is_refused_by_file_and_key(group: str, key: str, value: Any) -> None:
    with pytest.raises(StackError) as refused:
        load(group, **{key.replace(".", "__"): value})
    line = str(refused.value)
    assert "\n" not in line
    assert line.startswith(f"{INVENTORY}: {key}")


def test_a_wrong_value_in_group_data_names_that_file() -> None:
    data = group_data("v100")
    data["engine"] = data["engine"] | {"gpu_memory_utilization": 2}
    with pytest.raises(StackError, match=r"^group_data/v100\.py: engine\.gpu_memory_utilization: "):
        settings.engine_host(data, INVENTORY)
    data = group_data("dgx")
    data["serving"] = data["serving"] | {"port": "8601"}
    with pytest.raises(StackError, match=r"^group_data/all\.py: serving\.port: "):
        settings.gateway_host(data, INVENTORY)


def test_an_unknown_key_is_refused() -> None:
    data = group_data("v100")
    data["engine"] = data["engine"] | {"gpu_memory_utilisation": 0.5}
    with pytest.raises(StackError, match=r"group_data/v100\.py: engine\.gpu_memory_utilisation"):
        settings.engine_host(data, INVENTORY)
    with pytest.raises(StackError, match=r"overrides: engine\.nothing is no setting"):
        load("v100", engine__nothing=1)


def test_a_missing_section_or_key_is_refused() -> None:
    data = group_data("v100")
    del data["storage"]
    with pytest.raises(StackError, match=r"group_data/v100\.py: storage is missing"):
        settings.engine_host(data, INVENTORY)
    data = group_data("v100")
    data["engine"] = {key: value for key, value in data["engine"].items() if key != "dtype"}
    with pytest.raises(StackError, match=r"group_data/v100\.py: engine\.dtype: is missing"):
        settings.engine_host(data, INVENTORY)


def test_ports_must_not_clash() -> None:
    with pytest.raises(StackError, match=r"gateway\.port: 8601 clashes"):
        load("dgx", gateway__port=8601)
    with pytest.raises(StackError, match="22 is ssh's"):
        load("v100", serving__port=22)


def test_links_and_root_must_lie_on_the_data_disk() -> None:
    with pytest.raises(StackError, match="must lie below"):
        load("v100", storage__root="/opt/models")
    with pytest.raises(StackError, match="must lie below"):
        load("v100", toolkit__link="/usr/local/cuda")


def test_a_host_without_address_is_refused() -> None:
    with pytest.raises(StackError, match=r"inventory/lab\.py: v100\.address is not set"):
        settings.engine_host(group_data("v100") | {"address": None}, INVENTORY)


def test_undecided_consumers_are_refused() -> None:
    with pytest.raises(StackError, match=r"group_data/v100\.py: access: consumers: not decided"):
        settings.engine_host(
            group_data("v100") | runpy.run_path("group_data/v100.py"), "inventory/production.py"
        )


def test_a_gateway_without_keys_would_lock_everybody_out_and_is_refused() -> None:
    data = group_data("dgx") | runpy.run_path("group_data/dgx.py")
    with pytest.raises(StackError, match=r"group_data/dgx\.py: gateway\.keys: "):
        settings.gateway_host(data, "inventory/production.py")


def test_overrides_leave_the_group_data_alone() -> None:
    data = group_data("v100") | {"overrides": {"engine.max_num_seqs": 4}}
    assert settings.engine_host(data, INVENTORY).engine.max_num_seqs == 4
    assert data["engine"]["max_num_seqs"] == 2


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2)
    ),
    max_leaves=4,
)


@given(section=st.sampled_from(settings.SECTIONS["v100"]), value=JSON)
def test_whatever_stands_there_is_read_or_refused_in_one_line(section: str, value: Any) -> None:
    try:
        settings.engine_host(group_data("v100") | {section: value}, INVENTORY)
    except StackError as refused:
        assert "\n" not in str(refused)
        assert section in str(refused)
