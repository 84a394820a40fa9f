"""Options that all tests share."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--long", action="store_true", help="fuzz in full: hundreds of thousands of inputs"
    )


@pytest.fixture
def long(request: pytest.FixtureRequest) -> bool:
    """Whether the full run was asked for."""
    return bool(request.config.getoption("--long"))
