"""What several modules of tests build once and only read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from lab import checkpoint as miniature
from lab.checkpoint import Pair
from tests.unit.checkpoint_support import small_pair
from tests.unit.gateway_support import Engine, Gateway, engine, gateway_before
from tests.unit.test_checkpoint_fetch import Host, lay_out_tools


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """The parents of a small checkpoint."""
    return small_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="session")
def ckpt_tools(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint's programs as they lie on a host."""
    return lay_out_tools(tmp_path_factory.mktemp("host") / "tools")


@pytest.fixture
def host(ckpt_tools: Path, tmp_path: Path) -> Host:
    """A place for checkpoints, with the programs."""
    (tmp_path / "data").mkdir()
    return Host(ckpt_tools, tmp_path / "data")


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> miniature.CheckpointInfo:
    """A whole checkpoint with its manifest, to be fetched."""
    return miniature.build(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def upstream() -> Iterator[Engine]:
    """An engine for the gateway of a module."""
    with engine() as invented:
        yield invented


@pytest.fixture(scope="module")
def shared(upstream: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """A gateway for all tests of a module."""
    with gateway_before(upstream.url, tmp_path_factory.mktemp("gateway")) as running:
        yield running


@pytest.fixture
def gateway(shared: Gateway, upstream: Engine) -> Gateway:
    """The module's gateway, its engine having seen nothing yet."""
    while not upstream.seen.empty():
        upstream.seen.get()
    return shared
