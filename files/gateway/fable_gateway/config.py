"""The settings that the deploy renders to config.json: read, checked, refused in one line."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fable_gateway.errors import EXIT_UNABLE, GatewayError
from fable_gateway.keys import NAME, KeyRing

UPSTREAM = re.compile(r"http://(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9.-]+)(:[0-9]{1,5})?")
SHA256 = re.compile(r"[0-9a-f]{64}")
MAX_FILE_BYTES = 1 << 20


@dataclass(frozen=True)
class Config:
    """Everything the gateway is told.

    Attributes:
        host, port: where it listens.
        upstream: the engine's base URL, without a path.
        keys: who may ask.
        max_in_flight: requests inside the engine at the same time.
        hold_seconds: how long a request waits for a slot and for an engine that is away.
        models: names that the engine must serve before the gateway calls itself ready.
        max_body_bytes: largest request body, after decompression.
        connect_timeout_seconds: how long one attempt to connect to the engine may take.
        deployment: name of the deployment, reported at /health.
    """

    host: str
    port: int
    upstream: str
    keys: KeyRing
    max_in_flight: int
    hold_seconds: float
    models: tuple[str, ...]
    max_body_bytes: int
    connect_timeout_seconds: float
    deployment: str


def load(path: Path) -> Config:
    """Read `path`.

    Raises:
        GatewayError: it cannot be read (exit code 2) or is wrong (exit code 1).
    """
    try:
        with path.open("rb") as stream:
            content = stream.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise GatewayError(
            f"{path}: cannot be read ({error.strerror}); the deploy writes it", EXIT_UNABLE
        ) from None
    if len(content) > MAX_FILE_BYTES:
        raise GatewayError(f"{path}: larger than {MAX_FILE_BYTES} bytes; this is no config")
    return parse(content, str(path))


def parse(content: bytes, place: str) -> Config:
    """Check the text of a config; `place` names it in errors.

    Raises:
        GatewayError: the first thing that is wrong, by its key.
    """
    try:
        value = json.loads(content.decode(), object_pairs_hook=_distinct)
        return _config(value)
    except json.JSONDecodeError as error:
        raise GatewayError(
            f"{place}: line {error.lineno}: not JSON ({error.msg}); deploy it again"
        ) from None
    except (UnicodeDecodeError, RecursionError):
        raise GatewayError(f"{place}: not JSON; deploy it again") from None
    except _Wrong as wrong:
        raise GatewayError(f"{place}: {wrong}; correct the settings and deploy again") from None


class _Wrong(ValueError):
    """What is wrong, with the key first."""


def _config(value: object) -> Config:
    fields = _fields(
        value,
        "the config",
        "listen upstreams keys max_in_flight hold_seconds models max_body_bytes "
        "connect_timeout_seconds deployment",
    )
    listen = _fields(fields["listen"], "listen", "host port")
    return Config(
        host=_text(listen["host"], "listen.host"),
        port=_integer(listen["port"], "listen.port", 1, 65535),
        upstream=_upstream(fields["upstreams"]),
        keys=_keys(fields["keys"]),
        max_in_flight=_integer(fields["max_in_flight"], "max_in_flight", 1, 10_000),
        hold_seconds=_seconds(fields["hold_seconds"], "hold_seconds", 0),
        models=_models(fields["models"]),
        max_body_bytes=_integer(fields["max_body_bytes"], "max_body_bytes", 1, 1 << 32),
        connect_timeout_seconds=_seconds(
            fields["connect_timeout_seconds"], "connect_timeout_seconds", 0.01
        ),
        deployment=_text(fields["deployment"], "deployment"),
    )


def _distinct(pairs: Sequence[tuple[str, object]]) -> dict[str, object]:
    result: dict[str, object] = {}
    for key, value in pairs:
        if key in result:
            raise _Wrong(f"{key!r}: stands twice")
        result[key] = value
    return result


def _object(value: object, where: str) -> dict[str, object]:
    if not isinstance(value, dict):
        raise _Wrong(f"{where}: must be an object")
    return value


def _fields(value: object, where: str, names: str) -> dict[str, object]:
    found = _object(value, where)
    known = names.split()
    for name in found:
        if name not in known:
            raise _Wrong(f"{where}: unknown key {name!r}, known are {', '.join(known)}")
    for name in known:
        if name not in found:
            raise _Wrong(f"{where}: {name} is missing")
    return found


def _text(value: object, where: str) -> str:
    if not isinstance(value, str) or not value:
        raise _Wrong(f"{where}: must be a text that is not empty")
    return value


def _integer(value: object, where: str, low: int, high: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise _Wrong(f"{where}: must be a whole number from {low} to {high}")
    return value


def _seconds(value: object, where: str, low: float) -> float:
    high = 86_400
    if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value <= high:
        raise _Wrong(f"{where}: must be seconds from {low:g} to {high}")
    return float(value)


def _upstream(value: object) -> str:
    if not isinstance(value, list) or not value:
        raise _Wrong("upstreams: must be a list of one address")
    if len(value) > 1:
        raise _Wrong(
            f"upstreams: {len(value)} addresses, but one is served; "
            "name the address of the load balancer before the engines"
        )
    address = _text(value[0], "upstreams[0]")
    if not UPSTREAM.fullmatch(address):
        raise _Wrong(f"upstreams[0]: {address!r} must look like http://HOST:PORT, without a path")
    return address


def _keys(value: object) -> KeyRing:
    digests: dict[str, bytes] = {}
    for name, entry in _object(value, "keys").items():
        if not NAME.fullmatch(name):
            raise _Wrong(f"keys: {name!r} is no name (letters, digits, '.', '_', '-')")
        digest = _fields(entry, f"keys.{name}", "sha256")["sha256"]
        if not isinstance(digest, str) or not SHA256.fullmatch(digest):
            raise _Wrong(f"keys.{name}.sha256: must be 64 lower-case hex digits")
        if bytes.fromhex(digest) in digests.values():
            raise _Wrong(f"keys.{name}.sha256: another name has the same key")
        digests[name] = bytes.fromhex(digest)
    return KeyRing(digests)


def _models(value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or not value:
        raise _Wrong("models: must be a list of names")
    names = tuple(_text(name, f"models[{place}]") for place, name in enumerate(value))
    if len(set(names)) < len(names):
        raise _Wrong("models: a name stands twice")
    return names
