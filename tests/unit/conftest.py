"""What several modules of tests build once and only read."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab.checkpoint import Pair
from tests.unit.checkpoint_support import small_pair
from tests.unit.test_checkpoint_fetch import lay_out_tools


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """The parents of a small checkpoint."""
    return small_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="session")
def ckpt_tools(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint's programs as they lie on a host."""
    return lay_out_tools(tmp_path_factory.mktemp("host") / "tools")
