"""The engine: its venv, its release, its units, its packet filter; then enginectl is asked."""

from __future__ import annotations

import hashlib
import json

from enginectl.timing import START_SECONDS, STOP_SECONDS
from pyinfra.api.deploy import deploy
from venv_build.build import venv_name

from stack import FILES, artifacts
from stack.artifacts import Artifacts
from stack.managed import ROOT, Entry, Owner, directory, file, link, program, render
from stack.operations.programs import committed_release, managed_files
from stack.operations.storage import mounted
from stack.operations.units import (
    packet_filter_loaded,
    timer_running,
    unit_enabled,
    units_read,
)
from stack.places import (
    ENGINE_CONFIG,
    ENGINE_STATE,
    ENGINECTL,
    FIREWALL,
    FIREWALL_TABLE,
    NFTABLES_DROP_IN,
    RELEASES,
    ROOT_PROGRAMS,
    UNIT_VALIDATOR,
    UNITS,
    EnginePlaces,
)
from stack.release import render_release
from stack.roles import checkpoint, toolkit
from stack.roles.venv import built_venv
from stack.settings import EngineHost

ENGINE_MODULES = ("vllm.entrypoints.openai.api_server",)
FIREWALL_UNIT = "fable-firewall.service"
ENGINE_UNIT = "fable-engine.service"
SETTLE_UNITS = ("fable-settle.service", "fable-settle.timer")


def user_files(settings: EngineHost, locked: Artifacts) -> list[Entry]:
    """What the service user owns: folders, programs, and what the programs read."""
    places = EnginePlaces(settings.storage)
    owner = Owner(settings.service.user, settings.service.user)
    folders = [
        places.tools, places.tools / "bin", places.specs, places.toolkits,
        places.checkpoints, places.venvs, places.caches,
    ]  # fmt: skip
    return [
        *(directory(folder, owner) for folder in folders),
        *program(FILES / "hostlib", places.tools, owner, ("hostlib",)),
        *program(FILES / "toolkit", places.tools, owner, ("cuda_toolkit",)),
        *program(FILES / "checkpoint", places.tools, owner, ("checkpoint",)),
        *program(FILES / "venv", places.tools, owner, ("venv_build",)),
        toolkit.specification_file(settings, locked.toolkit, owner),
        *checkpoint.manifest_files(settings, locked.checkpoint, owner),
        requirements_file(settings, locked, owner),
    ]


def requirements_file(settings: EngineHost, locked: Artifacts, owner: Owner) -> Entry:
    """The venv's hash lock, in a file named as the venv: a stale one cannot lie."""
    text = artifacts.engine_requirements(locked.engine)
    name = venv_name(text, settings.engine.python)
    return file(EnginePlaces(settings.storage).specs / f"venv-{name}.lock", text, owner)


def release_of(settings: EngineHost, locked: Artifacts) -> dict[str, object]:
    """The release that these settings and locks make."""
    places = EnginePlaces(settings.storage)
    requirements = artifacts.engine_requirements(locked.engine)
    return render_release(
        settings,
        venv=str(places.venvs / venv_name(requirements, settings.engine.python)),
        toolkit=toolkit.resolved_path(settings, locked.toolkit),
        checkpoint=checkpoint.resolved_path(places, locked.checkpoint.whole),
    )


def root_programs() -> list[Entry]:
    """What root runs: enginectl and what it needs; the service user cannot write it."""
    return [
        directory(ROOT_PROGRAMS),
        directory(ROOT_PROGRAMS / "bin"),
        *program(FILES / "hostlib", ROOT_PROGRAMS, ROOT, ("hostlib",)),
        *program(FILES / "engine", ROOT_PROGRAMS, ROOT, ("enginectl",)),
        *program(FILES / "toolkit", ROOT_PROGRAMS, ROOT, ("cuda_toolkit",)),
        link(ENGINECTL, ROOT_PROGRAMS / "bin" / "enginectl"),
    ]


