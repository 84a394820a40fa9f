"""Who is in the way of a start: processes on the port and on the cards that are not the unit's."""

from __future__ import annotations

import contextlib
import os
import pwd
import signal
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hostlib.errors import HostError

from enginectl import cards, network, systemd
from enginectl.paths import Places
from enginectl.release import Listen, Release, load_release
from enginectl.timing import CLEAR_SECONDS, POLL_SECONDS

TERM_SECONDS = 5.0


@dataclass(frozen=True)
class Blocker:
    """Something in the way; `pid` is 0 where no process can be named."""

    pid: int
    where: str

    def __str__(self) -> str:
        who = described(self.pid) if self.pid else "a process that cannot be seen"
        return f"{who} {self.where}"


def strangers(listen: Listen, own: Collection[int]) -> list[Blocker]:
    """Processes other than `own` that listen where `listen` does or fill a card.

    A card counts as filled by strangers from `cards.FREE_BELOW_MIB` of theirs on.

    Raises:
        HostError: nvidia-smi gives no answer.
    """
    found: list[Blocker] = []
    if network.taken_by_others(listen, own):
        pids = sorted(network.listeners(listen) - {*own}) or [0]
        found = [Blocker(pid, f"listens on {listen}") for pid in pids]
    for card, used in cards.occupied().items():
        holders = cards.holders(card)
        theirs = [(pid, mib) for pid, mib in holders.items() if pid not in own]
        if sum(mib for _, mib in theirs) >= cards.FREE_BELOW_MIB:
            found += [Blocker(pid, f"holds {mib} MiB of card {card}") for pid, mib in theirs]
        elif not holders:
            found.append(Blocker(0, f"holds {used} MiB of card {card}"))
    return found


def wait_clear(
    places: Places, release: Release, control_group: str = "", seconds: float = CLEAR_SECONDS
) -> list[str]:
    """Wait until nothing is in the way of a start; end what an engine of ours left behind.

    Returns what was ended, in words.

    Raises:
        HostError: names what is still there after `seconds`.
    """
    ended: list[str] = []
    deadline = time.monotonic() + seconds
    while True:
        rest = [f"process {pid} of the unit" for pid in systemd.processes(control_group)]
        found = [] if rest else strangers(release.listen, ())
        if not rest and not found:
            return ended
        named = {one: str(one) for one in found}  # while they live
        orphans = [one for one in found if one.pid and end_orphan(places, one.pid)]
        ended += [named[orphan] for orphan in orphans]
        if time.monotonic() >= deadline and not orphans:
            first, *others = rest + [str(one) for one in found]
            raise HostError(
                f"{release.name}: cannot start, {first}; end it, or wait for it to end", *others
            )
        time.sleep(POLL_SECONDS)


def is_engine(places: Places, pid: int) -> bool:
    """Whether `pid` is a process of a release of this host, run by that release's user."""
    try:
        owner = pwd.getpwuid(Path(f"/proc/{pid}").stat().st_uid).pw_name
        files = _files_of(pid)
    except (OSError, KeyError):
        return False
    for release in _releases(places):
        trees = [str(release.paths[key]) + "/" for key in ("venv", "toolkit")]
        if release.user == owner and any(file.startswith(tuple(trees)) for file in files):
            return True
    return False


def end_orphan(places: Places, pid: int) -> bool:
    """End `pid` if it is an engine's: SIGTERM, and SIGKILL after TERM_SECONDS; whether it was."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    try:
        if not is_engine(places, pid):  # asked with the handle open: no other process by this id
            return False
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(handle, signal.SIGTERM)
            if not systemd.ended(handle, TERM_SECONDS):
                signal.pidfd_send_signal(handle, signal.SIGKILL)
                systemd.ended(handle, TERM_SECONDS)
    finally:
        os.close(handle)
    return True


def described(pid: int) -> str:
    """A process for a person: its id, user and program."""
    try:
        uid = Path(f"/proc/{pid}").stat().st_uid
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        program = b" ".join(words[:2]).decode("utf-8", "replace")[:100]
    except OSError:
        return f"process {pid}"
    try:
        user = pwd.getpwuid(uid).pw_name
    except KeyError:
        user = str(uid)
    return f"process {pid} ({user}, {program})"


def _files_of(pid: int) -> Sequence[str]:
    """What the process executes: its program, its first argument, and the files mapped into it."""
    folder = Path(f"/proc/{pid}")
    first = (folder / "cmdline").read_bytes().split(b"\0")[0].decode("utf-8", "replace")
    mapped = [line.split(maxsplit=5)[-1] for line in (folder / "maps").read_text().splitlines()]
    return [str((folder / "exe").readlink()), first, *mapped]


def _releases(places: Places) -> Iterable[Release]:
    for folder in sorted(places.releases.glob("*")):
        with contextlib.suppress(HostError, OSError):
            yield load_release(places, folder.name)
