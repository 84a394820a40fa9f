"""The checkpoint: fetched, or assembled from its parents, by committed manifests; linked."""

from __future__ import annotations

from checkpoint.manifest import folder_name
from pyinfra.api.deploy import deploy

from stack.artifacts import CheckpointArtifacts, CheckpointTree
from stack.managed import Entry, Owner, file
from stack.operations.programs import installed
from stack.places import EnginePlaces
from stack.settings import EngineHost


def resolved_path(places: EnginePlaces, tree: CheckpointTree) -> str:
    """The folder that `ckpt` gives to the checkpoint or parent of this manifest."""
    return str(places.checkpoints / folder_name(tree.listed().sha256))


def needed(settings: EngineHost, locked: CheckpointArtifacts) -> list[CheckpointTree]:
    """What must be fetched."""
    if settings.checkpoint.source == "fetch":
        return [locked.whole]
    return [locked.trunk, locked.base]


def manifest_files(settings: EngineHost, locked: CheckpointArtifacts, owner: Owner) -> list[Entry]:
    """Where `ckpt fetch` reads manifests: files named by the tree, so a stale one cannot lie."""
    return [
        file(_manifest_path(settings, tree), tree.listed().raw.decode(), owner)
        for tree in needed(settings, locked)
    ]


def commands(settings: EngineHost, locked: CheckpointArtifacts) -> list[list[str]]:
    """The argvs that bring the checkpoint, in order; each does nothing where its work is done."""
    places = EnginePlaces(settings.storage)
    fetches = [
        [
            _program(places), "fetch", *([tree.source] if tree.source else []),
            "--manifest", _manifest_path(settings, tree), *_place(places, tree),
        ]
        for tree in needed(settings, locked)
    ]  # fmt: skip
    link = ["--link", settings.checkpoint.link]
    if settings.checkpoint.source == "fetch":
        return [[*fetches[0], *link]]
    digests = {
        "--trunk-manifest-sha256": locked.trunk,
        "--base-manifest-sha256": locked.base,
    }
    return [
        *fetches,
        [
            _program(places), "assemble",
            "--trunk", resolved_path(places, locked.trunk),
            "--base", resolved_path(places, locked.base),
            *(word for key, tree in digests.items() for word in (key, tree.listed().sha256)),
            *_place(places, locked.whole), *link,
        ],
    ]  # fmt: skip


@deploy("Checkpoint")
def checkpoint(settings: EngineHost, locked: CheckpointArtifacts) -> None:
    """Bring, verify and link the checkpoint, unless it stands."""
    places = EnginePlaces(settings.storage)
    link = settings.checkpoint.link
    *before, last = commands(settings, locked)
    installed(
        name=f"Checkpoint at {link}: {settings.checkpoint.source}, census asserted, linked",
        status=[_program(places), "status", *_place(places, locked.whole), "--link", link],
        before=before,
        install=last,
        user=settings.service.user,
    )


def _program(places: EnginePlaces) -> str:
    return str(places.tools / "bin" / "ckpt")


def _place(places: EnginePlaces, tree: CheckpointTree) -> list[str]:
    return ["--manifest-sha256", tree.listed().sha256, "--root", str(places.checkpoints)]


def _manifest_path(settings: EngineHost, tree: CheckpointTree) -> str:
    name = folder_name(tree.listed().sha256)
    return str(EnginePlaces(settings.storage).specs / f"checkpoint-{name}.json")
