"""The gateway: its venv, program, configuration and unit, in the service user's home."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from pyinfra.api.deploy import deploy
from venv_build.build import venv_name

from stack import FILES
from stack.managed import EXECUTABLE, Entry, Guard, Owner, directory, file, program, render
from stack.operations.programs import installed, managed_files
from stack.operations.units import running_deployment, unit_enabled, units_read
from stack.places import GATEWAY_CONFIG, UNIT_VALIDATOR, UNITS, GatewayPlaces
from stack.settings import GatewayHost

REQUIREMENTS = FILES / "gateway" / "requirements.lock"
UNIT = "fable-gateway.service"
EVERY_ADDRESS = "0.0.0.0"  # noqa: S104  # users reach the gateway at any of the host's
MARKER = "Laid down by fable-stack"
MODULES = ("aiohttp", "uvloop")


def configuration(settings: GatewayHost, engine_address: str) -> dict[str, Any]:
    """The gateway's own config, but for the name of the deployment."""
    gateway = settings.gateway
    shown_address = f"[{engine_address}]" if ":" in engine_address else engine_address
    return {
        "listen": {"host": EVERY_ADDRESS, "port": gateway.port},
        "upstreams": [f"http://{shown_address}:{settings.serving.port}"],
        "keys": {name: {"sha256": digest} for name, digest in gateway.keys.items()},
        "max_in_flight": gateway.max_in_flight,
        "hold_seconds": gateway.hold_seconds,
        "models": list(settings.serving.names),
        "max_body_bytes": gateway.max_body_bytes,
        "connect_timeout_seconds": gateway.connect_timeout_seconds,
    }


def unit_text(settings: GatewayHost) -> str:
    """The gateway's unit."""
    places = GatewayPlaces(settings.service)
    return render(
        "gateway/fable-gateway.service.j2",
        service_user=settings.service.user,
        python=places.venv / "bin" / "python",
        launcher=places.launcher,
        config=places.config,
    )


def deployment(settings: GatewayHost, engine_address: str) -> str:
    """Name of all that determines the running gateway: 16 hex digits of a sha256."""
    parts = [
        [entry.expectation() for entry in user_files(settings)],
        configuration(settings, engine_address),
        unit_text(settings),
    ]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def requirements_file(settings: GatewayHost, owner: Owner) -> Entry:
    """The venv's hash lock, in a file named as the venv."""
    text = REQUIREMENTS.read_text()
    name = venv_name(text, settings.gateway.python)
    return file(GatewayPlaces(settings.service).specs / f"venv-{name}.lock", text, owner)


def user_files(settings: GatewayHost) -> list[Entry]:
    """What the service user owns: the gateway's program and the venv's builder."""
    places = GatewayPlaces(settings.service)
    owner = Owner(settings.service.user, settings.service.user)
    launcher = (FILES / "gateway" / "bin" / "fable_gateway.py").read_bytes()
    folders = [
        places.bin, places.root, places.app, places.tools, places.tools / "bin", places.specs,
        places.venvs,
    ]  # fmt: skip
    return [
        *(directory(folder, owner) for folder in folders),
        *program(FILES / "hostlib", places.tools, owner, ("hostlib",)),
        *program(FILES / "venv", places.tools, owner, ("venv_build",)),
        *(
            entry
            for entry in program(FILES / "gateway", places.app, owner, ("fable_gateway",))
            if "/bin/" not in entry.path.removeprefix(str(places.app))
        ),
        file(places.launcher, launcher, owner, EXECUTABLE, guard=guard(settings)),
        requirements_file(settings, owner),
    ]


def root_files(settings: GatewayHost, engine_address: str) -> list[Entry]:
    """What root owns: the configuration (readable by the service user only) and the unit."""
    group = Owner("root", settings.service.user)
    config = configuration(settings, engine_address)
    config["deployment"] = deployment(settings, engine_address)
    text = json.dumps(config, indent=1) + "\n"
    places = GatewayPlaces(settings.service)
    return [
        directory(GATEWAY_CONFIG, group, 0o750),
        file(
            places.config,
            text,
            group,
            0o640,
            validate=(
                str(places.venv / "bin" / "python"), "-I", str(places.launcher), "check",
                "--config", "{}",
            ),
        ),
        file(
            UNITS / UNIT,
            unit_text(settings),
            validate=UNIT_VALIDATOR,
            guard=guard(settings),
        ),
    ]  # fmt: skip


def guard(settings: GatewayHost) -> Guard:
    """For the places where a gateway made by hand may stand."""
    return Guard(MARKER, settings.gateway.take_over, "gateway.take_over in group_data/dgx.py")


@deploy("Gateway")
def gateway(settings: GatewayHost, engine_address: str) -> None:
    """Bring the gateway up; restart it only when it does not run this deployment."""
    places = GatewayPlaces(settings.service)
    user = settings.service.user
    managed_files(name="Gateway program and venv lock", entries=user_files(settings), user=user)
    tool = str(places.tools / "bin" / "venv-build")
    arguments = [
        "--requirements", requirements_file(settings, Owner(user, user)).path,
        "--python", settings.gateway.python,
        "--root", str(places.venvs),
        "--link", str(places.venv),
    ]  # fmt: skip
    imports = [part for module in MODULES for part in ("--import", module)]
    installed(
        name="Gateway venv: built from its hash lock, imports proved",
        status=[tool, "status", *arguments],
        install=[tool, "build", *arguments, *imports],
        user=user,
    )
    managed_files(
        name="Gateway configuration and unit",
        entries=root_files(settings, engine_address),
        user="root",
    )
    units_read(name="systemd knows the gateway's unit", units=[UNIT], _sudo=True)
    unit_enabled(name="Gateway: enabled at boot", unit=UNIT, _sudo=True)
    running_deployment(
        name="Gateway: runs this deployment",
        unit=UNIT,
        url=f"http://127.0.0.1:{settings.gateway.port}/health",
        deployment=deployment(settings, engine_address),
        _sudo=True,
    )
