"""State, trial and history: whole or refused."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from enginectl import history
from enginectl.choice import unattended
from enginectl.paths import Places
from enginectl.runfiles import Trial, Verdict, load_trial, remove, save
from enginectl.start import after_verdict
from enginectl.state import (
    KEPT_REJECTIONS,
    State,
    load_state,
    restore_state,
    save_state,
    startable_state,
    update_state,
)
from hostlib.errors import HostError
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.enginectl_support import REPOSITORY

NAMES = st.from_regex(r"[a-z][a-z0-9_-]{0,8}-[0-9a-f]{16}", fullmatch=True)
ONE, TWO = "skinny-0000000000000001", "skinny-0000000000000002"


STATES = st.builds(
    State,
    st.none() | NAMES,
    st.none() | NAMES,
    st.dictionaries(NAMES, st.text(max_size=20), max_size=3),
    st.integers(0, 10_000),
)


def test_nothing_is_committed_before_the_first_switch(tmp_path: Path) -> None:
    assert load_state(Places(tmp_path)) == State(None, None)


@settings(deadline=None, max_examples=25)
@given(state=STATES)
def test_state_round_trip(tmp_path_factory: pytest.TempPathFactory, state: State) -> None:
    places = Places(tmp_path_factory.mktemp("root"))
    save_state(places, state)
    assert load_state(places) == state
    written = json.loads(places.state.read_text())
    assert (written["committed"], written["rejected"]) == (state.committed, state.rejected)


@settings(deadline=None, max_examples=25)
@given(cut=st.integers(0, 300), noise=st.binary(max_size=20))
def test_a_torn_state_is_whole_again_by_its_copy(
    tmp_path_factory: pytest.TempPathFactory, cut: int, noise: bytes
) -> None:
    places = Places(tmp_path_factory.mktemp("root"))
    (places.root / "run").mkdir()
    state = State(TWO, ONE, {"skinny-0000000000000003": "gate 7"}, 1)
    save_state(places, state)
    torn = places.state.read_bytes()[:cut].rstrip(b"\n }") + noise.replace(b"}", b"")
    places.state.write_bytes(torn)
    found, damage = startable_state(places)
    assert found == state
    assert damage is not None
    assert "`enginectl settle --restore`" in damage.message
    assert "\n" not in damage.message
    assert "is committed" in (restore_state(places) or "")
    assert load_state(places) == state
    assert places.state.with_name("state.replaced.json").read_bytes() == torn


def test_a_newer_state_still_starts_what_it_names_and_is_not_overwritten(tmp_path: Path) -> None:
    places = Places(tmp_path)
    newer = {"format": 2, "committed": TWO, "previous": ONE, "something": ["else"]}
    places.state.parent.mkdir(parents=True)
    places.state.write_text(json.dumps(newer))
    found, damage = startable_state(places)
    assert found == State(TWO, ONE)
    assert damage is not None
    assert "newer version" in damage.message
    with pytest.raises(HostError, match="newer version"):
        restore_state(places)
    with pytest.raises(HostError, match="newer version"):
        update_state(places, lambda state: state.commit(ONE))
    assert json.loads(places.state.read_text()) == newer
    assert restore_state(places, give_up_newer=True)
    assert load_state(places) == State(TWO, ONE)


def test_where_both_are_damaged_nothing_is_made_up(tmp_path: Path) -> None:
    places = Places(tmp_path)
    save_state(places, State(ONE))
    places.state.write_text("")
    places.state_copy.write_text("{")
    assert startable_state(places)[0] == State()


def test_rejections_are_kept_to_a_number_and_end_with_a_commit() -> None:
    state = State(ONE)
    names = [f"skinny-{number:016x}" for number in range(100, 100 + KEPT_REJECTIONS + 5)]
    for name in names:
        state = state.reject(name, "why")
    assert list(state.rejected) == names[5:]
    assert names[-1] not in state.commit(names[-1]).rejected


def test_each_of_two_releases_gets_as_many_boots_as_it_may_fail() -> None:
    tried = [unattended(State(TWO, ONE, {}, failed), 3) for failed in range(9)]
    assert tried == [TWO] * 3 + [ONE] * 3 + [TWO] * 3
    assert {unattended(State(ONE, None, {}, failed), 3) for failed in range(9)} == {ONE}


def verdict(release: str, outcome: str) -> Verdict:
    return Verdict(release, "a" * 32, "", outcome, "")


def test_an_unattended_start_is_counted_by_its_answer() -> None:
    state = State(TWO, ONE, {}, 2)
    assert after_verdict(state, verdict(TWO, "no answer"), 3).failed_boots == 3
    assert after_verdict(state, verdict(TWO, "blocked"), 3) == state
    for outcome in ("serves", "degraded"):
        assert after_verdict(state, verdict(TWO, outcome), 3) == State(TWO, ONE)
    gone_back = after_verdict(State(TWO, ONE, {}, 3), verdict(ONE, "degraded"), 3)
    assert (gone_back.committed, gone_back.previous, gone_back.failed_boots) == (ONE, TWO, 0)
    assert list(gone_back.rejected) == [TWO]


def test_a_commit_remembers_the_one_before_and_itself_is_no_predecessor() -> None:
    assert State().commit(ONE) == State(ONE, None)
    assert State(ONE).commit(TWO) == State(TWO, ONE)
    assert State(TWO, ONE, {}, 2).commit(TWO) == State(TWO, ONE)


def test_the_service_user_can_read_it_and_nothing_is_left_beside(tmp_path: Path) -> None:
    places = Places(tmp_path)
    save_state(places, State(ONE))
    save_state(places, State(TWO, ONE))
    names = subprocess.run(
        ["ls", "-A", str(places.state.parent)], capture_output=True, text=True, check=True
    )
    assert names.stdout.split() == ["state.copy.json", "state.json"]
    mode = subprocess.run(
        ["stat", "-c", "%a", str(places.state)], capture_output=True, text=True, check=True
    )
    assert mode.stdout.strip() == "644"


WHOLE: dict[str, object] = {
    "format": 1,
    "committed": None,
    "previous": None,
    "rejected": {},
    "failed_boots": 0,
}


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("", "JSON"),
        ('{"format": 1, "committed": nul', "JSON"),
        (json.dumps({"format": 1, "committed": None}), "previous"),
        (json.dumps({**WHOLE, "extra": 1}), "extra"),
        (json.dumps({**WHOLE, "format": 2}), "newer version"),
        (json.dumps({**WHOLE, "format": "1"}), "format"),
        (json.dumps({**WHOLE, "committed": 5}), "committed"),
        (json.dumps({**WHOLE, "committed": "../x"}), "../x"),
        (json.dumps({**WHOLE, "rejected": {"../x": ""}}), "../x"),
        (json.dumps({**WHOLE, "rejected": {ONE: 1}}), "rejected"),
        (json.dumps({**WHOLE, "failed_boots": -1}), "failed_boots"),
        (json.dumps({**WHOLE, "failed_boots": True}), "failed_boots"),
    ],
)
def test_damaged_or_newer_state_is_refused(text: str, word: str, tmp_path: Path) -> None:
    places = Places(tmp_path)
    save_state(places, State(ONE))
    places.state.write_text(text)
    with pytest.raises(HostError, match=word) as caught:
        load_state(places)
    assert caught.value.message.startswith(f"{places.state}: ")
    assert caught.value.message.count(str(places.state)) == 1
    assert places.state.read_text() == text


# Calls of one replacement that matter for durability, as the kernel sees them.
TRACE = r"""
import sys
sys.path[:0] = sys.argv[2:]
from pathlib import Path
from enginectl.paths import Places
from enginectl.runfiles import Trial, save
from enginectl.state import State, save_state
places = Places(Path(sys.argv[1]))
save_state(places, State("skinny-0000000000000001"))
save(places.trial, Trial("skinny-0000000000000001", "a" * 32))
"""


def test_every_state_is_on_disk_before_it_gets_its_name(tmp_path: Path) -> None:
    """strace shows fsync of the new file, its rename, fsync of the folder: in this order."""
    strace = shutil.which("strace")
    if strace is None:
        pytest.skip("strace is not installed on this machine")
    root, trace = tmp_path / "root", tmp_path / "trace"
    libraries = [str(REPOSITORY / "files" / name) for name in ("engine", "hostlib")]
    calls = "openat,fsync,fdatasync,rename,renameat,renameat2"
    subprocess.run(
        [strace, "-y", "-e", f"trace={calls}", "-o", trace, sys.executable, "-c", TRACE,
         str(root), *libraries],
        check=True,
    )  # fmt: skip
    lines = trace.read_text().splitlines()
    for final in ("lib/fable-engine/state.json", "lib/fable-engine/state.copy.json",
                  "run/fable-engine/trial"):  # fmt: skip
        folder, name = str(root / ("var" if "lib" in final else "")) + "/" + final, Path(final).name
        [renamed] = [at for at, line in enumerate(lines) if f'/{name}")' in line]
        assert lines[renamed].startswith("rename")
        assert "fsync(" in lines[renamed - 1] and f"/.{name}." in lines[renamed - 1]
        after = [line for line in lines[renamed + 1 :] if line.startswith("fsync(")]
        assert f"<{Path(folder).parent}>" in after[0]


def test_trial_round_trip_and_removal(tmp_path: Path) -> None:
    places = Places(tmp_path)
    assert load_trial(places) is None
    save(places.trial, Trial(ONE, "a" * 32))
    assert load_trial(places) == Trial(ONE, "a" * 32)
    remove(places.trial)
    remove(places.trial)
    assert not places.trial.exists()


def test_history_keeps_every_record_also_after_a_torn_line(tmp_path: Path) -> None:
    places = Places(tmp_path)
    history.append(places, history.ENDED, id="1", to=ONE)
    with places.history.open("a") as stream:
        stream.write('{"to": "half')
    history.append(places, history.ENDED, id="2", to=TWO)
    lines = places.history.read_text().splitlines()
    assert [json.loads(line)["to"] for line in (lines[0], lines[-1])] == [ONE, TWO]
    assert len(lines) == 3
    events, damaged = history.read(places)
    assert ([event["to"] for event in events], damaged) == ([ONE, TWO], 1)


def test_a_switch_that_never_ended_is_told_as_interrupted(tmp_path: Path) -> None:
    places = Places(tmp_path)
    for event, name in ((history.BEGUN, "1"), (history.BEGUN, "2"), (history.ENDED, "2")):
        history.append(places, event, id=name, before=ONE, to=TWO, by="me", reason="why")
    events, _ = history.read(places)
    assert [(event["id"], event.get("outcome")) for event in events] == [
        ("1", "interrupted"),
        ("2", None),
    ]
    assert f"{ONE} -> {TWO}: interrupted" in history.as_text(events[0])


@settings(deadline=None, max_examples=25)
@given(lines=st.lists(st.binary(max_size=40), max_size=5))
def test_any_history_can_be_read(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes]
) -> None:
    places = Places(tmp_path_factory.mktemp("root"))
    places.history.parent.mkdir(parents=True)
    places.history.write_bytes(b"\n".join(lines) + b"\n")
    history.append(places, history.SETTLED, action="it")
    events, _ = history.read(places)
    assert history.as_text(events[-1]).endswith("settled: it")
