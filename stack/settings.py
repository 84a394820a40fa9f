"""Typed settings: what `group_data/` and an inventory may say, checked before anything changes."""

from __future__ import annotations

import copy
import datetime
import ipaddress
import re
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal

from checkpoint.serving import TENSOR_PARALLEL_SIZE
from enginectl.timing import (
    LONGEST_ADDRESS_WAIT_SECONDS,
    LONGEST_BOOT_SECONDS,
    LONGEST_DRAIN_SECONDS,
)
from fable_gateway import keys as gateway_keys
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from stack.errors import StackError

OWN_FOLDERS = ("tools", "toolkits", "checkpoints", "venvs", "caches")
HIGHEST_DRAFT_TOKENS = 15  # 16 and more has produced corrupt output on this engine


def _absolute(path: str) -> str:
    if not PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts:
        raise ValueError("must be an absolute path")
    return path


def _network(value: str) -> str:
    return str(ipaddress.ip_network(value))


def _address(value: str) -> str:
    return str(ipaddress.ip_address(value))


def _somebody(keys: dict[str, str]) -> dict[str, str]:
    if not keys:
        raise ValueError(
            "nobody could use the gateway; `script/key NAME` makes a key and the line to write here"
        )
    return keys


def _date(value: str) -> str:
    return datetime.date.fromisoformat(value).isoformat()


AbsolutePath = Annotated[str, AfterValidator(_absolute)]
Network = Annotated[str, AfterValidator(_network)]
Address = Annotated[str, AfterValidator(_address)]
Port = Annotated[int, Field(ge=1, le=65535)]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
Day = Annotated[str, Field(pattern=r"^\d{4}-\d\d-\d\d$"), AfterValidator(_date)]
KeyName = Annotated[str, Field(pattern=f"^{gateway_keys.NAME.pattern}$")]
Seconds = Annotated[int, Field(gt=0, le=86400)]


class Model(BaseModel):
    """Base: unknown keys are refused, types are not bent, nothing changes afterwards."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Service(Model):
    """The user that owns and runs both servers."""

    user: Name
    home: AbsolutePath


class Serving(Model):
    """What consumers see of the engine."""

    port: Port
    names: Annotated[list[Name], Field(min_length=1)]

    @model_validator(mode="after")
    def _unique(self) -> Serving:
        if len(set(self.names)) != len(self.names):
            raise ValueError("names: one stands there twice")
        return self


class Storage(Model):
    """The data disk of the engine's host."""

    mount: AbsolutePath
    root: AbsolutePath

    @model_validator(mode="after")
    def _inside(self) -> Storage:
        if not PurePosixPath(self.root).is_relative_to(self.mount):
            raise ValueError(f"root: must lie below mount {self.mount}")
        return self


class Linked(Model):
    """A content-addressed tree that people find under a fixed path."""

    link: AbsolutePath


class Toolkit(Linked):
    """Which CUDA toolkit, and where its files come from."""

    source: Literal["redist", "mirror", "runfile", "adopted"]
    location: Annotated[str, Field(pattern=r"^(/|https?://)\S*$")] | None
    runfile: Name
    adopted: Annotated[str, Field(pattern=r"^cuda-[0-9a-f]{16}$")] | None
    components: Annotated[list[Name], Field(min_length=1)]

    @model_validator(mode="after")
    def _whole(self) -> Toolkit:
        if self.source == "mirror" and self.location is None:
            raise ValueError("location: a mirror needs one: a URL, or a folder on the host")
        if self.source in ("redist", "adopted") and self.location is not None:
            raise ValueError("location: only for source mirror or runfile")
        if (self.source == "adopted") != (self.adopted is not None):
            raise ValueError("adopted: the tree's name with source adopted, None with any other")
        if len(set(self.components)) != len(self.components):
            raise ValueError("components: one stands there twice")
        return self


class Checkpoint(Linked):
    """How the checkpoint comes to the host: fetched whole, or assembled there from its parents."""

    source: Literal["fetch", "assemble"]


def _proved_ranks(size: int) -> int:
    if TENSOR_PARALLEL_SIZE % size:
        raise ValueError(f"checkpoints are proved for {TENSOR_PARALLEL_SIZE} cards, or 2, or 1")
    return size


