"""Where a checkpoint is put: what stands in its way is refused first, and never lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab.checkpoint import Pair
from tests.unit.checkpoint_support import shards
from tests.unit.test_checkpoint_assemble import arguments, assembled, digest_of
from tests.unit.test_checkpoint_fetch import Host, assert_refused, assert_whole, flip, snapshot


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, ckpt_tools: Path, pair: Pair) -> Path:
    """A checkpoint elsewhere, to be fetched."""
    return assembled(Host(ckpt_tools, tmp_path_factory.mktemp("elsewhere")), pair)


def commands(host: Host, pair: Pair, whole: Path, link: Path) -> list[list[str]]:
    """Both ways to the same checkpoint."""
    place = ["--manifest-sha256", digest_of(whole), "--root", str(host.root)]
    assemble = [*arguments(host, pair)[:-1], str(link)]
    return [["fetch", str(whole), *place, "--link", str(link)], [*assemble, *place]]


def test_a_place_that_cannot_be_is_refused_before_any_work(
    host: Host, pair: Pair, whole: Path
) -> None:
    for link, code, named in (
        (host.root, 1, "folder of all checkpoints"),
        (host.data / "no/such/link", 2, "no such folder"),
    ):
        for command in commands(host, pair, whole, link):
            assert_refused(host.run(*command), code, link.parent, named)
            assert list(host.data.iterdir()) == []


def test_what_a_killed_adoption_left_at_the_place_gives_way(
    host: Host, pair: Pair, whole: Path
) -> None:
    place = host.root / whole.name
    host.root.mkdir()
    for command in commands(host, pair, whole, host.link):
        place.symlink_to(place)
        done = host.run(*command)
        assert done.returncode == 0, done.stderr
        assert_whole(place)
        assert not place.is_symlink()
        place.rename(host.data / f"made by {command[0]}")


def test_what_is_no_folder_at_the_place_is_left_alone(
    host: Host, pair: Pair, whole: Path, tmp_path: Path
) -> None:
    elsewhere = Host(host.tools, tmp_path / "other")
    elsewhere.data.mkdir()
    damaged = assembled(elsewhere, pair)
    flip(shards(damaged)[0])
    elsewhere.run("verify", "--deep", damaged)
    place = host.root / whole.name
    host.root.mkdir()
    for command in commands(host, pair, whole, host.link):
        place.write_text("mine")
        assert_refused(host.run(*command), 1, place, "is no folder of its own")
        assert place.read_text() == "mine"
        place.unlink()
        place.symlink_to(damaged)
        before = snapshot(damaged)
        assert_refused(host.run(*command), 1, place, "is no folder of its own")
        assert snapshot(damaged) == before
        place.unlink()
    assert not host.link.is_symlink()
