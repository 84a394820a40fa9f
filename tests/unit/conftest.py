"""What several modules of tests build once and only read."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab import checkpoint as miniature
from lab.checkpoint import Pair
from tests.unit.checkpoint_support import small_pair
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