class Engine(Model):
    """How the engine starts; names follow its own command line."""

    name: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_-]*$")]
    python: Annotated[str, Field(pattern=r"^python3(\.\d+)?$")]
    tensor_parallel_size: Annotated[int, Field(ge=1), AfterValidator(_proved_ranks)]
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)]
    max_model_len: Annotated[int, Field(gt=0)]
    max_num_seqs: Annotated[int, Field(gt=0)]
    max_num_batched_tokens: Annotated[int, Field(gt=0)]
    num_speculative_tokens: Annotated[int, Field(ge=0, le=HIGHEST_DRAFT_TOKENS)]
    cudagraph_capture_sizes: list[Annotated[int, Field(gt=0)]] | None
    dtype: Name
    attention_backend: Name
    reasoning_parser: Name
    tool_call_parser: Name
    enable_thinking: bool
    numa_node: Annotated[int, Field(ge=0)] | None
    boot_deadline_seconds: Annotated[int, Field(gt=0, le=LONGEST_BOOT_SECONDS)]
    cold_boot_deadline_seconds: Annotated[int, Field(gt=0, le=LONGEST_BOOT_SECONDS)]
    failed_boots: Annotated[int, Field(gt=0, le=100)]
    drain_seconds: Annotated[int, Field(ge=0, le=LONGEST_DRAIN_SECONDS)]
    address_wait_seconds: Annotated[int, Field(gt=0, le=LONGEST_ADDRESS_WAIT_SECONDS)]
    environment: dict[Annotated[str, Field(pattern=r"^[A-Z_][A-Z0-9_]*$")], str]
    census_modules_per_rank: Annotated[int, Field(ge=0)]
    vocabulary_rows: Annotated[int, Field(gt=0)]


class Access(Model):
    """Who may reach the serving port besides the host itself and the gateway."""

    consumers: list[Network] | None

    @model_validator(mode="after")
    def _decided(self) -> Access:
        if self.consumers is None:
            raise ValueError(
                'consumers: not decided yet; list who uses the port today (see "Who may reach the '
                'engine" in docs/operations.md), or [] for nobody'
            )
        return self


class KeyLimits(Model):
    """A gateway key with limits of its own; `fable_gateway.keys.Key` says what each means."""

    sha256: Sha256
    expires: Annotated[str, Field(pattern=r"^\d{4}-\d\d-\d\d$"), AfterValidator(_date)] | None = (
        None
    )
    models: Annotated[list[Name], Field(min_length=1)] | None = None
    max_in_flight: Annotated[int, Field(gt=0, le=gateway_keys.MOST_IN_FLIGHT)] | None = None
    requests_per_minute: Annotated[int, Field(gt=0, le=gateway_keys.MOST_PER_MINUTE)] | None = None


class Gateway(Model):
    """The gateway's own settings."""

    port: Port
    python: Annotated[str, Field(pattern=r"^python3(\.\d+)?$")]
    max_in_flight: Annotated[int, Field(gt=0, le=4096)]
    max_queued: Annotated[int, Field(ge=0, le=65536)]
    hold_seconds: Seconds
    connect_timeout_seconds: Seconds
    max_body_bytes: Annotated[int, Field(gt=0)]
    max_buffered_bytes: Annotated[int, Field(gt=0)]
    keys: Annotated[dict[KeyName, Sha256 | KeyLimits], AfterValidator(_somebody)]
    take_over: bool

    @model_validator(mode="after")
    def _bodies_fit(self) -> Gateway:
        if self.max_buffered_bytes < self.max_body_bytes:
            raise ValueError("max_buffered_bytes: is less than max_body_bytes")
        return self


class EngineHost(Model):
    """All settings of a host in group v100."""

    address: Address
    service: Service
    serving: Serving
    storage: Storage
    toolkit: Toolkit
    checkpoint: Checkpoint
    engine: Engine
    access: Access

    @model_validator(mode="after")
    def _together(self) -> EngineHost:
        for section in (self.toolkit, self.checkpoint):
            if not PurePosixPath(section.link).is_relative_to(self.storage.root):
                raise ValueError(f"link {section.link}: must lie below storage.root")
        own = {f"{self.storage.root}/{name}" for name in OWN_FOLDERS}
        links = {self.toolkit.link, self.checkpoint.link}
        if len(links) < 2 or links & own:
            raise ValueError("link: toolkit and checkpoint need places of their own")
        if self.serving.port == SSH_PORT:
            raise ValueError(f"serving.port: {SSH_PORT} is ssh's")
        return self


