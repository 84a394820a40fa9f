"""Options that all tests share."""

from __future__ import annotations

import pytest

CUTS, LONG_CUTS = 6, 200


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--long",
        action="store_true",
        help=f"in full: hundreds of thousands of fuzzed inputs, {LONG_CUTS} power cuts",
    )
    parser.addoption("--cuts", type=int, default=CUTS, help=f"power cuts at random ({CUTS})")


@pytest.fixture(scope="session")
def cuts(pytestconfig: pytest.Config) -> int:
    """How many power cuts at random moments."""
    return LONG_CUTS if pytestconfig.getoption("--long") else pytestconfig.getoption("--cuts")


@pytest.fixture
def long(request: pytest.FixtureRequest) -> bool:
    """Whether the full run was asked for."""
    return bool(request.config.getoption("--long"))
