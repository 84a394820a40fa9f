"""Releases: everything that determines how an engine starts, immutable, named by its content.

The name of a release is `<engine>-<16 hex digits>`. The digits are the first 16 of the SHA-256
of its canonical JSON: the whole object without the key `name`, keys sorted, separators `,` and
`:` without spaces, every non-ASCII character escaped as `\\uXXXX`, no newline at the end; in
Python `json.dumps(content, sort_keys=True, separators=(",", ":"))`. Numbers are whole numbers,
so that every JSON writer agrees on the text.
"""

from __future__ import annotations

import hashlib
import ipaddress
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hostlib.errors import HostError

from enginectl import strict, timing
from enginectl.paths import Places

FORMAT = 1
NAME = re.compile(r"[a-z][a-z0-9_-]*-[0-9a-f]{16}")
ENGINE = re.compile(r"[a-z][a-z0-9_-]*")
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

_KEYS: strict.Types = {
    "format": int,
    "name": str,
    "engine": str,
    "user": str,
    "working_directory": str,
    "argv": list,
    "env": dict,
    "listen": dict,
    "served_names": list,
    "paths": dict,
    "required_paths": list,
    "address_wait_seconds": int,
    "boot_deadline_seconds": int,
    "cold_boot_deadline_seconds": int,
    "drain_seconds": int,
    "failed_boots": int,
    "memory": dict,
    "gates": dict,
}
_LISTEN: strict.Types = {"host": str, "port": int}
_PATHS: strict.Types = {"venv": str, "toolkit": str, "checkpoint": str}
_MEMORY: strict.Types = {"verdict": str, "demand_tokens": int, "pool_tokens": int, "reason": str}
_GATES: strict.Types = {
    "mtp_depth": int,
    "tensor_parallel": int,
    "census_modules_per_rank": int,
    "vocab_rows": int,
}


@dataclass(frozen=True)
class Listen:
    """Where the engine serves: an IP address (perhaps a wildcard) and a TCP port."""

    host: str
    port: int

    @property
    def connect_host(self) -> str:
        """The address to reach it at from this machine."""
        return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)  # noqa: S104

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True)
class GateSettings:
    """Parameters of the gates.

    Attributes:
        mtp_depth: draft tokens a step (k); 0 switches speculation off.
        tensor_parallel: ranks (TP).
        census_modules_per_rank: fused FP8 modules on one rank, 2 a layer (128 for 64 layers);
            0 where the checkpoint has none.
        vocab_rows: rows of lm_head in the checkpoint; a rank holds vocab_rows / tensor_parallel.
    """

    mtp_depth: int
    tensor_parallel: int
    census_modules_per_rank: int
    vocab_rows: int


@dataclass(frozen=True)
class Memory:
    """Whether the KV cache holds what may run at once, as worked out when it was rendered.

    Attributes:
        verdict: `fits`, `short`, or `unsure` where nothing near was ever measured.
        demand_tokens: sequences times tokens in each.
        pool_tokens: expected size of the cache.
        reason: both in words.
    """

    verdict: str
    demand_tokens: int
    pool_tokens: int
    reason: str


@dataclass(frozen=True)
class Release:
    """One release, as read from its file. Times are in seconds.

    `failed_boots` is the number of boots without an answer, in a row, after which the release
    before this one is tried. The cold boot deadline holds while the engine's caches are empty.
    """

    name: str
    engine: str
    user: str
    working_directory: Path
    argv: tuple[str, ...]
    env: Mapping[str, str]
    listen: Listen
    served_names: tuple[str, ...]
    paths: Mapping[str, Path]
    required_paths: tuple[Path, ...]
    address_wait_seconds: int
    boot_deadline_seconds: int
    cold_boot_deadline_seconds: int
    drain_seconds: int
    failed_boots: int
    memory: Memory
    gates: GateSettings

    @property
    def boot_seconds(self) -> int:
        """How long the next boot may take."""
        cache = self.env.get("VLLM_CACHE_ROOT")
        if cache is None or _holds_something(Path(cache)):
            return self.boot_deadline_seconds
        return self.cold_boot_deadline_seconds

    def missing_paths(self) -> list[Path]:
        """Paths that must exist before the engine starts and do not."""
        needed = [self.working_directory, Path(self.argv[0]), *self.paths.values()]
        return [path for path in dict.fromkeys([*needed, *self.required_paths]) if not _there(path)]


def release_name(engine: str, content: Mapping[str, Any]) -> str:
    """The name of the release with this `content` (the object of release.json; `name` is ignored).

    Raises:
        TypeError: the content holds something that JSON does not know.
    """
    plain = {key: value for key, value in content.items() if key != "name"}
    canonical = json.dumps(plain, sort_keys=True, separators=(",", ":"))
    return f"{engine}-{hashlib.sha256(canonical.encode('ascii')).hexdigest()[:16]}"


