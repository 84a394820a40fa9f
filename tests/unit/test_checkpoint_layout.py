"""Shards and ranges of bytes as they are laid out, for any tensors and any offsets."""

from __future__ import annotations

import errno
import os
import random
import tempfile

import pytest
from checkpoint import copying
from checkpoint.header import Tensor, read_shard
from checkpoint.layout import lay_out, plan_shard
from hostlib.errors import HostError
from hostlib.progress import Progress
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.weights import write_safetensors
from tests.unit.checkpoint_support import content

tensor_sets = st.dictionaries(
    st.text(st.characters(categories=("L", "N")), min_size=1, max_size=9),
    st.builds(Tensor, st.sampled_from(["F32", "BF16", "U8"]),
              st.lists(st.integers(0, 70), max_size=2).map(tuple)),
    min_size=1, max_size=8,
)  # fmt: skip


@given(tensor_sets, st.data())
@settings(max_examples=60, deadline=None)
def test_any_choice_of_tensors_is_taken_as_it_is(
    tmp_path_factory: pytest.TempPathFactory, tensors: dict[str, Tensor], data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("any")
    source, target = folder / "s", folder / "t"
    source.mkdir()
    target.mkdir()
    write_safetensors(source / "a.safetensors", tensors, "seed")
    wanted = data.draw(st.sets(st.sampled_from(sorted(tensors)), min_size=1))
    plan = plan_shard(read_shard(source / "a.safetensors"), {name: f"x.{name}" for name in wanted})
    lay_out({"b.safetensors": plan}, target)
    whole = content(source)
    assert content(target) == {f"x.{name}": whole[name] for name in wanted}
    largest = max(plan.runs, key=lambda run: run.nbytes)
    same_place = sum(run.nbytes for run in plan.runs if (run.begin - run.target) % 4096 == 0)
    assert same_place >= largest.nbytes


@given(st.integers(0, 9000), st.integers(0, 9000), st.integers(0, 20000),
       st.sampled_from([None, errno.EXDEV, errno.EINVAL, errno.EOPNOTSUPP]))  # fmt: skip
@settings(max_examples=100, deadline=None)
def test_copies_any_range_whatever_the_kernel_can(
    source_offset: int, target_offset: int, count: int, refusal: int | None
) -> None:
    with tempfile.TemporaryFile() as source, tempfile.TemporaryFile() as target:
        whole = random.Random(0).randbytes(source_offset + count)
        source.write(whole)
        source.flush()
        with pytest.MonkeyPatch.context() as patch:
            if refusal is not None:

                def refuse(*_: object) -> int:
                    raise OSError(refusal, os.strerror(refusal))

                patch.setattr(os, "copy_file_range", refuse)
            progress = Progress("", count)
            ends = (source.fileno(), source_offset, target.fileno(), target_offset)
            copying.copy_range(*ends, count, progress)
        assert target.seek(0, os.SEEK_END) == (target_offset + count if count else 0)
        target.seek(target_offset)
        assert target.read() == whole[source_offset:]
        assert progress.done_bytes == count
        with pytest.raises(HostError, match="shorter"):
            copying.copy_range(*ends, count + 1, progress)
