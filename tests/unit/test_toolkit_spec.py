"""What names a tree, and how much space it will need."""

from __future__ import annotations

import dataclasses
import os
import subprocess
from pathlib import Path

import pytest
from cuda_toolkit.space import needed_bytes
from cuda_toolkit.spec import Archives, Component, Expected, Runfile, Spec, tree_name
from cuda_toolkit.xz import TAIL_BYTES, dictionary_bytes, memory_bytes, unpacked_bytes
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.toolkit_support import make_archive

NVCC = Component("cuda_nvcc", "12.8.93", "n/nvcc.tar.xz", 2, "a" * 64)
CUDART = Component("cuda_cudart", "12.8.90", "n/cudart.tar.xz", 1, "b" * 64)
ARCHIVES = Archives("/mirror", "m.json", "c" * 64, (NVCC, CUDART))
EXPECTED = Expected(12080, "12.8.93", ("cuda.h",))
RUNFILE = Runfile("/disk/cuda.run", 10, "e" * 64)


def test_a_trees_name_follows_what_determines_its_files_and_nothing_else() -> None:
    name = tree_name(Spec(ARCHIVES, EXPECTED))
    replace = dataclasses.replace
    same = [
        Spec(replace(ARCHIVES, base_url="https://elsewhere"), EXPECTED),
        Spec(replace(ARCHIVES, components=(CUDART, NVCC)), EXPECTED),
        Spec(ARCHIVES, replace(EXPECTED, required_headers=())),
    ]
    other = [
        Spec(replace(ARCHIVES, manifest_sha256="d" * 64), EXPECTED),
        Spec(replace(ARCHIVES, components=(NVCC,)), EXPECTED),
        Spec(replace(ARCHIVES, components=(replace(NVCC, sha256="d" * 64), CUDART)), EXPECTED),
        Spec(RUNFILE, EXPECTED),
        Spec(replace(RUNFILE, sha256="f" * 64), EXPECTED),
    ]
    assert [tree_name(item) for item in same] == [name] * len(same)
    assert len({name, *map(tree_name, other)}) == 1 + len(other)
    assert tree_name(Spec(replace(RUNFILE, location="https://x/y.run"), EXPECTED)) == tree_name(
        Spec(RUNFILE, EXPECTED)
    )


def uncompressed(archive: Path) -> int:
    """What the xz program says of the archive."""
    told = subprocess.run(
        ["xz", "--robot", "--list", archive], capture_output=True, text=True, check=True
    ).stdout
    (totals,) = (line.split("\t") for line in told.splitlines() if line.startswith("totals"))
    return int(totals[4])


@pytest.mark.parametrize(
    "options", [["-0"], ["-9", "-T2"], ["-1", "-T2", "--block-size=4096"], ["-1", "--check=none"]]
)
def test_an_archive_tells_what_it_unpacks_to(tmp_path: Path, options: list[str]) -> None:
    plain = tmp_path / "x"
    plain.write_bytes(os.urandom(50_001) + bytes(150_000))
    subprocess.run(["xz", *options, plain], check=True)
    content = (tmp_path / "x.xz").read_bytes()
    assert unpacked_bytes(content[-TAIL_BYTES:], len(content)) == 200_001
    assert uncompressed(tmp_path / "x.xz") == 200_001
    assert unpacked_bytes(content[-TAIL_BYTES:], len(content) + 4) is None
    assert unpacked_bytes((content + content)[-TAIL_BYTES:], 2 * len(content)) is None


@pytest.mark.parametrize("plain_bytes", [1000, 3_000_000])
@pytest.mark.parametrize("preset", ["-0", "-6", "-9"])
@pytest.mark.parametrize("filters", [(), ("--x86",)])
def test_an_archive_tells_what_memory_it_takes(
    tmp_path: Path, preset: str, filters: tuple[str, ...], plain_bytes: int
) -> None:
    dictionaries = {"-0": 1 << 18, "-6": 8 << 20, "-9": 64 << 20}
    plain = tmp_path / "x"
    plain.write_bytes(bytes(plain_bytes))
    options = [*filters, f"--lzma2=preset={preset[1:]}"] if filters else [preset]
    subprocess.run(["xz", *options, plain], check=True)
    assert memory_bytes(tmp_path / "x.xz") == min(dictionaries[preset], plain_bytes)
    assert dictionary_bytes((tmp_path / "x.xz").read_bytes()) == dictionaries[preset]


@given(st.binary(max_size=60))
def test_a_strange_head_tells_no_dictionary_or_one_of_the_formats(data: bytes) -> None:
    found = dictionary_bytes(b"\xfd7zXZ\x00" + data)
    assert found is None or found >= 4096


@given(st.binary(max_size=200), st.integers(0, 400))
def test_what_is_no_index_tells_nothing(data: bytes, size: int) -> None:
    found = unpacked_bytes(data + b"YZ", size)
    assert found is None or found >= 0


def test_space_is_counted_from_the_archives_and_less_what_lies_there(tmp_path: Path) -> None:
    base, kept = tmp_path / "mirror", tmp_path / "kept"
    kept.mkdir()
    components = []
    for name in ("a", "b"):
        archive = base / f"{name}.tar.xz"
        make_archive({"data": "x" * 1_000_000, "noise": os.urandom(1000).hex()}, archive, "top")
        size = archive.stat().st_size
        components.append(Component(name, "1", f"{name}.tar.xz", size, "0" * 64))
    spec = Spec(Archives(str(base), "m.json", "0" * 64, tuple(components)), EXPECTED)
    trees = sum(uncompressed(base / f"{name}.tar.xz") for name in ("a", "b"))
    archives = sum(item.size for item in components)
    assert 0 <= needed_bytes(spec, kept) - archives - trees <= 0.1 * trees
    (kept / "a.tar.xz.partial").write_bytes(bytes(500))
    assert 0 <= needed_bytes(spec, kept) - archives - trees + 500 <= 0.1 * trees
    (base / "a.tar.xz").write_bytes(b"no archive")  # no index: the cautious estimate
    unknown = components[0].size
    assert needed_bytes(spec, kept) < archives + trees
    assert needed_bytes(spec, kept) > trees / 2 + 4 * unknown