def check_name(name: str) -> str:
    """`name` if it has the form of a release's name (and so is safe as a folder's name).

    Raises:
        HostError: it has not.
    """
    if not NAME.fullmatch(name):
        raise HostError(f"{name!r}: is not a release name; it looks like skinny-0123456789abcdef")
    return name


def parse_release(content: Mapping[str, Any], where: str) -> Release:
    """The release in the object `content`, read from `where`.

    Raises:
        HostError: a key is unknown, missing or wrong, the format is newer, or the name is not
            that of the content.
    """
    strict.check_format(content, FORMAT, where)
    value = strict.check_keys(content, _KEYS, where)
    listen = strict.check_keys(value["listen"], _LISTEN, f"{where}: listen")
    paths = strict.check_keys(value["paths"], _PATHS, f"{where}: paths")
    gates = strict.check_keys(value["gates"], _GATES, f"{where}: gates")
    if not ENGINE.fullmatch(value["engine"]):
        raise HostError(f"{where}: engine {value['engine']!r} must be a lower-case word")
    name = release_name(value["engine"], value)
    if value["name"] != name:
        raise HostError(
            f"{where}: is named {value['name']!r} but holds {name!r}; it was edited after "
            "rendering, deploy it again"
        )
    argv = strict.texts(value["argv"], f"{where}: argv")
    if not argv:
        raise HostError(f"{where}: argv is empty")
    strict.absolute(argv[0], f"{where}: argv[0]")
    return Release(
        name=name,
        engine=value["engine"],
        user=strict.text(value["user"], f"{where}: user"),
        working_directory=strict.absolute(
            value["working_directory"], f"{where}: working_directory"
        ),
        argv=argv,
        env=_environment(value["env"], f"{where}: env"),
        listen=_listen(listen, f"{where}: listen"),
        served_names=_served_names(value["served_names"], f"{where}: served_names"),
        paths={key: strict.absolute(paths[key], f"{where}: paths.{key}") for key in _PATHS},
        required_paths=tuple(
            strict.absolute(entry, f"{where}: required_paths")
            for entry in strict.texts(value["required_paths"], f"{where}: required_paths")
        ),
        address_wait_seconds=strict.within(
            0, timing.LONGEST_ADDRESS_WAIT_SECONDS, value, "address_wait_seconds", where
        ),
        boot_deadline_seconds=strict.within(
            1, timing.LONGEST_BOOT_SECONDS, value, "boot_deadline_seconds", where
        ),
        cold_boot_deadline_seconds=strict.within(
            1, timing.LONGEST_BOOT_SECONDS, value, "cold_boot_deadline_seconds", where
        ),
        drain_seconds=strict.within(0, timing.LONGEST_DRAIN_SECONDS, value, "drain_seconds", where),
        failed_boots=strict.at_least(1, value, "failed_boots", where),
        memory=Memory(**strict.check_keys(value["memory"], _MEMORY, f"{where}: memory")),
        gates=GateSettings(
            mtp_depth=strict.at_least(0, gates, "mtp_depth", f"{where}: gates"),
            tensor_parallel=strict.at_least(1, gates, "tensor_parallel", f"{where}: gates"),
            census_modules_per_rank=strict.at_least(
                0, gates, "census_modules_per_rank", f"{where}: gates"
            ),
            vocab_rows=strict.at_least(1, gates, "vocab_rows", f"{where}: gates"),
        ),
    )


def load_release(places: Places, name: str) -> Release:
    """The release `name` of this host.

    Raises:
        HostError: there is none of that name, or its file is not valid.
        OSError: the file cannot be read.
    """
    path = places.release(check_name(name))
    try:
        content = strict.read(path)
    except FileNotFoundError:
        raise HostError(
            f"{path}: there is no release {name} on this host; deploy it, or see the folders "
            f"in {path.parent.parent}"
        ) from None
    release = parse_release(content, str(path))
    if release.name != name:
        raise HostError(f"{path}: holds the release {release.name}; deploy {name} again")
    return release


def _environment(value: Mapping[str, Any], where: str) -> dict[str, str]:
    for key, entry in value.items():
        if not VARIABLE.fullmatch(key):
            raise HostError(f"{where}: {key!r} is not the name of a variable")
        if not isinstance(entry, str) or "\0" in entry:
            raise HostError(f"{where}: {key} must be a string")
    return dict(value)


def _listen(value: Mapping[str, Any], where: str) -> Listen:
    try:
        ipaddress.ip_address(value["host"])
    except ValueError:
        raise HostError(f"{where}: host {value['host']!r} must be an IP address") from None
    if not 1 <= value["port"] <= 65535:
        raise HostError(f"{where}: port {value['port']} must be from 1 to 65535")
    return Listen(value["host"], value["port"])


def _served_names(value: list[Any], where: str) -> tuple[str, ...]:
    names = strict.texts(value, where)
    if not names or len(set(names)) != len(names):
        raise HostError(f"{where}: must hold at least one name, and none twice")
    return names


def _holds_something(folder: Path) -> bool:
    try:
        return any(folder.iterdir())
    except OSError:
        return False


def _there(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:
        return False
