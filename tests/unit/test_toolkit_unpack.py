"""Unpacking and merging: nothing leaves its folder, nothing is overwritten."""

from __future__ import annotations

import lzma
import os
import subprocess
import tarfile
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from cuda_toolkit.budget import Budget
from cuda_toolkit.unpack import Entry, merge, unpack
from hostlib.errors import HostError
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.toolkit_support import flip_byte, make_archive, make_hostile_archive

PARTS = st.sampled_from(["a", "b", "..", "."])
PATHS = st.lists(PARTS, min_size=1, max_size=4).map("/".join)
KINDS = st.sampled_from([tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE])
MEMBERS = st.lists(st.tuples(PATHS, KINDS, PATHS), min_size=1, max_size=8)


@settings(max_examples=150, deadline=None)
@given(MEMBERS)
def test_whatever_the_archive_holds_nothing_leaves_the_folder(
    members: list[tuple[str, bytes, str]],
) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        outer = Path(scratch).resolve()
        infos = []
        for path, kind, target in members:
            info = tarfile.TarInfo(f"top/{path}")
            info.type = kind
            info.linkname = f"top/{target}" if kind == tarfile.LNKTYPE else target
            infos.append(info)
        make_hostile_archive(outer / "x.tar.xz", infos)
        folder = outer / "in/folder"
        folder.parent.mkdir()
        try:
            entries = unpack(outer / "x.tar.xz", folder)
        except HostError:
            entries = None
        assert set(outer.iterdir()) == {outer / "in", outer / "x.tar.xz"}
        assert list((outer / "in").iterdir()) == [folder]
        listed = subprocess.run(
            ["find", folder, "(", "-type", "f", "-o", "-type", "l", ")", "-printf", "%P\n"],
            capture_output=True, text=True, check=True,
        ).stdout.split()  # fmt: skip
        for name in listed:
            resolved = Path(os.path.realpath(folder / name))
            assert resolved.is_relative_to(folder)
        if entries is not None:
            assert sorted(entries) == sorted(listed)


def test_content_modes_and_digests_are_those_of_the_archive(tmp_path: Path) -> None:
    tree = tmp_path / "top"
    (tree / "bin").mkdir(parents=True)
    (tree / "bin/tool").write_bytes(os.urandom(3_000_000))
    (tree / "bin/tool").chmod(0o4777)
    (tree / "bin/data").write_text("x")
    (tree / "bin/data").chmod(0o600)
    (tree / "bin/link").symlink_to("tool")
    subprocess.run(["tar", "-cJf", "t.tar.xz", "top"], cwd=tmp_path, check=True)
    entries = unpack(tmp_path / "t.tar.xz", tmp_path / "out")
    assert subprocess.run(["diff", "-r", tree, tmp_path / "out"], check=False).returncode == 0
    digest = subprocess.run(
        ["sha256sum", tree / "bin/tool"], capture_output=True, text=True, check=True
    ).stdout.split()[0]
    assert entries["bin/tool"] == Entry(size=3_000_000, sha256=digest)
    assert entries["bin/link"] == Entry(target="tool")
    modes = [oct((tmp_path / "out/bin" / name).stat().st_mode)[-4:] for name in ("tool", "data")]
    assert modes == ["0755", "0644"]


@pytest.mark.parametrize("keep", [0.3, 0.9])
def test_a_damaged_archive_is_named(tmp_path: Path, keep: float) -> None:
    archive = tmp_path / "x.tar.xz"
    make_archive({"data": os.urandom(100_000).hex()}, archive, "top")
    os.truncate(archive, int(archive.stat().st_size * keep))
    with pytest.raises(HostError, match=r"x\.tar\.xz: is damaged"):
        unpack(archive, tmp_path / "out")


def test_an_archive_of_several_streams_is_whole(tmp_path: Path) -> None:
    noise = os.urandom(200_000).hex()
    make_archive({"data": noise}, tmp_path / "x.tar.xz", "top")
    plain = lzma.decompress((tmp_path / "x.tar.xz").read_bytes())
    streams = (lzma.compress(plain[:70_000]), lzma.compress(plain[70_000:]))
    (tmp_path / "x.tar.xz").write_bytes(b"".join(streams))
    unpack(tmp_path / "x.tar.xz", tmp_path / "out")
    assert (tmp_path / "out/data").read_text() == noise


@pytest.mark.parametrize("damage", ["flipped", "end mark cut off", "no archive"])
def test_damage_anywhere_is_seen(tmp_path: Path, damage: str) -> None:
    archive = tmp_path / "x.tar.xz"
    make_archive({"data": os.urandom(100_000).hex()}, archive, "top")
    if damage == "flipped":
        flip_byte(archive)
    elif damage == "end mark cut off":
        os.truncate(archive, archive.stat().st_size - 4)
    else:
        archive.write_bytes(lzma.compress(b"no tar at all" * 1000))
    with pytest.raises(HostError, match=r"x\.tar\.xz: is damaged"):
        unpack(archive, tmp_path / "out")


ONE, OTHER = Entry(1, "1" * 64), Entry(1, "2" * 64)


def test_each_component_keeps_its_own_licence() -> None:
    plan = merge({"a": {"LICENSE": ONE}, "b": {"LICENSE": OTHER}})
    assert sorted(plan) == ["share/doc/a/LICENSE", "share/doc/b/LICENSE"]


def test_the_same_file_twice_is_taken_once() -> None:
    assert merge({"a": {"i/x.h": ONE}, "b": {"i/x.h": ONE}}) == {"i/x.h": ("a", "i/x.h", ONE)}


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"i/x": ONE}, {"i/x": OTHER}),
        ({"i/x": ONE}, {"i/x": Entry(target="y")}),
        ({"i/x": Entry(target="z")}, {"i/x": Entry(target="y")}),
        ({"i/x": ONE}, {"i/x/y": ONE}),
        ({"lib64": Entry(target="lib")}, {"lib64/stubs/y": ONE}),
    ],
)
def test_components_that_contradict_each_other_are_refused(
    first: dict[str, Entry], second: dict[str, Entry]
) -> None:
    for parts in ({"a": first, "b": second}, {"a": second, "b": first}):
        with pytest.raises(HostError, match="components of one release"):
            merge(parts)


def test_an_archive_that_takes_too_much_memory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "top").mkdir()
    subprocess.run(
        "tar -c top | xz --lzma2=preset=0,dict=128MiB >x.tar.xz", shell=True, cwd=tmp_path,
        check=True,
    )  # fmt: skip
    with pytest.raises(HostError, match="Memory usage limit"):
        unpack(tmp_path / "x.tar.xz", tmp_path / "out")


def test_those_who_share_a_budget_never_hold_more_than_it_has() -> None:
    budget, lock = Budget(10), threading.Lock()
    held = 0
    highest = []

    def work(wanted: int) -> None:
        nonlocal held
        with budget.part(wanted):
            with lock:
                held += min(wanted, 10)
                highest.append(held)
            time.sleep(0.001)
            with lock:
                held -= min(wanted, 10)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, [3, 8, 100, 1, 0, 10, 5, 5] * 5))
    assert len(highest) == 40
    assert max(highest) <= 10
