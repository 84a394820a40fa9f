"""Where the deploy puts things on the hosts. One home for each path."""

from __future__ import annotations

from pathlib import PurePosixPath

from stack.settings import Service, Storage

ROOT_PROGRAMS = PurePosixPath("/usr/local/lib/fable")
ENGINECTL = PurePosixPath("/usr/local/bin/enginectl")
ENGINE_STATE = PurePosixPath("/var/lib/fable-engine")
RELEASES = ENGINE_STATE / "releases"
ENGINE_CONFIG = PurePosixPath("/etc/fable-engine")
FIREWALL = ENGINE_CONFIG / "firewall.nft"
FIREWALL_TABLE = "inet fable_engine"
GATEWAY_HANDOVER = ROOT_PROGRAMS / "gateway_handover.py"
GATEWAY_CONFIG = PurePosixPath("/etc/fable-gateway")
UNITS = PurePosixPath("/etc/systemd/system")
NFTABLES_DROP_IN = UNITS / "nftables.service.d" / "fable-engine.conf"
UNIT_VALIDATOR = ("systemd-analyze", "verify", "--man=no", "--recursive-errors=no", "{}")


class EnginePlaces:
    """Folders below the storage root of the engine's host."""

    def __init__(self, storage: Storage) -> None:
        root = PurePosixPath(storage.root)
        self.root = root
        self.tools = root / "tools"
        self.specs = root / "tools" / "specs"
        self.toolkits = root / "toolkits"
        self.checkpoints = root / "checkpoints"
        self.venvs = root / "venvs"
        self.caches = root / "caches"


class GatewayPlaces:
    """Folders in the service user's home on the gateway's host."""

    def __init__(self, service: Service) -> None:
        home = PurePosixPath(service.home)
        self.bin = home / "bin"
        self.root = home / "fable-gateway"
        self.app = self.root / "app"
        self.tools = self.root / "tools"
        self.specs = self.tools / "specs"
        self.venvs = self.root / "venvs"
        self.venv = self.root / "venv"
        self.launcher = self.bin / "fable_gateway.py"
        self.config = GATEWAY_CONFIG / "config.json"
        self.keys = GATEWAY_CONFIG / "keys.json"
