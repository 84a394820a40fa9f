#!/usr/bin/python3 -I
"""nvidia-smi, a stand-in for the lab: four Tesla V100-SXM2-32GB and who holds their memory.

State lives in $LAB_GPU_STATE (default /run/lab-gpu):
    holder-<pid>.json  written by the engine stand-in: pid, start_ticks, gpu, mib, user. It counts
                       only while that very process lives (the start time guards against a reused
                       pid).
    cards.json         what -pm, -pl and -ac set. Removing it is the driver reload that forgets it.

Exit codes, as the real program's: 0; 2 an argument is invalid; 4 no permission; 6 no such card.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
import uuid
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn

EXIT_INVALID, EXIT_PERMISSION, EXIT_NOT_FOUND = 2, 4, 6
CARDS = 4
NAME = "Tesla V100-SXM2-32GB"
MEMORY_MIB = 32768
DRIVER, CUDA = "570.133.20", "12.8"
BUSES = ("15", "16", "1A", "1B")
POWER_W = (150.0, 300.0)
MEMORY_CLOCK_MHZ = 877
GRAPHICS_MHZ = (135, 1530)
IDLE_W, SERVING_W = 25.0, 43.5  # the driver keeps P0 while a server holds the card
IDLE_C, SERVING_C = 33, 41


@dataclass(frozen=True)
class Settings:
    """What an operator can set on one card. Power in watts, clocks in MHz."""

    persistence: bool = False
    power_limit: float = POWER_W[1]
    memory_clock: int = MEMORY_CLOCK_MHZ
    graphics_clock: int = 1290


@dataclass(frozen=True)
class Holder:
    """A live process that holds memory of a card [MiB]."""

    pid: int
    gpu: int
    mib: int

    @property
    def program(self) -> str:
        """Its executable, or [Not Found] where it may not be read."""
        try:
            return str(Path(f"/proc/{self.pid}/exe").readlink())
        except OSError:
            return "[Not Found]"


@dataclass(frozen=True)
class Card:
    """One card, its settings and the processes on it."""

    index: int
    settings: Settings
    holders: list[Holder]

    @property
    def bus(self) -> str:
        """PCI address."""
        return f"00000000:{BUSES[self.index]}:00.0"

    @property
    def uuid(self) -> str:
        """Stable identity."""
        return f"GPU-{uuid.uuid5(uuid.NAMESPACE_OID, f'lab-v100-{self.index}')}"

    @property
    def used(self) -> int:
        """Memory in use [MiB]."""
        return min(MEMORY_MIB, sum(holder.mib for holder in self.holders))

    @property
    def power(self) -> float:
        """Power drawn [W]."""
        return SERVING_W if self.holders else IDLE_W

    @property
    def temperature(self) -> int:
        """Degrees Celsius."""
        return SERVING_C if self.holders else IDLE_C


class Fault(Exception):
    """Ends the program with a message and an exit code."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


def folder() -> Path:
    """The state folder."""
    return Path(os.environ.get("LAB_GPU_STATE", "/run/lab-gpu"))


