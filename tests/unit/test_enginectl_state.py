"""State, trial and history: whole or refused."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from enginectl.paths import Places
from enginectl.state import (
    State,
    Trial,
    append_history,
    load_state,
    load_trial,
    remove_trial,
    save_state,
    save_trial,
)
from hostlib.errors import HostError
from hypothesis import given
from hypothesis import strategies as st

NAMES = st.from_regex(r"[a-z][a-z0-9_-]{0,8}-[0-9a-f]{16}", fullmatch=True)
ONE, TWO = "skinny-0000000000000001", "skinny-0000000000000002"


def test_nothing_is_committed_before_the_first_switch(tmp_path: Path) -> None:
    assert load_state(Places(tmp_path)) == State(None, None)


@given(committed=st.none() | NAMES, previous=st.none() | NAMES)
def test_state_round_trip(
    tmp_path_factory: pytest.TempPathFactory, committed: str | None, previous: str | None
) -> None:
    places = Places(tmp_path_factory.mktemp("root"))
    save_state(places, State(committed, previous))
    assert load_state(places) == State(committed, previous)
    assert json.loads(places.state.read_text())["committed"] == committed


def test_a_commit_remembers_the_one_before_and_itself_is_no_predecessor() -> None:
    assert State().commit(ONE) == State(ONE, None)
    assert State(ONE).commit(TWO) == State(TWO, ONE)
    assert State(TWO, ONE).commit(TWO) == State(TWO, ONE)


def test_the_service_user_can_read_it_and_nothing_is_left_beside(tmp_path: Path) -> None:
    places = Places(tmp_path)
    save_state(places, State(ONE))
    save_state(places, State(TWO, ONE))
    names = subprocess.run(
        ["ls", "-A", str(places.state.parent)], capture_output=True, text=True, check=True
    )
    assert names.stdout.split() == ["state.json"]
    mode = subprocess.run(
        ["stat", "-c", "%a", str(places.state)], capture_output=True, text=True, check=True
    )
    assert mode.stdout.strip() == "644"


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("", "JSON"),
        ('{"format": 1, "committed": nul', "JSON"),
        ('{"format": 1, "committed": null}', "previous"),
        ('{"format": 1, "committed": null, "previous": null, "extra": 1}', "extra"),
        ('{"format": 2, "committed": null, "previous": null}', "newer version"),
        ('{"format": "1", "committed": null, "previous": null}', "format"),
        ('{"format": 1, "committed": 5, "previous": null}', "committed"),
        ('{"format": 1, "committed": "../x", "previous": null}', "committed"),
        ('{"committed": null, "previous": null}', "format"),
    ],
)
def test_damaged_or_newer_state_is_refused(text: str, word: str, tmp_path: Path) -> None:
    places = Places(tmp_path)
    save_state(places, State(ONE))
    places.state.write_text(text)
    with pytest.raises(HostError, match=word) as caught:
        load_state(places)
    assert str(places.state) in caught.value.message
    assert places.state.read_text() == text


def test_trial_round_trip_and_removal(tmp_path: Path) -> None:
    places = Places(tmp_path)
    assert load_trial(places) is None
    save_trial(places, Trial(ONE, "a" * 32))
    assert load_trial(places) == Trial(ONE, "a" * 32)
    remove_trial(places)
    remove_trial(places)
    assert not places.trial.exists()


def test_history_keeps_every_record_also_after_a_torn_line(tmp_path: Path) -> None:
    places = Places(tmp_path)
    places.history.parent.mkdir(parents=True)
    append_history(places, {"to": ONE})
    with places.history.open("a") as stream:
        stream.write('{"to": "half')
    append_history(places, {"to": TWO})
    lines = places.history.read_text().splitlines()
    assert json.loads(lines[0]) == {"to": ONE}
    assert json.loads(lines[-1]) == {"to": TWO}
    assert len(lines) == 3
