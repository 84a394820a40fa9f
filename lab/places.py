"""Where a lab keeps its things, and the addresses and ports in it. One home for each."""

from __future__ import annotations

import json
import os
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from lab.errors import LabError
from stack.exits import EXIT_FAILED, EXIT_STALE_LAB, EXIT_USAGE

RUN = Path("/run/fable-lab")
CACHE = Path(os.environ.get("FABLE_LAB_CACHE") or "/var/cache/fable-lab")
CACHE_NAME = re.compile(r"/[A-Za-z0-9_./ -]+")  # overlay's options know no commas and colons
DEFAULT_NAME = "lab"
NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,30}")

BRIDGE = "lab0"
BRIDGE_ADDRESS = "198.19.77.1"
PREFIX_LENGTH = 24
SLIRP_ADDRESS = "10.0.2.100"
SLIRP_NAMESERVER = "10.0.2.3"
SITE_PORT = 8080
SITE_URL = f"http://{BRIDGE_ADDRESS}:{SITE_PORT}"
LOGIN_USER = "deploy"
SERVICE_USER = "mavis"


@dataclass(frozen=True)
class HostPlan:
    """A host of the lab: its address, an address that comes up late (a tailnet's habit), and an
    address that no list of consumers names."""

    name: str
    address: str
    late_address: str | None = None
    stranger_address: str | None = None


HOSTS = {
    "v100": HostPlan("v100", "198.19.77.11", late_address="198.19.77.21"),
    "dgx": HostPlan("dgx", "198.19.77.12", stranger_address="198.19.77.13"),
}


@dataclass(frozen=True)
class Forward:
    """A port of this machine's loopback that leads to an address inside the lab."""

    name: str
    address: str
    port: int
    preferred: int


FORWARDS = (
    Forward("ssh-v100", HOSTS["v100"].address, 22, 2201),
    Forward("ssh-dgx", HOSTS["dgx"].address, 22, 2202),
    Forward("engine", "198.19.77.21", 8601, 8601),
    Forward("gateway", HOSTS["dgx"].address, 18777, 18777),
)


def lab_name() -> str:
    """The lab that commands speak of: environment variable FABLE_LAB, or the default.

    Raises:
        LabError: the name is not one; it becomes part of paths that root removes.
    """
    name = os.environ.get("FABLE_LAB", DEFAULT_NAME)
    if not CACHE_NAME.fullmatch(str(CACHE)):
        raise LabError(
            f"FABLE_LAB_CACHE={str(CACHE)!r}: must be an absolute path of plain characters",
            exit_code=EXIT_USAGE,
        )
    if not NAME.fullmatch(name):
        raise LabError(
            f"FABLE_LAB={name!r}: is no lab name; use up to 31 lower-case letters, digits and "
            "dashes",
            exit_code=EXIT_USAGE,
        )
    return name


@dataclass
class Lab:
    """A running lab, as written to `lab.json` for everyone who talks to it."""

    name: str
    pid: int
    pid_start: int
    ports: dict[str, int]
    artifacts: str
    recipe: str
    gateway_key_sha256: str
    ready: bool = False

    @property
    def folder(self) -> Path:
        return folder(self.name)

    @property
    def ssh_config(self) -> Path:
        return self.folder / "ssh_config"

    @property
    def ssh_key(self) -> Path:
        return self.folder / "id"

    @property
    def known_hosts(self) -> Path:
        return self.folder / "known_hosts"

    @property
    def gateway_key(self) -> Path:
        return self.folder / "gateway.key"

    @property
    def toolkit_components(self) -> list[str]:
        """Names of the components in the lab's CUDA mirror."""
        locked = yaml.safe_load(Path(self.artifacts).read_text())
        return [component["name"] for component in locked["toolkit"]["components"]]

    def save(self) -> None:
        """Replace `lab.json` in one step."""
        beside = self.folder / ".lab.json"
        beside.write_text(json.dumps(asdict(self), indent=1) + "\n")
        beside.replace(self.folder / "lab.json")


def folder(name: str) -> Path:
    """The folder of lab `name`."""
    return RUN / name


def load(name: str | None = None) -> Lab | None:
    """The lab `name` if it is up, else None.

    Raises:
        LabError: it is somebody else's.
    """
    lab_folder = folder(name or lab_name())
    try:
        raw: dict[str, Any] = json.loads((lab_folder / "lab.json").read_text())
        found = Lab(**raw)
    except (OSError, ValueError, TypeError):  # none, cut off, or written by another version
        return None
    if process_start(found.pid) != found.pid_start:
        return None
    if found.ready and not os.access(found.ssh_key, os.R_OK):
        raise LabError(
            f"lab {found.name}: belongs to {lab_folder.owner()}; use one of your own with "
            "FABLE_LAB=another-name"
        )
    return found


def prefix(name: str) -> str:
    """What a command line must begin with to speak of lab `name`."""
    return "" if name == DEFAULT_NAME else f"FABLE_LAB={name} "


def load_ready(asker: str) -> Lab:
    """The lab that commands speak of, up and ready.

    Raises:
        LabError: it is not; `asker` begins the message.
    """
    found = load()
    if found is None or not found.ready:
        name = lab_name()
        raise LabError(
            f"{asker}: lab {name} is not up; `{prefix(name)}script/lab up` starts it, "
            f"`{prefix(name)}script/deploy` fills it too",
            exit_code=EXIT_STALE_LAB if folder(name).exists() else EXIT_FAILED,
        )
    return found


def holders(name: str) -> list[int]:
    """Processes that hold lab `name`, by their own command lines; also when lab.json is lost.

    The one outside comes first: with it the lab's own first process ends.
    """
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdecimal() and entry.stat().st_uid == 0:
                arguments = (entry / "cmdline").read_bytes().split(b"\0")
                if b"lab.holder" in arguments and json.loads(arguments[-2])["name"] == name:
                    found.append(int(entry.name))
        except (OSError, ValueError, KeyError, TypeError, IndexError):
            continue  # gone meanwhile, or no holder
    return sorted(found)


def process_start(pid: int) -> int | None:
    """Start time of process `pid` in clock ticks since boot (proc(5), field 22), None if gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])