def root_files(
    settings: EngineHost, release: dict[str, object], gateway_address: str
) -> list[Entry]:
    """What root owns besides programs: the release, the units, the packet filter."""
    variables = {
        "service_user": settings.service.user,
        "service_home": settings.service.home,
        "data_mount": settings.storage.mount,
        "enginectl": ENGINECTL,
        "firewall": FIREWALL,
        "table": FIREWALL_TABLE,
        "start_seconds": START_SECONDS,
        "stop_seconds": STOP_SECONDS,
    }
    rules, _ = packet_filter(settings, gateway_address)
    release_folder = RELEASES / str(release["name"])
    return [
        directory(ENGINE_CONFIG),
        directory(ENGINE_STATE),
        directory(RELEASES),
        directory(release_folder),
        file(release_folder / "release.json", json.dumps(release, indent=1) + "\n"),
        directory(NFTABLES_DROP_IN.parent),
        file(NFTABLES_DROP_IN, render("engine/nftables-drop-in.conf.j2", **variables)),
        file(FIREWALL, rules, validate=("nft", "--check", "--file", "{}")),
        *(
            file(UNITS / unit, render(f"engine/{unit}.j2", **variables), validate=UNIT_VALIDATOR)
            for unit in (FIREWALL_UNIT, ENGINE_UNIT, *SETTLE_UNITS)
        ),
    ]


def packet_filter(settings: EngineHost, gateway_address: str) -> tuple[str, str]:
    """The rules, and the version in them by which the loaded table is recognised."""
    consumers = [gateway_address, *(settings.access.consumers or [])]
    port = settings.serving.port
    version = hashlib.sha256(json.dumps([consumers, port]).encode()).hexdigest()[:16]
    rules = render(
        "engine/firewall.nft.j2",
        table=FIREWALL_TABLE,
        version=version,
        consumers=consumers,
        port=port,
    )
    return rules, version


@deploy("Engine programs")
def engine_programs(settings: EngineHost, locked: Artifacts) -> None:
    """Lay down what the service user's later steps run."""
    user = settings.service.user
    mounted(name=f"Data disk at {settings.storage.mount}", path=settings.storage.mount)
    managed_files(
        name="Folder of the service user on the data disk",
        entries=[directory(settings.storage.root, Owner(user, user))],
        user="root",
    )
    managed_files(
        name="Programs, locks and folders of the service user",
        entries=user_files(settings, locked),
        user=user,
    )


@deploy("Engine")
def engine(settings: EngineHost, locked: Artifacts, gateway_address: str) -> None:
    """Build the venv, lay the release down, enable the units, and ask enginectl for the release."""
    places = EnginePlaces(settings.storage)
    user = settings.service.user
    built_venv(
        name="Engine venv: built from its hash lock, imports proved",
        tools=places.tools,
        requirements=requirements_file(settings, locked, ROOT).path,
        python=settings.engine.python,
        root=places.venvs,
        modules=ENGINE_MODULES,
        user=user,
    )
    managed_files(name="enginectl", entries=root_programs(), user="root")
    release = release_of(settings, locked)
    managed_files(
        name=f"Release {release['name']}, units, packet filter",
        entries=root_files(settings, release, gateway_address),
        user="root",
    )
    units_read(
        name="systemd knows the engine's units",
        units=[FIREWALL_UNIT, ENGINE_UNIT, *SETTLE_UNITS, "nftables.service"],
        _sudo=True,
    )
    unit_enabled(name="Packet filter: enabled at boot", unit=FIREWALL_UNIT, _sudo=True)
    _, version = packet_filter(settings, gateway_address)
    packet_filter_loaded(
        name="Packet filter: loaded",
        unit=FIREWALL_UNIT,
        table=FIREWALL_TABLE,
        version=version,
        _sudo=True,
    )
    unit_enabled(name="Engine: enabled at boot", unit=ENGINE_UNIT, _sudo=True)
    timer_running(name="Settle: every half minute", unit=SETTLE_UNITS[1], _sudo=True)
    committed_release(
        name=f"Engine: release {release['name']} committed and healthy",
        release=str(release["name"]),
        reason="deploy",
    )
