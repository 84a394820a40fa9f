"""Last of all: nothing was restarted while the state was read."""

from __future__ import annotations

from testinfra.host import Host

from tests.state.state_support import read_starts


def test_nothing_was_restarted_meanwhile(
    v100: Host, dgx: Host, starts_before: dict[str, str]
) -> None:
    assert read_starts(v100, dgx) == starts_before
