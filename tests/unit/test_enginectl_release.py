"""Releases: strict reading, and a name that is its content."""

from __future__ import annotations

import copy
import hashlib
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from enginectl.paths import Places
from enginectl.release import NAME, load_release, parse_release, release_name
from hostlib.errors import HostError
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.enginectl_support import content, lay_down, named

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
CONTENT = st.dictionaries(st.text().filter(lambda key: key != "name"), PLAIN, max_size=5)


def test_name_is_the_digest_of_canonical_json() -> None:
    value = {"b": [1, "ü"], "a": {"z": None, "y": True}, "name": "ignored"}
    canonical = b'{"a":{"y":true,"z":null},"b":[1,"\\u00fc"]}'
    digest = subprocess.run(["sha256sum"], input=canonical, capture_output=True, check=True)
    assert release_name("skinny", value) == "skinny-" + digest.stdout.decode()[:16]


@given(CONTENT, CONTENT)
def test_name_changes_with_the_content_and_only_then(
    one: dict[str, Any], other: dict[str, Any]
) -> None:
    same_text = json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)
    assert (release_name("e", one) == release_name("e", other)) == same_text


@given(CONTENT)
def test_name_ignores_the_order_of_keys_and_survives_a_file(one: dict[str, Any]) -> None:
    turned = dict(reversed(one.items()))
    assert release_name("e", turned) == release_name("e", one)
    assert release_name("e", json.loads(json.dumps(one, indent=3))) == release_name("e", one)
    assert NAME.fullmatch(release_name("e", one))


def test_a_release_is_read_as_it_was_written(tmp_path: Path) -> None:
    value = content(tmp_path / "parts")
    name = lay_down(tmp_path, value)
    release = load_release(Places(tmp_path), name)
    assert release.name == name
    assert list(release.argv) == value["argv"]
    assert release.env == value["env"]
    assert (release.listen.host, release.listen.port) == ("127.0.0.1", 8601)
    assert release.gates.census_modules_per_rank == 128
    assert release.missing_paths() == []


REFUSED: dict[str, tuple[list[str], Any]] = {
    "unknown key": (["surprise"], 1),
    "unknown gate": (["gates", "surprise"], 1),
    "port of another type": (["listen", "port"], "8601"),
    "port that is true": (["listen", "port"], True),
    "port out of range": (["listen", "port"], 70000),
    "host name": (["listen", "host"], "localhost"),
    "empty argv": (["argv"], []),
    "relative program": (["argv"], ["python"]),
    "number in argv": (["argv"], ["/bin/true", 1]),
    "NUL in the environment": (["env", "A"], "x\0y"),
    "name of a variable": (["env", "A=B"], "x"),
    "no served names": (["served_names"], []),
    "a served name twice": (["served_names"], ["a", "a"]),
    "climbing path": (["required_paths"], ["/a/../b"]),
    "relative venv": (["paths", "venv"], "venv"),
    "no ranks": (["gates", "tensor_parallel"], 0),
    "fraction": (["drain_seconds"], 1.5),
    "negative depth": (["gates", "mtp_depth"], -1),
    "engine with a slash": (["engine"], "../skinny"),
    "newer format": (["format"], 2),
    "format that is true": (["format"], True),
}


@pytest.mark.parametrize("case", REFUSED)
def test_wrong_content_is_refused_and_located(case: str, tmp_path: Path) -> None:
    keys, wrong = REFUSED[case]
    value = copy.deepcopy(content(tmp_path))
    inner = value
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] = wrong
    with pytest.raises(HostError) as caught:
        parse_release(named(value), "place.json")
    assert caught.value.message.startswith("place.json")
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("key", sorted(content(Path("/tmp"), 1)))
def test_every_key_is_needed(key: str, tmp_path: Path) -> None:
    value = content(tmp_path)
    del value[key]
    if key not in ("name", "engine"):
        value = named(value)
    with pytest.raises(HostError, match=key):
        parse_release(value, "place.json")


def test_an_edited_release_is_refused(tmp_path: Path) -> None:
    value = content(tmp_path)
    value["argv"] = [*value["argv"], "--port", "1"]
    with pytest.raises(HostError, match="edited after rendering"):
        parse_release(value, "place.json")


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{", '{"format": 1, "format": 1}', "[" * 100_000, "\0"],
    ids=["empty", "list", "cut", "doubled key", "deep", "nul"],
)
def test_damaged_files_are_refused_in_one_line(text: str, tmp_path: Path) -> None:
    name = lay_down(tmp_path, content(tmp_path))
    file = Places(tmp_path).release(name)
    file.write_text(text)
    with pytest.raises(HostError) as caught:
        load_release(Places(tmp_path), name)
    assert str(file) in caught.value.message


@pytest.mark.parametrize("name", ["../../etc", "skinny", "", "skinny-0123456789ABCDEF"])
def test_a_name_that_is_none_never_becomes_a_path(name: str, tmp_path: Path) -> None:
    with pytest.raises(HostError, match="is not a release name"):
        load_release(Places(tmp_path), name)


def test_a_release_in_anothers_folder_is_refused(tmp_path: Path) -> None:
    value = content(tmp_path)
    other = "skinny-" + hashlib.sha256(b"other").hexdigest()[:16]
    folder = Places(tmp_path).release(other).parent
    folder.mkdir(parents=True)
    (folder / "release.json").write_text(json.dumps(value))
    with pytest.raises(HostError, match=value["name"]):
        load_release(Places(tmp_path), other)


def test_missing_paths_are_all_named(tmp_path: Path) -> None:
    value = content(tmp_path, required_paths=["/no/such/a", "/no/such/b"])
    found = parse_release(value, "x").missing_paths()
    assert [str(path) for path in found] == ["/no/such/a", "/no/such/b"]
