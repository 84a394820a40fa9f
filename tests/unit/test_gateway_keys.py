"""Keys: their file, the commands that change it, and what a running gateway makes of it."""

from __future__ import annotations

import datetime
import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from fable_gateway import keyfile
from fable_gateway.errors import GatewayError
from fable_gateway.keys import Key, KeyRing, new_key, settings_line, sha256
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.gateway_support import (
    KEY,
    MODELS,
    OTHER_KEY,
    digest,
    engine,
    gateway_before,
    install,
)

TODAY = datetime.date(2026, 7, 1)
DIGEST = digest(KEY)["sha256"]


def sha256sum(key: str) -> str:
    """By another program than ours."""
    done = subprocess.run(["sha256sum"], input=key, capture_output=True, text=True, check=True)
    return done.stdout.split()[0]


def limits() -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(
        {},
        optional={
            "expires": st.dates().map(datetime.date.isoformat),
            "models": st.lists(st.text(min_size=1, max_size=9), min_size=1, unique=True),
            "max_in_flight": st.integers(1, 10_000),
            "requests_per_minute": st.integers(1, 100_000),
        },
    )


KEY_FILES = st.dictionaries(
    st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", fullmatch=True), limits(), max_size=4
).map(
    lambda found: {
        name: {"sha256": f"{number:064x}"} | more
        for number, (name, more) in enumerate(found.items())
    }
)


@given(KEY_FILES)
def test_what_is_read_is_written_again(content: dict[str, Any]) -> None:
    ring = keyfile.parse(json.dumps(content).encode(), "keys.json")
    assert json.loads(keyfile.text(ring.keys)) == content


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=6,
)
FIELDS = ("sha256", "expires", "models", "max_in_flight", "requests_per_minute", "more")


@given(st.sampled_from(FIELDS), JSON_VALUES)
def test_any_value_is_taken_or_refused_in_one_line_by_its_name(field: str, value: object) -> None:
    content = {"alice": {"sha256": DIGEST, field: value}}
    try:
        keyfile.parse(json.dumps(content).encode(), "keys.json")
    except GatewayError as error:
        assert re.match(r"keys\.json: alice\b", str(error))
        assert len(str(error).splitlines()) == 1


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"a b": digest(KEY)}, "'a b' is no name"),
        ({"a": digest(KEY), "b": digest(KEY)}, "b.sha256: a has the same key"),
        ({"a": digest(KEY) | {"expires": "20270131"}}, "a.expires: '20270131' is no date"),
        ([], "must be an object"),
    ],
)
def test_a_wrong_key_file_is_refused(content: object, said: str) -> None:
    with pytest.raises(GatewayError, match=re.escape(said)):
        keyfile.parse(json.dumps(content).encode(), "keys.json")


def test_a_key_ends_with_the_start_of_its_day() -> None:
    ring = KeyRing((Key("alice", DIGEST, expires=TODAY),))
    headers = {"x-api-key": KEY}
    assert ring.identify(headers, TODAY - datetime.timedelta(1)) == ring.keys[0]
    assert ring.identify(headers, TODAY) is None


@given(st.text(), st.text())
def test_only_the_very_key_is_found(key: str, other: str) -> None:
    try:
        ring = KeyRing((Key("alice", sha256(key)),))
    except UnicodeEncodeError:
        return
    assert ring.find(key) is not None
    assert (ring.find(other) is not None) == (key == other)


def test_a_new_key_and_its_line_belong_together() -> None:
    made = new_key()
    assert json.loads(f"{{{settings_line('bob', made).rstrip(',')}}}") == {"bob": sha256sum(made)}


