"""A faithful miniature of the engine's checkpoint: same names, dtypes and layout, small sizes.

`build` makes it once and keeps it in a cache; `python -m lab.checkpoint --cache DIR` prints where.
`build_pair` makes the parents that such a checkpoint is assembled from, of any size;
`build_family` both and the checkpoint.
The weights are random but finite, from a fixed seed, so that the manifest's digest is always the
same.
"""

from __future__ import annotations

import argparse
import hashlib
import inspect
import json
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from checkpoint import adopt, assemble, census, dimensions, layout, manifest, verify
from checkpoint.assemble import Order
from checkpoint.census import Tensors
from checkpoint.header import Tensor
from checkpoint.manifest import FileEntry
from hostlib.atomic import publish_dir
from hostlib.download import sha256_file
from hostlib.errors import HostError, run_main

from lab import checkpoint_config, weights
from lab.checkpoint_config import (
    CHAT_TEMPLATE,
    TOKENIZER_CONFIG,
    Size,
    config,
    expected,
    hf_quant_config,
    trunk_config,
)
from lab.weights import write_safetensors

SEED = "miniature"
SHARDS = 3


@dataclass(frozen=True)
class CheckpointInfo:
    """A built checkpoint: its folder, and the sha256 of the manifest in it."""

    folder: Path
    manifest_sha256: str


def build(cache: Path) -> CheckpointInfo:
    """Build the miniature in folder `cache`, or take the one that stands there whole."""
    folder = cache / f"checkpoint-{_recipe_digest()}"
    if folder.exists():
        try:
            listed = manifest.read(folder)
            verify.check_names(folder, listed)
            verify.check_digests(folder, listed)
            return CheckpointInfo(folder, listed.sha256)
        except HostError as error:
            print(f"{error.message}: built again", file=sys.stderr)
            shutil.rmtree(folder)
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".checkpoint-", dir=cache) as beside:
        staged = Path(beside) / "checkpoint"
        staged.mkdir()
        _write(staged)
        publish_dir(staged, folder)
    return CheckpointInfo(folder, manifest.read(folder).sha256)


@dataclass(frozen=True)
class Pair:
    """The folders of the two parents."""

    trunk: Path
    base: Path


def build_pair(folder: Path, size: Size) -> Pair:
    """Write trunk and base into the new folders `folder`/trunk and `folder`/base.

    The trunk has the text-only layout of a quantiser's export; the base is whole, with another
    trunk in it.
    """
    pair = Pair(folder / "trunk", folder / "base")
    pair.trunk.mkdir()
    pair.base.mkdir()
    _write_trunk(pair.trunk, size)
    _write_whole(pair.base, size, "base")
    return pair


@dataclass(frozen=True)
class Family:
    """Trunk, base, and what is assembled of them; each with its manifest."""

    trunk: Path
    base: Path
    whole: Path


def build_family(cache: Path) -> Family:
    """Build trunk, base and whole in folder `cache`, or take those that stand there."""
    folder = cache / f"checkpoints-{_recipe_digest()}"
    if not folder.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".checkpoints-", dir=cache) as beside:
            staged = Path(beside) / "all"
            staged.mkdir()
            pair = build_pair(staged, Size())
            for parent in (pair.trunk, pair.base):
                adopt.listed_in(parent)
            built = Path(beside) / "built"
            assemble.assemble(Order(pair.trunk, pair.base, built, built / "link"))
            (built / "link").resolve().rename(staged / "whole")
            publish_dir(staged, folder)
    return Family(folder / "trunk", folder / "base", folder / "whole")


def _write(folder: Path) -> None:
    tensors = _write_whole(folder, Size(), SEED)
    files = {
        path.name: FileEntry(path.stat().st_size, sha256_file(path))
        for path in sorted(folder.iterdir())
    }
    provenance = {"origin": "miniature made by lab/checkpoint.py", "seed": SEED}
    raw = manifest.render(files, census.count(tensors).as_json(), provenance)
    (folder / manifest.MANIFEST).write_bytes(raw)
    verify.check_tensors(folder, manifest.read(folder))


def _write_whole(folder: Path, size: Size, seed: str) -> Tensors:
    settings = config(size)
    _write_json(folder / "tokenizer_config.json", TOKENIZER_CONFIG)
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    return _write_model(folder, settings, seed)


def _write_trunk(folder: Path, size: Size) -> None:
    _write_model(folder, trunk_config(size), SEED)


def _write_model(folder: Path, settings: dict[str, object], seed: str) -> Tensors:
    """Configs, shards and index."""
    tensors = expected(settings)
    total = census.count(tensors).bytes
    shards: list[dict[str, Tensor]] = [{} for _ in range(SHARDS)]
    before = 0
    for name, tensor in tensors.items():
        shards[before * SHARDS // total][name] = tensor
        before += tensor.nbytes
    shards = [shard for shard in shards if shard]  # one tensor can be larger than a share
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        write_safetensors(folder / file, shard, seed)
        weight_map |= dict.fromkeys(shard, file)
    _write_json(folder / manifest.CONFIG, settings)
    _write_json(folder / manifest.QUANTISATION, hf_quant_config(settings))
    _write_json(
        folder / manifest.INDEX,
        {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))},
    )
    return tensors


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def _recipe_digest() -> str:
    """Over the sources that determine the miniature, so that a change of them builds a new one."""
    digest = hashlib.sha256()
    ours = (sys.modules[__name__], checkpoint_config, weights)
    for module in (*ours, adopt, assemble, census, dimensions, layout, manifest):
        digest.update(inspect.getsource(module).encode())
    return digest.hexdigest()[:16]


def main() -> int:
    """Build the miniature and print its folder and digest as one line of JSON, or a pair."""
    parser = argparse.ArgumentParser(prog="lab.checkpoint", description=__doc__)
    place = parser.add_mutually_exclusive_group(required=True)
    place.add_argument("--cache", type=Path, help="folder to keep the checkpoint in")
    place.add_argument("--pair", type=Path, help="folder to write the pair's two folders into")
    parser.add_argument("--bytes", type=int, default=0, help="least bytes of the pair's base")
    options = parser.parse_args()
    if options.pair:
        pair = build_pair(options.pair, Size.of_bytes(options.bytes))
        print(json.dumps({"trunk": str(pair.trunk), "base": str(pair.base)}))
        return 0
    info = build(options.cache)
    print(json.dumps({"folder": str(info.folder), "manifest_sha256": info.manifest_sha256}))
    return 0


if __name__ == "__main__":
    sys.exit(run_main("lab.checkpoint", main))
