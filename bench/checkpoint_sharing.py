#!/usr/bin/env python3
"""The checkpoint's layout phase where the file system can share blocks: as root, on loop devices.

    .venv/bin/python bench/checkpoint_sharing.py [--rounds N]

Pairs of growing size lie on a new XFS and on a new btrfs. Each round lays the assembled shards out
once, and copies the same bytes with cp --reflink=never; both fsync, and what was written is removed
before the next begins. Medians. What one layout takes of the disk is what the file system's own
count says, before and after, all of it written.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path[:0] = [
    str(REPOSITORY),
    *(str(REPOSITORY / "files" / p) for p in ("checkpoint", "hostlib")),
]

from bench.checkpoint import LAYOUT, PYTHON, Bench, run  # noqa: E402
from lab.checkpoint import build_pair  # noqa: E402
from lab.checkpoint_config import Size  # noqa: E402
from lab.places import CACHE  # noqa: E402

SHARING_BYTES = (500_000_000, 1_000_000_000, 2_000_000_000)
DISK_BYTES = 16_000_000_000


@contextlib.contextmanager
def mounted(work: Path, kind: str) -> Iterator[Path]:
    """A new file system of this kind in a file, mounted."""
    disk, place = work / f"{kind}.img", work / kind
    with disk.open("wb") as stream:
        stream.truncate(DISK_BYTES)
    place.mkdir()
    run([f"mkfs.{kind}", "-q", str(disk)])
    run(["mount", "-o", "loop", str(disk), str(place)])
    try:
        yield place
    finally:
        run(["umount", str(place)])
        disk.unlink()


def used(place: Path) -> int:
    """Bytes in use on the file system of `place`, when all is written."""
    os.sync()
    state = os.statvfs(place)
    return (state.f_blocks - state.f_bfree) * state.f_frsize


def sharing(work: Path, kind: str, rounds: int) -> None:
    """The layout phase on a file system that shares blocks, for pairs of growing size."""
    if os.geteuid() or not shutil.which(f"mkfs.{kind}"):
        print(f"{kind}: not shown: needs root and mkfs.{kind} (xfsprogs, btrfs-progs)")
        return
    with mounted(work, kind) as place:
        print(f"{kind}, loop-mounted: layout, cp --reflink=never; medians of {rounds}")
        for least_bytes in SHARING_BYTES:
            folder = place / str(least_bytes)
            (folder / "pair").mkdir(parents=True)
            bench = Bench(folder, build_pair(folder / "pair", Size.of_bytes(least_bytes)))
            before = used(place)
            result = folder / "result"
            result.mkdir()
            bench.tell("layout", LAYOUT, PYTHON, result)
            taken = used(place) - before
            files = [str(path) for path in result.iterdir()]
            times: tuple[list[float], list[float]] = ([], [])
            for _ in range(rounds):
                times[0].append(bench.layout())
                times[1].append(bench.cp(files))
            size = sum(Path(file).stat().st_size for file in files)
            print(
                f"  {size / 1e9:5.2f} GB: {statistics.median(times[0]):6.3f} s,"
                f" {statistics.median(times[1]):6.3f} s; takes {taken / 1e6:.1f} MB of the disk"
            )
            shutil.rmtree(folder)


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=CACHE, help="on the disk to use")
    options = parser.parse_args()
    for kind in ("xfs", "btrfs"):
        with tempfile.TemporaryDirectory(prefix="checkpoint-bench.", dir=options.folder) as name:
            try:
                sharing(Path(name), kind, options.rounds)
            except SystemExit as error:
                print(f"{kind}: not shown: {error}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
