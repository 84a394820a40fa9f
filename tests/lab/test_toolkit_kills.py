"""Killed at any moment, run again: always a whole tree.

The installer and the proof program are the real ones; the toolkit is a stand-in (its nvcc is a
script), so that a whole installation takes a fraction of a second and many moments can be tried.
Kills with real parts and a real compiler are in tests/lab/test_toolkit_mirror.py.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.toolkit_support import (
    Site,
    assert_census,
    lay_out_programs,
    make_site,
    served,
    standin_components,
    whole_tree,
)

KILLS = 50
TRIES = 99
ADOPTIONS = 12
HEALS = 12
NOISE_BYTES = 1_000_000
SEED = int(os.environ.get("FABLE_KILL_SEED", "0")) or random.SystemRandom().randrange(1, 1 << 32)


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("origin")
    programs = lay_out_programs(folder / "tools")
    site = make_site(folder, programs, standin_components(NOISE_BYTES))
    with served(site.base) as address:
        site.spec["base_url"] = address
        yield site


@pytest.fixture
def memory() -> Iterator[Path]:
    """A folder in memory: what a killed process wrote stays there too, and no disk is awaited."""
    with tempfile.TemporaryDirectory(prefix="toolkit-kills.", dir="/dev/shm") as folder:
        yield Path(folder)


def kill_after(site: Site, command: str, moment_s: float) -> bool:
    """Run it and kill it `moment_s` later; whether it was still running then."""
    process = subprocess.Popen(
        site.arguments(command),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "TMPDIR": str(site.folder)},
    )
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(moment_s)
    running = process.poll() is None
    process.send_signal(signal.SIGKILL)
    process.wait()
    return running


def duration_s(site: Site, command: str) -> float:
    """How long it takes to its end, undisturbed."""
    began = time.monotonic()
    done = site.run(command)
    assert done.returncode == 0, done.stderr
    return time.monotonic() - began


def phase(site: Site) -> str:
    """Where an installation was killed, from what it left."""
    if site.link.is_symlink():
        return "linked"
    if site.trees():
        return "published"
    if list(site.root.glob(".staging*/tree/.toolkit.json")):
        return "proving"
    if list(site.root.glob(".staging*/*")):
        return "unpacking"
    if list(site.root.glob(".archives/*.partial")):
        return "fetching"
    return "before"


def test_a_second_run_after_a_kill_ends_in_a_whole_tree(origin: Site, memory: Path) -> None:
    print(f"FABLE_KILL_SEED={SEED}")
    chance = random.Random(SEED)
    first = Site(origin.base, origin.programs, memory / "first", origin.spec)
    first.folder.mkdir()
    longest_s = duration_s(first, "install")
    phases: Counter[str] = Counter()
    tries = 0
    while phases.total() < KILLS:
        tries += 1
        assert tries <= TRIES, f"too few of {TRIES} kills met an installation: {phases}"
        site = Site(origin.base, origin.programs, memory / str(tries), origin.spec)
        site.folder.mkdir()
        moment_s = chance.uniform(0, 0.7 * longest_s)  # a machine in motion: aim below the end
        if not kill_after(site, "install", moment_s):
            shutil.rmtree(site.folder)
            continue
        phases[phase(site)] += 1
        for name in site.trees():
            assert_census(site.root / name)  # what has its name is whole
        if site.link.is_symlink():
            assert_census(site.link.resolve(strict=True))
        done = site.run("install")
        assert done.returncode == 0, (SEED, moment_s, done.stderr)
        tree = whole_tree(site)
        assert sorted(path.name for path in site.root.iterdir()) == [".lock", tree.name]
        shutil.rmtree(site.folder)
    print(dict(phases))
    assert len(phases) >= 3


def test_an_adoption_that_is_killed_leaves_the_tree_where_people_find_it(
    origin: Site, memory: Path
) -> None:
    print(f"FABLE_KILL_SEED={SEED}")
    chance = random.Random(SEED)
    first = Site(origin.base, origin.programs, memory / "first", origin.spec)
    first.folder.mkdir()
    assert first.run("install").returncode == 0
    hand_made = memory / "hand-made"
    subprocess.run(["cp", "-a", first.link.resolve(), hand_made], check=True)
    for name in (".proof.json", ".toolkit.json", "census.json"):
        (hand_made / name).unlink()

    def place(name: str) -> Site:
        site = Site(origin.base, origin.programs, memory / name, origin.spec)
        site.folder.mkdir()
        subprocess.run(["cp", "-a", hand_made, site.link], check=True)
        return site

    longest_s = duration_s(place("whole"), "adopt")
    for number in range(ADOPTIONS):
        site = place(str(number))
        moment_s = chance.uniform(0, longest_s)
        kill_after(site, "adopt", moment_s)
        found = subprocess.run(
            ["diff", "-r", "--no-dereference", "--exclude=*.json*", f"{site.link}/", hand_made],
            check=False,
        )
        assert found.returncode == 0, (SEED, moment_s)
        done = site.run("adopt")
        assert done.returncode == 0, (SEED, moment_s, done.stderr)
        assert_census(site.link.resolve(strict=True))
        shutil.rmtree(site.folder)


def test_healing_that_is_killed_leaves_a_tree_in_its_place(origin: Site, memory: Path) -> None:
    print(f"FABLE_KILL_SEED={SEED}")
    chance = random.Random(SEED)
    site = Site(origin.base, origin.programs, memory / "heal", origin.spec)
    site.folder.mkdir()
    longest_s = duration_s(site, "install")
    tree = whole_tree(site)
    outcomes: Counter[bool] = Counter()
    for _ in range(HEALS):
        library = tree / "lib/libcurand.so.10"
        library.unlink()
        moment_s = chance.uniform(0.1 * longest_s, longest_s)
        kill_after(site, "install", moment_s)
        outcomes[library.exists()] += 1
        if library.exists():
            assert_census(tree)
        else:
            assert (tree / "include/curand.h").is_file()
        done = site.run("install")
        assert done.returncode == 0, (SEED, moment_s, done.stderr)
        assert whole_tree(site) == tree
        assert sorted(path.name for path in site.root.iterdir()) == [".lock", tree.name]
    print(outcomes)