class GatewayHost(Model):
    """All settings of a host in group dgx."""

    address: Address
    service: Service
    serving: Serving
    gateway: Gateway

    @model_validator(mode="after")
    def _ports(self) -> GatewayHost:
        if self.gateway.port in (SSH_PORT, self.serving.port):
            raise ValueError(
                f"gateway.port: {self.gateway.port} clashes with ssh or with serving.port"
            )
        return self


SSH_PORT = 22
SECTIONS = {
    "v100": ("service", "serving", "storage", "toolkit", "checkpoint", "engine", "access"),
    "dgx": ("service", "serving", "gateway"),
}
HOMES = {"service": "group_data/all.py", "serving": "group_data/all.py"}
MODELS: dict[str, type[EngineHost | GatewayHost]] = {"v100": EngineHost, "dgx": GatewayHost}


def engine_host(data: Mapping[str, Any], inventory: str) -> EngineHost:
    """The checked settings of a host in group v100; see `_load`."""
    loaded = _load("v100", data, inventory)
    assert isinstance(loaded, EngineHost)
    return loaded


def gateway_host(data: Mapping[str, Any], inventory: str) -> GatewayHost:
    """The checked settings of a host in group dgx; see `_load`."""
    loaded = _load("dgx", data, inventory)
    assert isinstance(loaded, GatewayHost)
    return loaded


def host_address(data: Mapping[str, Any], group: str, inventory: str) -> str:
    """Where the other host reaches this one.

    Raises:
        StackError: it is not set, or is no IP address.
    """
    address = data.get("address")
    if address is None:
        raise StackError(f"{inventory}: {group}.address is not set; write the host's address there")
    try:
        return _address(address)
    except ValueError:
        raise StackError(f"{inventory}: {group}.address: {address!r} is no IP address") from None


def _load(group: str, data: Mapping[str, Any], inventory: str) -> EngineHost | GatewayHost:
    """Settings of one host: group data, then the inventory's overrides, then the checks.

    Args:
        group: "v100" or "dgx".
        data: the host's merged pyinfra data; `overrides` maps dotted keys to values.
        inventory: path of the inventory file, for the errors.

    Raises:
        StackError: names file and key of the first wrong setting.
    """
    merged: dict[str, Any] = {"address": host_address(data, group, inventory)}
    for section in SECTIONS[group]:
        if data.get(section) is None:
            raise StackError(f"{_home(section, group)}: {section} is missing; restore it")
        if not isinstance(data[section], dict):
            raise StackError(f"{_home(section, group)}: {section} must be a dict; correct it")
        merged[section] = copy.deepcopy(data[section])
    overrides = data.get("overrides") or {}
    for dotted, value in overrides.items():
        section, _, key = dotted.partition(".")
        if section not in SECTIONS[group] or key not in merged[section]:
            raise StackError(f"{inventory}: overrides: {dotted} is no setting of group {group}")
        merged[section][key] = value
    try:
        return MODELS[group].model_validate(merged)
    except ValidationError as error:
        raise StackError(_first_fault(error, group, inventory, overrides)) from None


def _first_fault(
    error: ValidationError, group: str, inventory: str, overrides: Mapping[str, Any]
) -> str:
    fault = error.errors(include_url=False)[0]
    location = [str(part) for part in fault["loc"]]
    dotted = ".".join(location[:2])
    if dotted in overrides:
        home = inventory
    else:
        home = _home(location[0], group) if location else f"group_data/{group}.py"
    message = re.sub(r"^Value error, ", "", fault["msg"])
    if fault["type"] == "extra_forbidden":
        message = "is no setting; remove it or correct its name"
    elif fault["type"] == "missing":
        message = "is missing"
    key = ".".join(location)
    shown = "" if fault["type"] in ("missing", "extra_forbidden") else _shown(fault["input"], key)
    return f"{home}: {key + ': ' if key else ''}{message}{shown}"


def _shown(value: Any, key: str) -> str:
    plain = isinstance(value, str | int | float) or value is None
    return f" (it is {value!r})" if key and plain and len(repr(value)) <= 80 else ""


def _home(section: str, group: str) -> str:
    return HOMES.get(section, f"group_data/{group}.py")
