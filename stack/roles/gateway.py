"""The gateway: its venv, program, configuration and unit, in the service user's home."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from pyinfra.api.deploy import deploy
from venv_build.build import venv_name

from stack import FILES
from stack.managed import EXECUTABLE, Entry, Guard, Owner, directory, file, program, render
from stack.operations.programs import managed_files
from stack.operations.units import port_held, running_deployment, unit_enabled, units_read
from stack.places import (
    GATEWAY_CONFIG,
    GATEWAY_HANDOVER,
    ROOT_PROGRAMS,
    UNIT_VALIDATOR,
    UNITS,
    GatewayPlaces,
)
from stack.roles.venv import built_venv
from stack.settings import GatewayHost

REQUIREMENTS = FILES / "gateway" / "requirements.lock"
UNIT = "fable-gateway.service"
INSTANCE = "fable-gateway@.service"
INSTANCES = ("fable-gateway@a.service", "fable-gateway@b.service")
SOCKET = "fable-gateway.socket"
EVERY_ADDRESS = "0.0.0.0"  # noqa: S104  # users reach the gateway at any of the host's
MARKER = "Laid down by fable-stack"
TAKE_OVER = "gateway.take_over in group_data/dgx.py"
SECRET = 0o600
MODULES = ("aiohttp", "uvloop", "prometheus_client")


def configuration(settings: GatewayHost, engine_address: str) -> dict[str, Any]:
    """The gateway's own config, but for the keys and the name of the deployment."""
    gateway = settings.gateway
    shown_address = f"[{engine_address}]" if ":" in engine_address else engine_address
    return {
        "listen": {"host": EVERY_ADDRESS, "port": gateway.port},
        "upstreams": [f"http://{shown_address}:{settings.serving.port}"],
        "keys_file": str(GatewayPlaces(settings.service).keys),
        "max_in_flight": gateway.max_in_flight,
        "max_queued": gateway.max_queued,
        "hold_seconds": gateway.hold_seconds,
        "models": list(settings.serving.names),
        "max_body_bytes": gateway.max_body_bytes,
        "max_buffered_bytes": gateway.max_buffered_bytes,
        "connect_timeout_seconds": gateway.connect_timeout_seconds,
    }


def keys_text(settings: GatewayHost) -> str:
    """The key file; a running gateway reads it by itself when it changes."""
    entries = {
        name: {"sha256": key} if isinstance(key, str) else key.model_dump(exclude_none=True)
        for name, key in settings.gateway.keys.items()
    }
    return json.dumps(entries, indent=1) + "\n"


def unit_texts(settings: GatewayHost) -> dict[str, str]:
    """Unit → its text, in an order in which each can be checked."""
    places = GatewayPlaces(settings.service)
    return {
        INSTANCE: render(
            f"gateway/{INSTANCE}.j2",
            service_user=settings.service.user,
            python=places.venv / "bin" / "python",
            launcher=places.launcher,
            config=places.config,
        ),
        UNIT: render(f"gateway/{UNIT}.j2", handover=GATEWAY_HANDOVER),
        SOCKET: render(f"gateway/{SOCKET}.j2", address=EVERY_ADDRESS, port=settings.gateway.port),
    }


def deployment(settings: GatewayHost, engine_address: str) -> str:
    """Name of all that a restart is needed for: 16 hex digits of a sha256. Keys need none."""
    parts = [
        [(entry.path, entry.expectation().get("sha256")) for entry in user_files(settings)],
        configuration(settings, engine_address),
        unit_texts(settings)[INSTANCE],
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


def settings_files(settings: GatewayHost, engine_address: str) -> list[Entry]:
    """Configuration and keys; the service user's own, who may change keys on the host."""
    owner = Owner(settings.service.user, settings.service.user)
    config = configuration(settings, engine_address)
    config["deployment"] = deployment(settings, engine_address)
    places = GatewayPlaces(settings.service)
    check = (str(places.venv / "bin" / "python"), "-I", str(places.launcher), "check")
    return [
        file(
            places.config, json.dumps(config, indent=1) + "\n", owner, SECRET,
            validate=(*check, "--config", "{}"),
        ),
        file(places.keys, keys_text(settings), owner, SECRET, validate=(*check, "--keys", "{}")),
    ]  # fmt: skip


def root_files(settings: GatewayHost) -> list[Entry]:
    """What root owns: the units but for the socket, and what hands over between instances."""
    owner = Owner(settings.service.user, settings.service.user)
    texts = unit_texts(settings)
    return [
        directory(GATEWAY_CONFIG, owner, 0o750),
        directory(ROOT_PROGRAMS),
        file(GATEWAY_HANDOVER, (FILES / "handover" / "gateway_handover.py").read_bytes()),
        file(UNITS / INSTANCE, texts[INSTANCE], validate=UNIT_VALIDATOR),
        file(UNITS / UNIT, texts[UNIT], validate=UNIT_VALIDATOR, guard=guard(settings)),
    ]


def socket_file(settings: GatewayHost) -> Entry:
    """The socket's unit; it is valid only where the unit that it starts is."""
    return file(UNITS / SOCKET, unit_texts(settings)[SOCKET], validate=UNIT_VALIDATOR)


def guard(settings: GatewayHost) -> Guard:
    """For the places where a gateway made by hand may stand."""
    return Guard(MARKER, settings.gateway.take_over, TAKE_OVER)


@deploy("Gateway")
def gateway(settings: GatewayHost, engine_address: str) -> None:
    """Bring the gateway up; restart it only when it does not run this deployment."""
    places = GatewayPlaces(settings.service)
    user = settings.service.user
    managed_files(name="Gateway program and venv lock", entries=user_files(settings), user=user)
    built_venv(
        name="Gateway venv: built from its hash lock, imports proved",
        tools=places.tools,
        requirements=requirements_file(settings, Owner(user, user)).path,
        python=settings.gateway.python,
        root=places.venvs,
        modules=MODULES,
        user=user,
        link=places.venv,
    )
    managed_files(name="Gateway units", entries=root_files(settings), user="root")
    managed_files(name="Gateway socket", entries=[socket_file(settings)], user="root")
    managed_files(
        name="Gateway configuration and keys",
        entries=settings_files(settings, engine_address),
        user=user,
    )
    units_read(
        name="systemd knows the gateway's units", units=[UNIT, SOCKET, *INSTANCES], _sudo=True
    )
    unit_enabled(name="Gateway: port enabled at boot", unit=SOCKET, _sudo=True)
    unit_enabled(name="Gateway: enabled at boot", unit=UNIT, _sudo=True)
    port_held(
        name="Gateway: systemd holds its port",
        port=settings.gateway.port,
        socket=SOCKET,
        service=UNIT,
        take_over=settings.gateway.take_over,
        way_out=f"say {TAKE_OVER}",
        _sudo=True,
    )
    running_deployment(
        name="Gateway: runs this deployment",
        unit=UNIT,
        url=f"http://127.0.0.1:{settings.gateway.port}/health",
        deployment=deployment(settings, engine_address),
        _sudo=True,
    )
