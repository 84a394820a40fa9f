"""Are tensors the same, byte for byte, in two checkpoints?"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from hostlib.errors import HostError
from hostlib.parallel import StoppableProgress, for_each

from checkpoint import census
from checkpoint.header import Shard, Span
from checkpoint.shards import read_shards, tensors_of
from checkpoint.strict import few

CHUNK_BYTES = 1 << 20


def trunk_names(names: Mapping[str, object]) -> dict[str, str]:
    """The trunk's tensors of a parent, and what the wrapper calls each of them."""
    if any(name.startswith(census.TRUNK) for name in names):
        return {name: name for name in names if census.group_of(name) == "trunk"}
    return {name: census.nested(name) for name in names}


def check_trunk(folder: Path, parent: Path) -> int:
    """Raise HostError unless `folder` holds the trunk of `parent`; the number of its tensors."""
    found, origin = read_shards(folder), read_shards(parent)
    names = trunk_names(tensors_of(origin))
    check_same(found, origin, names, f"{folder}: the trunk is not that of {parent}")
    return len(names)


def check_same(
    found: list[Shard], parent: list[Shard], names: Mapping[str, str], fault: str
) -> None:
    """Compare tensors in parallel, in constant memory.

    Args:
        names: the tensors to compare: name in `parent`, and name in `found`.
        fault: begin of the error's message.

    Raises:
        HostError: one is missing, of another dtype or shape, or has other bytes.
    """
    have, want = tensors_of(found), tensors_of(parent)
    difference = census.compare(
        {name: have[name] for name in names.values() if name in have},
        {names[name]: want[name] for name in names},
    )
    if difference:
        raise HostError(fault, *difference.lines())
    here, there = _places(found), _places(parent)
    progress = StoppableProgress("comparing", sum(want[name].nbytes for name in names))
    wrong: list[str] = []

    def compare(name: str) -> None:
        if not _same_bytes(there[name], here[names[name]], progress):
            wrong.append(names[name])

    for_each(names, compare, os.cpu_count() or 1, progress)
    if wrong:
        raise HostError(fault, f"{len(wrong)} with other bytes: {few(sorted(wrong))}")


def _places(shards: list[Shard]) -> dict[str, tuple[Path, Span]]:
    return {name: (shard.path, span) for shard in shards for name, span in shard.spans().items()}


def _same_bytes(
    one: tuple[Path, Span], other: tuple[Path, Span], progress: StoppableProgress
) -> bool:
    (path, span), (other_path, other_span) = one, other
    with path.open("rb", buffering=0) as left, other_path.open("rb", buffering=0) as right:
        for done in range(0, span.nbytes, CHUNK_BYTES):
            count = min(CHUNK_BYTES, span.nbytes - done)
            here = os.pread(left.fileno(), count, span.begin + done)
            if len(here) != count or here != os.pread(
                right.fileno(), count, other_span.begin + done
            ):
                return False
            progress.add(count)
    return True
