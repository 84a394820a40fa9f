"""What an inventory says, for programs that are not pyinfra.

`python -m stack.inventory FILE [LIMIT]` prints it as JSON. pyinfra patches the whole process that
it is imported into, so readers ask this in a process of its own.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, dataclass
from typing import Any

from stack import REPOSITORY
from stack.errors import StackError, UsageError
from stack.exits import EXIT_FAILED, EXIT_USAGE

DEADLINE_S = 60


@dataclass(frozen=True)
class Member:
    """A host of a group: its name, and its data merged as pyinfra merges it."""

    name: str
    data: dict[str, Any]


def read(inventory: str, limit: str | None = None) -> dict[str, list[Member]]:
    """Group → its hosts, for the inventory file `inventory`; settings checked.

    Args:
        limit: one host or group: only its settings, and the other host's address, must be right.

    Raises:
        UsageError: `limit` is no host or group.
        StackError: the inventory cannot be read; its own message is kept.
    """
    done = subprocess.run(
        [sys.executable, "-m", "stack.inventory", inventory, *([limit] if limit else [])],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    if done.returncode != 0:
        kind = UsageError if done.returncode == EXIT_USAGE else StackError
        raise kind(done.stderr.strip() or f"{inventory}: cannot be read")
    groups: dict[str, list[dict[str, Any]]] = json.loads(done.stdout)
    return {group: [Member(**member) for member in members] for group, members in groups.items()}


def _members(inventory: str) -> dict[str, list[Member]]:
    """Group → its hosts, unchecked, by pyinfra's own reading."""
    from pyinfra.api import State
    from pyinfra.api.exceptions import NoGroupError
    from pyinfra.context import ctx_state
    from pyinfra_cli.inventory import make_inventory

    from stack.settings import SECTIONS

    try:
        with ctx_state.use(State()):
            made = make_inventory(inventory, cwd=str(REPOSITORY))
    except StackError:
        raise
    except Exception as error:  # whatever a person can write into a Python file
        raise StackError(f"{inventory}: cannot be read ({type(error).__name__}: {error})") from None
    keys = sorted({key for sections in SECTIONS.values() for key in sections})
    found: dict[str, list[Member]] = {}
    for group in SECTIONS:
        try:
            hosts = list(made.get_group(group))
        except NoGroupError:
            raise StackError(
                f"{inventory}: has no group {group}; there must be one with one host"
            ) from None
        if len(hosts) != 1:
            raise StackError(
                f"{inventory}: group {group} has {len(hosts)} hosts; exactly one is supported"
            )
        found[group] = [
            Member(host.name, {**{key: host.data.get(key) for key in keys}, **host.host_data})
            for host in hosts
        ]
    return found


def _check(groups: dict[str, list[Member]], inventory: str, limit: str | None) -> None:
    """Refuse the first wrong setting of a host that `limit` leaves in."""
    from stack import settings

    readers = {"v100": settings.engine_host, "dgx": settings.gateway_host}
    known = sorted({*groups, *(member.name for members in groups.values() for member in members)})
    if limit is not None and limit not in known:
        raise UsageError(f"--limit {limit}: {inventory} knows {', '.join(known)}")
    for group, (member,) in groups.items():
        if limit is None or limit in (group, member.name):
            keys = ("address", "overrides", *settings.SECTIONS[group])
            readers[group]({key: member.data.get(key) for key in keys}, inventory)
        else:
            settings.host_address(member.data, group, inventory)


def _main(inventory: str, limit: str | None = None) -> int:
    try:
        groups = _members(inventory)
        _check(groups, inventory, limit)
    except StackError as error:
        print(error, file=sys.stderr)
        return EXIT_USAGE if isinstance(error, UsageError) else EXIT_FAILED
    print(
        json.dumps({group: [asdict(one) for one in members] for group, members in groups.items()})
    )
    return 0


if __name__ == "__main__":
    sys.exit(_main(*sys.argv[1:3]))
