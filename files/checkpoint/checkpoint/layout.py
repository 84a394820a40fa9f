"""How an assembled checkpoint lies on the disk: new headers, and data taken from the parents."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hostlib.errors import EXIT_UNABLE, HostError
from hostlib.parallel import StoppableProgress, for_each

from checkpoint import census, manifest
from checkpoint.copying import copy_range, shareable
from checkpoint.header import BLOCK_BYTES, Shard, Tensor, build_header
from checkpoint.parents import Parent
from checkpoint.shards import build_index
from checkpoint.strict import require_regular

WRITERS = 2  # one copies while the other waits for its fsync
NEEDED = (manifest.CONFIG, manifest.QUANTISATION, "tokenizer_config.json")
# What else a tokenizer and chat template may consist of; nothing that could be run as code.
OPTIONAL = (
    "generation_config.json", "tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt",
    "special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "chat_template.json",
    "preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json",
)  # fmt: skip


@dataclass(frozen=True)
class Run:
    """Bytes of a parent's file that are taken as one, and where they go: offsets in bytes."""

    source: Path
    begin: int
    nbytes: int
    target: int


@dataclass(frozen=True)
class FilePlan:
    """A file of the result: its first bytes, then what is taken from the parents."""

    content: bytes
    runs: tuple[Run, ...] = ()
    tensors: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """Size of the file."""
        return len(self.content) + sum(run.nbytes for run in self.runs)

    @property
    def own_bytes(self) -> int:
        """What it needs on a file system that shares blocks."""
        unshared = (run.nbytes for run in self.runs if not shareable(run.begin, run.target))
        return len(self.content) + sum(unshared)


def plan_files(trunk: Parent, base: Parent) -> dict[str, FilePlan]:
    """Every file of the result but its manifest.

    The trunk's shards stay as they are, under new headers. Each of the base's shards gives one
    with what is taken from it: vision tower, draft head and input scales.

    Raises:
        HostError: a file that the result needs is missing in the base, or is no regular file.
    """
    plans = [
        plan_shard(shard, {name: census.nested(name) for name in shard.tensors})
        for shard in trunk.shards
    ]
    plans += [
        plan_shard(shard, {n: n for n in shard.tensors if census.group_of(n) != "trunk"})
        for shard in base.shards
    ]
    plans = [plan for plan in plans if plan.tensors]
    files = {
        f"model-{number:05}-of-{len(plans):05}.safetensors": plan
        for number, plan in enumerate(plans, start=1)
    }
    weight_map = {tensor: name for name, plan in files.items() for tensor in plan.tensors}
    total_bytes = sum(plan.nbytes - len(plan.content) for plan in plans)
    files[manifest.INDEX] = FilePlan(build_index(weight_map, total_bytes))
    for name in (*NEEDED, *OPTIONAL):
        path = base.folder / name
        if name in NEEDED or path.exists():
            require_regular(path)
            files[name] = FilePlan(b"", (Run(path, 0, path.stat().st_size, 0),))
    return files


def plan_shard(shard: Shard, wanted: Mapping[str, str]) -> FilePlan:
    """A shard that holds the tensors `wanted` of `shard`: name there, and name in the result.

    The header's size is chosen so that as much data as can be keeps its place in its block.
    """
    tensors: dict[str, Tensor] = {}
    spans: list[list[int]] = []  # begin in the source, bytes, begin in the result's data
    end = 0
    for name, span in shard.spans().items():
        if name not in wanted:
            continue
        tensors[wanted[name]] = shard.tensors[name]
        if spans and span.begin == spans[-1][0] + spans[-1][1]:
            spans[-1][1] += span.nbytes
        else:
            spans.append([span.begin, span.nbytes, end])
        end += span.nbytes
    places: Counter[int] = Counter()
    for begin, nbytes, offset in spans:
        places[(begin - offset) % BLOCK_BYTES] += nbytes
    best = places.most_common(1)
    header = build_header(tensors, shard.metadata, best[0][0] if best else 0)
    runs = (Run(shard.path, begin, nbytes, len(header) + offset) for begin, nbytes, offset in spans)
    return FilePlan(header, tuple(runs), tuple(tensors))


def lay_out(files: Mapping[str, FilePlan], folder: Path) -> None:
    """Write these files into the empty `folder`, each durable when it is done.

    Raises:
        HostError: no space, or a parent's file became shorter; the message names the file.
    """
    total_bytes = sum(plan.nbytes for plan in files.values())
    progress = StoppableProgress("laying out", total_bytes)

    def write(name: str) -> None:
        try:
            _write(files[name], folder / name, progress)
        except OSError as error:
            raise HostError(
                f"{folder / name}: {error.strerror}; nothing was changed", exit_code=EXIT_UNABLE
            ) from None

    for_each(files, write, WRITERS, progress)


def _write(plan: FilePlan, path: Path, progress: StoppableProgress) -> None:
    with path.open("xb") as stream:
        stream.write(plan.content)
        stream.flush()
        progress.add(len(plan.content))
        for run in plan.runs:
            with run.source.open("rb") as source:
                copy_range(
                    source.fileno(), run.begin, stream.fileno(), run.target, run.nbytes, progress
                )
        os.fsync(stream.fileno())
