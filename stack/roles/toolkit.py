"""CUDA 12.8, whole, by the service user, proved before it gets its name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any, TypeVar

from cuda_toolkit.environment import CHOSEN_COMPILER
from cuda_toolkit.spec import parse_spec, tree_name
from pyinfra.api.deploy import deploy

from stack.artifacts import ToolkitArtifacts
from stack.errors import StackError
from stack.managed import Entry, Owner, file
from stack.operations.programs import installed
from stack.places import EnginePlaces
from stack.settings import EngineHost, Toolkit

_Entry = TypeVar("_Entry")


def specification(settings: Toolkit, locked: ToolkitArtifacts) -> dict[str, Any]:
    """The installer's input: the locked bytes that the settings choose, or the adopted tree's name.

    Raises:
        StackError: the lock lacks a component or the runfile.
    """
    expected: dict[str, Any] = {
        "cuda_version": locked.cuda_version,
        "compiler_version": locked.compiler_version,
        "required_headers": locked.required_headers,
    }
    if settings.source in ("runfile", "adopted"):
        runfile = _locked(settings.runfile, {item.release: item for item in locked.runfiles})
        expected["compiler_version"] = runfile.compiler_version
        if settings.source == "adopted":
            return {**expected, "adopted": settings.adopted}
        return {
            **expected,
            "runfile": {
                "location": settings.location or runfile.url,
                "size": runfile.size,
                "sha256": runfile.sha256,
            },
        }
    components = {item.name: item for item in locked.components}
    return {
        **expected,
        "base_url": settings.location or locked.base_url,
        "manifest": locked.manifest,
        "manifest_sha256": locked.manifest_sha256,
        "components": [_locked(name, components).model_dump() for name in settings.components],
    }


def _locked(name: str, entries: Mapping[str, _Entry]) -> _Entry:
    if name not in entries:
        raise StackError(
            f"the lock's toolkit has no {name}; correct toolkit in group_data/v100.py, or run "
            "script/lock"
        )
    return entries[name]


def resolved_path(settings: EngineHost, locked: ToolkitArtifacts) -> str:
    """The folder that the installer gives to this toolkit."""
    spec = parse_spec(specification(settings.toolkit, locked), "the lock's toolkit")
    return str(EnginePlaces(settings.storage).toolkits / tree_name(spec))


def specification_file(settings: EngineHost, locked: ToolkitArtifacts, owner: Owner) -> Entry:
    """Where the installer reads its input: a file named by the tree, so a stale one cannot lie."""
    name = PurePosixPath(resolved_path(settings, locked)).name
    content = json.dumps(specification(settings.toolkit, locked), indent=1) + "\n"
    return file(EnginePlaces(settings.storage).specs / f"{name}.json", content, owner)


def chosen_compiler(settings: EngineHost) -> list[str]:
    """Words before the installer's command: its proof compiles with the engine's host compiler."""
    chosen = settings.engine.environment.get(CHOSEN_COMPILER)
    return ["env", f"{CHOSEN_COMPILER}={chosen}"] if chosen else []


@deploy("Toolkit")
def toolkit(settings: EngineHost, locked: ToolkitArtifacts) -> None:
    """Fetch, verify, unpack, prove and link the toolkit (or link the adopted), unless it stands."""
    places = EnginePlaces(settings.storage)
    user = settings.service.user
    owner = Owner(user, user)
    program = str(places.tools / "bin" / "cuda-install")
    arguments = [
        "--spec", specification_file(settings, locked, owner).path,
        "--root", str(places.toolkits),
        "--link", settings.toolkit.link,
    ]  # fmt: skip
    installed(
        name=f"CUDA toolkit at {settings.toolkit.link}: fetched, proved, linked",
        status=[program, "status", *arguments],
        install=[*chosen_compiler(settings), program, "install", *arguments],
        user=user,
    )
