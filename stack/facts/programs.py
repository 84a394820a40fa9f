"""What a program on the host says of itself, as one JSON object."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Sequence
from typing import Any

from pyinfra.api import FactBase

from stack import FILES

MANAGED_FILES = (FILES / "managed" / "managed_files.py").read_text()
PORT_OWNER = (FILES / "handover" / "port_owner.py").read_text()


class ProgramStatus(FactBase[dict[str, Any]]):
    """The JSON object that `argv` prints as `user`; empty where user or program is missing."""

    @staticmethod
    def default() -> dict[str, Any]:
        return {}

    def command(self, argv: Sequence[str], user: str) -> str:
        return f"({as_user(user, argv)}) 2>/dev/null || true"

    def process(self, output: Iterable[str]) -> dict[str, Any]:
        return _last_object(output)


class ManagedFilesDifference(FactBase[dict[str, Any]]):
    """`differs`: path → reason; `refused`: errors. Where `user` is missing, everything differs."""

    @staticmethod
    def default() -> dict[str, Any]:
        return {"differs": {"everything": "its owner is missing"}, "refused": []}

    def command(self, expectations: str, user: str) -> str:
        return as_user(user, ["python3", "-I", "-c", MANAGED_FILES, "check", expectations])

    def process(self, output: Iterable[str]) -> dict[str, Any]:
        text = "".join(output)
        found: dict[str, Any] = json.loads(text) if text else self.default()
        return found


class UnitProperties(FactBase[dict[str, str]]):
    """What systemd knows of a unit."""

    @staticmethod
    def default() -> dict[str, str]:
        return {}

    def command(self, unit: str) -> str:
        return f"systemctl show {shlex.quote(unit)}"

    def process(self, output: Iterable[str]) -> dict[str, str]:
        return dict(line.split("=", 1) for line in output if "=" in line)


class PortOwner(FactBase[dict[str, Any]]):
    """Who listens on a TCP port, as `files/handover/port_owner.py` says; needs root."""

    @staticmethod
    def default() -> dict[str, Any]:
        return {}

    def command(self, port: int) -> str:
        return shlex.join(["python3", "-I", "-c", PORT_OWNER, "find", str(port)])

    def process(self, output: Iterable[str]) -> dict[str, Any]:
        return _last_object(output)


class MountPoint(FactBase[bool]):
    """Whether `path` is a mount point."""

    @staticmethod
    def default() -> bool:
        return False

    def command(self, path: str) -> str:
        return f"mountpoint -q {shlex.quote(path)} && echo yes || echo no"

    def process(self, output: Iterable[str]) -> bool:
        return "yes" in list(output)


class PacketFilterTable(FactBase[str]):
    """The loaded table `family name` as nft lists it; empty where it is not loaded."""

    @staticmethod
    def default() -> str:
        return ""

    def command(self, table: str) -> str:
        return f"nft list table {table} 2>/dev/null || true"

    def process(self, output: Iterable[str]) -> str:
        return "\n".join(output)


class JsonAnswer(FactBase[dict[str, Any]]):
    """The JSON object that a server on the host answers; empty where it does not."""

    @staticmethod
    def default() -> dict[str, Any]:
        return {}

    def command(self, url: str) -> str:
        return f"curl --silent --max-time 10 {shlex.quote(url)} || true"

    def process(self, output: Iterable[str]) -> dict[str, Any]:
        return _last_object(output)


def as_user(user: str, argv: Sequence[str]) -> str:
    """A shell command that runs `argv` as `user`, and nothing where there is no such user."""
    quoted = shlex.quote(user)
    return f"! id -u {quoted} >/dev/null 2>&1 || sudo -n -u {quoted} -- {shlex.join(argv)}"


def _last_object(output: Iterable[str]) -> dict[str, Any]:
    lines = [line for line in output if line.startswith("{")]
    try:
        found: dict[str, Any] = json.loads(lines[-1]) if lines else {}
    except ValueError:
        return {}
    return found