def _alive(pid: int, start_ticks: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return False
    return stat[0] not in "ZX" and int(stat[19]) == start_ticks


def _holders() -> list[Holder]:
    found = []
    for path in sorted(folder().glob("holder-*.json")):
        try:
            entry = json.loads(path.read_text())
            holder = Holder(entry["pid"], entry["gpu"], entry["mib"])
            alive = _alive(holder.pid, entry["start_ticks"])
        except FileNotFoundError:
            continue  # its process ended in between
        except (ValueError, KeyError, TypeError) as error:
            print(f"nvidia-smi: ignoring {path}: {error!r}", file=sys.stderr)
            continue
        if alive:
            found.append(holder)
    return found


def cards() -> list[Card]:
    """All four cards as they are now."""
    stored = {}
    with contextlib.suppress(FileNotFoundError):
        stored = json.loads((folder() / "cards.json").read_text())
    holders = _holders()
    return [
        Card(
            index,
            Settings(**stored.get(str(index), {})),
            [holder for holder in holders if holder.gpu == index],
        )
        for index in range(CARDS)
    ]


def _store(changed: dict[int, Settings]) -> None:
    place = folder()
    if os.geteuid() != 0:
        raise Fault(EXIT_PERMISSION, "Insufficient Permissions")
    if not place.exists():
        place.mkdir(parents=True)
        place.chmod(0o1777)  # the engine registers its memory here as an ordinary user
    entries = {str(card.index): asdict(card.settings) for card in cards()}
    entries |= {str(index): asdict(settings) for index, settings in changed.items()}
    with tempfile.NamedTemporaryFile("w", dir=place, delete=False) as staged:
        json.dump(entries, staged)
    Path(staged.name).chmod(0o644)
    Path(staged.name).replace(place / "cards.json")


# Field name -> (unit in the header, value). A unit is repeated behind each value.
Field = tuple[str, Callable[[Card], object]]
GPU_FIELDS: dict[str, Field] = {
    "index": ("", lambda card: card.index),
    "name": ("", lambda _: NAME),
    "uuid": ("", lambda card: card.uuid),
    "pci.bus_id": ("", lambda card: card.bus),
    "count": ("", lambda _: CARDS),
    "driver_version": ("", lambda _: DRIVER),
    "compute_cap": ("", lambda _: "7.0"),
    "memory.total": ("MiB", lambda _: MEMORY_MIB),
    "memory.used": ("MiB", lambda card: card.used),
    "memory.free": ("MiB", lambda card: MEMORY_MIB - card.used),
    "ecc.mode.current": ("", lambda _: "Enabled"),
    "persistence_mode": ("", lambda card: _enabled(card.settings.persistence)),
    "clocks.applications.graphics": ("MHz", lambda card: card.settings.graphics_clock),
    "clocks.applications.memory": ("MHz", lambda card: card.settings.memory_clock),
    "power.limit": ("W", lambda card: f"{card.settings.power_limit:.2f}"),
    "power.draw": ("W", lambda card: f"{card.power:.2f}"),
    "temperature.gpu": ("", lambda card: card.temperature),
    "utilization.gpu": ("%", lambda _: 0),
}
AppField = tuple[str, Callable[[Card, Holder], object]]
APP_FIELDS: dict[str, AppField] = {
    "pid": ("", lambda _, holder: holder.pid),
    "process_name": ("", lambda _, holder: holder.program),
    "name": ("", lambda _, holder: holder.program),
    "gpu_uuid": ("", lambda card, _: card.uuid),
    "gpu_bus_id": ("", lambda card, _: card.bus),
    "gpu_name": ("", lambda *_: NAME),
    "used_memory": ("MiB", lambda _, holder: holder.mib),
    "used_gpu_memory": ("MiB", lambda _, holder: holder.mib),
}
HEADERS = {"used_memory": "used_gpu_memory", "name": "process_name"}  # of an app query's aliases


def _enabled(value: bool) -> str:
    return "Enabled" if value else "Disabled"


def _names(text: str, known: dict[str, Field] | dict[str, AppField]) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in known:
            raise Fault(EXIT_INVALID, f'Field "{name}" is not a valid field to query.\n')
    return names


def _csv(layout: str, header: Sequence[tuple[str, str]], rows: Sequence[Sequence[object]]) -> None:
    """Print a table; `layout` is csv[,noheader][,nounits], `header` holds names and units."""
    options = layout.split(",")
    if options[0] != "csv" or set(options[1:]) - {"noheader", "nounits"}:
        raise Fault(EXIT_INVALID, f'Format "{layout}" is not supported.')
    units = "nounits" not in options
    if "noheader" not in options:
        print(", ".join(f"{name} [{unit}]" if unit else name for name, unit in header))
    for row in rows:
        values = (
            f"{value} {unit}" if unit and units else str(value)
            for value, (_, unit) in zip(row, header, strict=True)
        )
        print(", ".join(values))


def query_gpu(text: str, layout: str, chosen: Sequence[Card]) -> None:
    """--query-gpu"""
    names = _names(text, GPU_FIELDS)
    rows = [[GPU_FIELDS[name][1](card) for name in names] for card in chosen]
    _csv(layout, [(name, GPU_FIELDS[name][0]) for name in names], rows)


def query_apps(text: str, layout: str, chosen: Sequence[Card]) -> None:
    """--query-compute-apps"""
    names = _names(text, APP_FIELDS)
    rows = [
        [APP_FIELDS[name][1](card, holder) for name in names]
        for card in chosen
        for holder in card.holders
    ]
    _csv(layout, [(HEADERS.get(name, name), APP_FIELDS[name][0]) for name in names], rows)


def table(chosen: Sequence[Card]) -> None:
    """The plain table, shorter than the real one."""
    print(f"NVIDIA-SMI {DRIVER}    Driver Version: {DRIVER}    CUDA Version: {CUDA}")
    for card in chosen:
        print(
            f"| {card.index}  {NAME}  {card.bus} | {card.temperature}C  "
            f"{card.power:.0f}W / {card.settings.power_limit:.0f}W | "
            f"{card.used}MiB / {MEMORY_MIB}MiB | 0% |"
        )
    print("Processes:")
    processes = [(card, holder) for card in chosen for holder in card.holders]
    for card, holder in processes:
        print(f"| {card.index}  {holder.pid}  C  {holder.program}  {holder.mib}MiB |")
    if not processes:
        print("  No running processes found")


def _change(options: argparse.Namespace, card: Card) -> tuple[Settings, list[str]]:
    """A card's settings after -pm, -pl and -ac, and what to say about it."""
    settings, said = asdict(card.settings), []
    if options.pm is not None:
        if options.pm not in ("0", "1", "DISABLED", "ENABLED"):
            raise Fault(EXIT_INVALID, f"Invalid persistence mode: {options.pm}")
        settings["persistence"] = options.pm in ("1", "ENABLED")
        said.append(f"{_enabled(settings['persistence'])} persistence mode for GPU {card.bus}.")
    if options.pl is not None:
        low, high = POWER_W
        try:
            watts = float(options.pl)
        except ValueError:
            watts = -1.0
        if not low <= watts <= high:
            raise Fault(
                EXIT_INVALID,
                f"Provided power limit {options.pl} W is not a valid power limit which should be "
                f"between {low:.2f} W and {high:.2f} W for GPU {card.bus}",
            )
        was, settings["power_limit"] = settings["power_limit"], watts
        said.append(f"Power limit for GPU {card.bus} was set to {watts:.2f} W from {was:.2f} W.")
    if options.ac is not None:
        memory, _, graphics = options.ac.partition(",")
        low_mhz, high_mhz = GRAPHICS_MHZ
        valid = memory == str(MEMORY_CLOCK_MHZ) and graphics.isdecimal()
        if not valid or not low_mhz <= int(graphics) <= high_mhz:
            raise Fault(
                EXIT_INVALID,
                f'Specified clock combination "{options.ac}" is not supported for GPU {card.bus}.',
            )
        settings["memory_clock"], settings["graphics_clock"] = int(memory), int(graphics)
        said.append(
            f'Applications clocks set to "(MEM {memory}, SM {graphics})" for GPU {card.bus}'
        )
    return Settings(**settings), said


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:  # noqa: ARG002  the real one names no argument
        raise Fault(
            EXIT_INVALID,
            "Invalid combination of input arguments. Please run 'nvidia-smi -h' for help.",
        )


def _options(argv: Sequence[str]) -> argparse.Namespace:
    parser = _Parser(prog="nvidia-smi", allow_abbrev=False)
    add = parser.add_argument
    add("-L", "--list-gpus", dest="list", action="store_true")
    add("-i", "--id", dest="id")
    add("--query-gpu", dest="gpu")
    add("--query-compute-apps", dest="apps")
    add("--format", dest="format")
    add("-pm", "--persistence-mode", dest="pm")
    add("-pl", "--power-limit", dest="pl")
    add("-ac", "--applications-clocks", dest="ac")
    options = parser.parse_args(argv)
    changes = any(value is not None for value in (options.pm, options.pl, options.ac))
    queries = bool(options.gpu or options.apps)
    if queries != bool(options.format) or changes + queries + options.list > 1:
        parser.error("combination")
    return options


def _chosen(ids: str | None, known: list[Card]) -> list[Card]:
    if ids is None:
        return known
    chosen = []
    for wanted in ids.split(","):
        found = [card for card in known if wanted in (str(card.index), card.uuid, card.bus)]
        if not found:
            raise Fault(EXIT_NOT_FOUND, f"No devices were found: {wanted}")
        chosen += found
    return chosen


def run(argv: Sequence[str]) -> None:
    """Do what the arguments ask.

    Raises:
        Fault: they are wrong, or this user may not.
    """
    options = _options(argv)
    chosen = _chosen(options.id, cards())
    if options.gpu:
        query_gpu(options.gpu, options.format, chosen)
    elif options.apps:
        query_apps(options.apps, options.format, chosen)
    elif options.list:
        for card in chosen:
            print(f"GPU {card.index}: {NAME} (UUID: {card.uuid})")
    elif options.pm is None and options.pl is None and options.ac is None:
        table(chosen)
    else:
        changes = {card.index: _change(options, card) for card in chosen}
        _store({index: settings for index, (settings, _) in changes.items()})
        for _, said in changes.values():
            print("\n".join(said))
        print("All done.")


def main() -> int:
    """Run; returns the exit code."""
    try:
        run(sys.argv[1:])
    except Fault as fault:
        print(fault)
        return fault.code
    return 0


if __name__ == "__main__":
    sys.exit(main())
