"""Every byte that comes from outside: address, size, sha256. Read from a lock file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from checkpoint.manifest import Manifest
from checkpoint.manifest import parse as parse_manifest
from checkpoint.source import as_source, revision
from checkpoint.strict import read_small
from hostlib.errors import HostError
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from stack import REPOSITORY
from stack.errors import StackError
from stack.settings import Sha256

LOCK = REPOSITORY / "stack" / "artifacts.lock.yaml"
WAY_OUT = 'see "Digests that only the hosts know" in docs/operations.md'


class Locked(BaseModel):
    """Base: unknown keys are refused, types are not bent."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Component(Locked):
    """One redistributable archive of NVIDIA's manifest."""

    name: str
    version: str
    relative_path: str
    size: Annotated[int, Field(gt=0)]
    sha256: Sha256


class RunfileArtifact(Locked):
    """NVIDIA's self-installing file of one release, and its compiler's own version."""

    release: str
    url: str
    size: Annotated[int, Field(gt=0)]
    sha256: Sha256
    compiler_version: str


class ToolkitArtifacts(Locked):
    """The toolkit's manifest, the archives taken from it, and the runfiles instead of them."""

    base_url: str
    manifest: str
    manifest_sha256: Sha256
    cuda_version: Annotated[int, Field(ge=12000, lt=13000)]
    compiler_version: str
    required_headers: list[str]
    components: Annotated[list[Component], Field(min_length=1)]
    runfiles: list[RunfileArtifact] = []


def _source(text: str) -> str:
    try:
        return as_source(text)
    except HostError as error:
        raise ValueError(error.message) from None


class CheckpointTree(Locked):
    """A checkpoint or a parent of one: every digest, in a committed manifest, and an address.

    Attributes:
        source: where it is fetched from; None: nowhere but on the host itself.
        manifest: path of the manifest, in the project or absolute.
    """

    source: Annotated[str, AfterValidator(_source)] | None
    manifest: str

    @property
    def path(self) -> Path:
        """The manifest's file."""
        return REPOSITORY / self.manifest

    def listed(self) -> Manifest:
        """The manifest; raises StackError if it is damaged or of another revision."""
        try:
            listed = parse_manifest(read_small(self.path), str(self.path))
        except HostError as error:
            raise StackError(error.message) from None
        locked = self.source and revision(self.source)
        found = listed.provenance.get("revision", locked)
        if locked and found != locked:
            raise StackError(
                f"{self.path}: is of revision {found}, the lock's source of {locked}; run "
                "script/lock"
            )
        return listed


class CheckpointArtifacts(Locked):
    """The whole checkpoint, and the two parents that it can be assembled from."""

    whole: CheckpointTree
    trunk: CheckpointTree
    base: CheckpointTree


class Wheel(Locked):
    """The engine's own wheel, by address and digest."""

    distribution: str
    url: str
    sha256: Sha256


class Overlay(Locked):
    """The source tree whose files are laid over the engine's wheel, pinned by commit."""

    repository: str
    commit: str | None


class EngineArtifacts(Locked):
    """The engine: its wheel, the hash lock of all that it needs, and its overlay's source."""

    wheel: Wheel
    requirements: str | None
    overlay: Overlay | None = None


class Artifacts(Locked):
    """A whole lock file."""

    toolkit: ToolkitArtifacts
    checkpoint: CheckpointArtifacts
    engine: EngineArtifacts


def load(path: Path, checkpoint: Literal["fetch", "assemble"] = "fetch") -> Artifacts:
    """The lock at `path`, complete: no entry without a digest.

    Args:
        path: the lock file.
        checkpoint: how the checkpoint is made, which decides what of it must be known.

    Raises:
        StackError: names the file and the entry that is wrong or has no digest yet.
    """
    try:
        raw: Any = yaml.safe_load(path.read_text())
    except OSError as error:
        raise StackError(f"{path}: cannot be read ({error.strerror}); restore it") from None
    except UnicodeDecodeError:
        raise StackError(f"{path}: is no UTF-8 text; restore it") from None
    except yaml.YAMLError as error:
        raise StackError(f"{path}: is no YAML ({str(error).splitlines()[0]}); restore it") from None
    try:
        locked = Artifacts.model_validate(raw)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in fault["loc"])
        raise StackError(
            f"{path}: {where or 'the whole'}: {fault['msg']}; restore it or run script/lock"
        ) from None
    missing = _without_manifest(locked.checkpoint, checkpoint)
    missing += [
        name
        for name, value in (
            ("engine.requirements", locked.engine.requirements),
            (
                "engine.overlay.commit",
                locked.engine.overlay is None or locked.engine.overlay.commit,
            ),
        )
        if not value
    ]
    if missing:
        raise StackError(f"{path}: {', '.join(missing)}: no value yet, nothing changed; {WAY_OUT}")
    if locked.engine.overlay is not None:
        raise StackError(
            f"{path}: engine.overlay: laying an overlay over the wheel is not built yet, and the "
            "engine is not whole without it; nothing changed"
        )
    return locked


def _without_manifest(trees: CheckpointArtifacts, how: str) -> list[str]:
    """The entries whose digests are not known, each with the command that fills it."""
    needed = {"whole": f"ckpt {'adopt' if how == 'fetch' else 'assemble'} on v100"}
    if how == "assemble":
        needed |= {"trunk": "ckpt adopt on v100", "base": "script/lock"}
    return [
        f"checkpoint.{name}.manifest (by {command})"
        for name, command in needed.items()
        if not getattr(trees, name).path.exists()
    ]


def engine_requirements(engine: EngineArtifacts) -> str:
    """The whole hash lock of the engine's venv: the index's packages, then the wheel by address."""
    assert engine.requirements is not None, "load() refuses a lock without requirements"
    place = REPOSITORY / engine.requirements
    try:
        text = place.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise StackError(f"{place}: the engine's lock cannot be read ({error})") from None
    wheel = engine.wheel
    return f"{text}{wheel.distribution} @ {wheel.url} \\\n    --hash=sha256:{wheel.sha256}\n"