class Commands:
    """`fable_gateway.py keys` on a file in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.launcher = install(folder)
        self.file = folder / "keys.json"

    def run(
        self, action: str, *arguments: str | Path, given: str = ""
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["python3", self.launcher, "keys", action, "--file", self.file, *arguments],
            input=given,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def kept(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.file.read_text())
        return found


@pytest.fixture
def commands(tmp_path: Path) -> Commands:
    return Commands(tmp_path)


def shown_key(output: str) -> str:
    """The one key that a command shows, once and nowhere else."""
    key = output.splitlines()[0].rpartition(" ")[2]
    assert output.count(key) == 1
    return key


def line_value(output: str) -> Any:
    """What stands in the line for the settings."""
    line = re.search(r"^line for the settings: +(.*),$", output, re.MULTILINE)
    assert line
    return json.loads(f"{{{line[1]}}}")


def test_keys_are_added_rotated_listed_and_revoked(commands: Commands) -> None:
    added = commands.run(
        "add", "bob", "--expires", "2027-01-31", "--model", "m1", "--model", "m2",
        "--max-in-flight", "2", "--requests-per-minute", "60",
    )  # fmt: skip
    assert (added.returncode, added.stderr) == (0, "")
    first = shown_key(added.stdout)
    more = {
        "expires": "2027-01-31",
        "models": ["m1", "m2"],
        "max_in_flight": 2,
        "requests_per_minute": 60,
    }
    assert commands.kept() == {"bob": {"sha256": sha256sum(first)} | more}
    assert line_value(added.stdout) == commands.kept()
    plain = commands.run("add", "carol")
    assert line_value(plain.stdout) == {"carol": sha256sum(shown_key(plain.stdout))}
    rotated = commands.run("rotate", "bob")
    second = shown_key(rotated.stdout)
    assert second != first
    assert commands.kept()["bob"] == {"sha256": sha256sum(second)} | more
    listed = commands.run("list").stdout
    assert [line.split()[0] for line in listed.splitlines()] == ["bob", "carol"]
    assert second not in listed
    assert commands.run("revoke", "bob").returncode == 0
    assert list(commands.kept()) == ["carol"]
    assert commands.file.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    "arguments",
    [
        ("add", "bob builder"),
        ("add", "alice"),
        ("add", "bob", "--expires", "soon"),
        ("add", "bob", "--max-in-flight", "0"),
        ("revoke", "nobody"),
        ("rotate", "nobody"),
    ],
    ids=" ".join,
)
def test_a_refused_command_changes_nothing(commands: Commands, arguments: tuple[str, ...]) -> None:
    commands.file.write_text(json.dumps({"alice": digest(KEY)}))
    before = commands.file.read_bytes()
    refused = commands.run(*arguments)
    assert (refused.returncode, refused.stdout) == (1, "")
    assert len(refused.stderr.splitlines()) == 1
    assert commands.file.read_bytes() == before


@pytest.mark.parametrize(
    "given",
    [
        f"# ours\nalice {KEY}\n\nbob={OTHER_KEY}\n",
        f'alice: "{KEY}",\nbob: {OTHER_KEY}',
        json.dumps({"alice": KEY, "bob": OTHER_KEY}),
    ],
    ids=["lines", "colons", "JSON"],
)
def test_keys_in_use_are_taken_over_as_digests(commands: Commands, given: str) -> None:
    commands.file.write_text(json.dumps({"alice": digest(KEY) | {"max_in_flight": 1}}))
    taken = commands.run("import", "-", given=given)
    assert taken.returncode == 0, taken.stderr
    assert commands.kept() == {
        "alice": {"sha256": sha256sum(KEY), "max_in_flight": 1},
        "bob": {"sha256": sha256sum(OTHER_KEY)},
    }
    assert KEY not in taken.stdout + taken.stderr
    assert OTHER_KEY not in taken.stdout + taken.stderr


@pytest.mark.parametrize(
    "given",
    [f"bob {OTHER_KEY}\nalice another", f"{KEY}", f'{{"bob": "{OTHER_KEY}", "a b": "x"}}'],
    ids=["other key", "no name", "bad name"],
)
def test_an_import_is_all_or_nothing_and_quotes_no_key(commands: Commands, given: str) -> None:
    commands.file.write_text(json.dumps({"alice": digest(KEY)}))
    refused = commands.run("import", "-", given=given)
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "nothing imported" in refused.stderr
    assert KEY not in refused.stderr
    assert OTHER_KEY not in refused.stderr
    assert list(commands.kept()) == ["alice"]


def test_commands_at_the_same_time_lose_nothing(commands: Commands) -> None:
    running = [
        subprocess.Popen(
            ["python3", commands.launcher, "keys", "add", "--file", commands.file, f"n{number}"],
            stdout=subprocess.DEVNULL,
        )
        for number in range(6)
    ]
    assert [one.wait(60) for one in running] == [0] * 6
    assert sorted(commands.kept()) == [f"n{number}" for number in range(6)]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can own what another user must write")
def test_a_file_that_the_gateway_could_not_read_is_not_written(commands: Commands) -> None:
    os.chown(commands.file.parent, 1, 1)
    refused = commands.run("add", "bob")
    assert refused.returncode == 2
    assert "sudo -u daemon" in refused.stderr
    assert not commands.file.exists()


def test_changes_of_the_file_count_without_a_restart_and_broken_ones_not(tmp_path: Path) -> None:
    alice, bob = {"x-api-key": KEY}, {"x-api-key": OTHER_KEY}
    both = {"alice": digest(KEY), "bob": digest(OTHER_KEY)}
    with engine() as upstream, gateway_before(upstream.url, tmp_path) as gateway:
        assert gateway.ask(headers=bob)[0] == 401
        assert gateway.reload(json.dumps(both), hup=False)["keys"] == 2
        assert gateway.ask(headers=bob)[0] == gateway.ask(headers=alice)[0] == 200
        for broken in ("{", json.dumps(both | {"bob": {"sha256": "x"}})):
            line = gateway.reload(broken)
            assert line["kept_keys"] == 2
            assert str(gateway.keys_file) in line["error"]
            assert gateway.ask(headers=bob)[0] == gateway.ask(headers=alice)[0] == 200
        assert gateway.reload(json.dumps({"bob": digest(OTHER_KEY)}))["keys"] == 1
        revoked = gateway.ask(headers=alice)
        assert revoked[0] == 401
        assert revoked[2] == gateway.ask(headers={"x-api-key": "fable-unknown"})[2]
        gateway.keys_file.unlink()
        gateway.wait_for(lambda line: "cannot be read" in str(line.get("error")))
        assert gateway.ask(headers=bob)[0] == 200


def test_limits_of_a_key_hold(tmp_path: Path) -> None:
    keys = {
        "alice": digest(KEY) | {"models": MODELS[:1], "requests_per_minute": 6},
        "bob": digest(OTHER_KEY) | {"expires": "2020-01-01"},
    }
    with engine() as upstream, gateway_before(upstream.url, tmp_path, keys=keys) as gateway:
        assert gateway.ask(headers={"x-api-key": OTHER_KEY})[0] == 401
        assert gateway.ask({"model": MODELS[0]})[0] == 200
        for asked in ({"model": MODELS[1]}, {}, {"model": [MODELS[0]]}):
            status, _, body = gateway.ask(asked)
            assert (status, json.loads(body)["error"]["code"]) == (403, "model_not_allowed")
        connection = gateway.connect()
        twice = f'{{"model": "{MODELS[1]}", "model": "{MODELS[0]}"}}'
        connection.request("POST", "/v1/completions", twice, {"x-api-key": KEY})
        assert connection.getresponse().status == 403
        connection.close()
        assert gateway.ask(method="GET", path="/v1/models")[0] == 200
        status, headers, body = gateway.ask({"model": MODELS[0]})
        assert (status, json.loads(body)["error"]["code"]) == (429, "rate_limit_exceeded")
        assert 0 < int(headers["retry-after"]) <= 60
        upstream.next_seen()
        assert upstream.next_seen().target == "/v1/models"
        assert upstream.seen.empty()
