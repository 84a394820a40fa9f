"""The settings that the deploy renders to config.json: read, checked, refused in one line."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from fable_gateway import checked
from fable_gateway.checked import Wrong

UPSTREAM = re.compile(r"http://(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9.-]+)(:[0-9]{1,5})?")
FIELDS = (
    "listen upstreams keys_file max_in_flight max_queued hold_seconds models max_body_bytes "
    "max_buffered_bytes connect_timeout_seconds deployment"
)


@dataclass(frozen=True)
class Config:
    """Everything the gateway is told, but for the keys.

    Attributes:
        host, port: where it listens, unless systemd hands it a socket.
        upstream: the base URL of the engine, or of the load balancer before several; no path.
        keys_file: who may ask; read again whenever it changes.
        max_in_flight: requests inside the engine at the same time.
        max_queued: requests that may wait for their turn at the same time.
        hold_seconds: how long a request waits for a slot and for an engine that is away.
        models: names that the engine must serve before the gateway calls itself ready.
        max_body_bytes: largest request body, after decompression.
        max_buffered_bytes: of all request bodies that are held at the same time.
        connect_timeout_seconds: how long one attempt to connect to the engine may take.
        deployment: name of the deployment, reported at /health.
    """

    host: str
    port: int
    upstream: str
    keys_file: Path
    max_in_flight: int
    max_queued: int
    hold_seconds: float
    models: tuple[str, ...]
    max_body_bytes: int
    max_buffered_bytes: int
    connect_timeout_seconds: float
    deployment: str


def load(path: Path) -> Config:
    """Read `path`.

    Raises:
        GatewayError: it cannot be read (exit code 2) or is wrong (exit code 1).
    """
    return parse(checked.read_file(path), str(path))


def parse(content: bytes, place: str) -> Config:
    """Check the text of a config; `place` names it in errors.

    Raises:
        GatewayError: the first thing that is wrong, by its key.
    """
    return checked.parsed(content, place, _config)


def _config(value: object) -> Config:
    fields = checked.fields(value, "the config", FIELDS)
    listen = checked.fields(fields["listen"], "listen", "host port")
    largest = checked.integer(fields["max_body_bytes"], "max_body_bytes", 1, 1 << 32)
    return Config(
        host=checked.text(listen["host"], "listen.host"),
        port=checked.integer(listen["port"], "listen.port", 1, 65535),
        upstream=_upstream(fields["upstreams"]),
        keys_file=_keys_file(fields["keys_file"]),
        max_in_flight=checked.integer(fields["max_in_flight"], "max_in_flight", 1, 10_000),
        max_queued=checked.integer(fields["max_queued"], "max_queued", 0, 100_000),
        hold_seconds=checked.seconds(fields["hold_seconds"], "hold_seconds", 0),
        models=checked.names(fields["models"], "models"),
        max_body_bytes=largest,
        # Less would never let the largest body in.
        max_buffered_bytes=checked.integer(
            fields["max_buffered_bytes"], "max_buffered_bytes", largest, 1 << 40
        ),
        connect_timeout_seconds=checked.seconds(
            fields["connect_timeout_seconds"], "connect_timeout_seconds", 0.01
        ),
        deployment=checked.text(fields["deployment"], "deployment"),
    )


def _upstream(value: object) -> str:
    if not isinstance(value, list) or not value:
        raise Wrong("upstreams: must be a list of one address")
    if len(value) > 1:
        raise Wrong(
            f"upstreams: {len(value)} addresses, but one is served; "
            "name the address of the load balancer before the engines"
        )
    address = checked.text(value[0], "upstreams[0]")
    if not UPSTREAM.fullmatch(address):
        raise Wrong(f"upstreams[0]: {address!r} must look like http://HOST:PORT, without a path")
    return address


def _keys_file(value: object) -> Path:
    path = checked.text(value, "keys_file")
    if not path.startswith("/") or "\0" in path:
        raise Wrong(f"keys_file: {path!r} must be an absolute path")
    return Path(path)
