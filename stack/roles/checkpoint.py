"""The checkpoint: fetched by its manifest, its census asserted, linked."""

from __future__ import annotations

from pyinfra.api.deploy import deploy

from stack.artifacts import CheckpointArtifacts
from stack.operations.programs import installed
from stack.places import EnginePlaces
from stack.settings import EngineHost


def resolved_path(places: EnginePlaces, locked: CheckpointArtifacts) -> str:
    """The folder that `ckpt fetch` gives to the checkpoint of this manifest."""
    assert locked.manifest_sha256 is not None, "artifacts.load refuses a lock without it"
    return str(places.checkpoints / locked.manifest_sha256[:16])


@deploy("Checkpoint")
def checkpoint(settings: EngineHost, locked: CheckpointArtifacts) -> None:
    """Fetch and verify the checkpoint, unless it stands."""
    places = EnginePlaces(settings.storage)
    program = str(places.tools / "bin" / "ckpt")
    arguments = [
        "--manifest-sha256", str(locked.manifest_sha256),
        "--root", str(places.checkpoints),
        "--link", settings.checkpoint.link,
    ]  # fmt: skip
    installed(
        name=f"Checkpoint at {settings.checkpoint.link}: fetched, census asserted, linked",
        status=[program, "status", *arguments],
        install=[program, "fetch", "--source", str(locked.source), *arguments],
        user=settings.service.user,
    )
