"""What an inventory says, for programs that are not pyinfra: `python -m stack.inventory FILE`.

pyinfra patches the whole process it is imported into, so readers ask this in a process of its own.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

from stack import REPOSITORY
from stack.errors import StackError

DEADLINE_S = 60


@dataclass(frozen=True)
class Member:
    """A host of a group: its name, and its data merged as pyinfra merges it."""

    name: str
    data: dict[str, Any]


def read(inventory: str) -> dict[str, list[Member]]:
    """Group → its hosts, for the inventory file `inventory`.

    Raises:
        StackError: the inventory cannot be read; its own message is kept.
    """
    done = subprocess.run(
        [sys.executable, "-m", "stack.inventory", inventory],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    if done.returncode != 0:
        raise StackError(done.stderr.strip() or f"{inventory}: cannot be read")
    groups: dict[str, list[dict[str, Any]]] = json.loads(done.stdout)
    return {group: [Member(**member) for member in members] for group, members in groups.items()}


def _faults(made: Any, inventory: str) -> str:
    """The first thing that is wrong with the settings of any host; empty when all are right."""
    from pyinfra.api.exceptions import NoGroupError

    from stack import settings

    readers = {"v100": settings.engine_host, "dgx": settings.gateway_host}
    for group, reader in readers.items():
        try:
            hosts = list(made.get_group(group))
        except NoGroupError:
            return f"{inventory}: has no group {group}; there must be one with one host"
        if len(hosts) != 1:
            return f"{inventory}: group {group} has {len(hosts)} hosts; exactly one is supported"
        keys = ("address", "overrides", *settings.SECTIONS[group])
        try:
            reader({key: hosts[0].data.get(key) for key in keys}, inventory)
        except StackError as error:
            return str(error)
    return ""


def _main(inventory: str) -> int:
    from pyinfra.api import State
    from pyinfra.context import ctx_state
    from pyinfra_cli.inventory import make_inventory

    from stack.settings import SECTIONS

    try:
        with ctx_state.use(State()):
            made = make_inventory(inventory, cwd=str(REPOSITORY))
    except StackError as error:
        print(error, file=sys.stderr)
        return 1
    except Exception as error:  # whatever a person can write into a Python file
        print(f"{inventory}: cannot be read ({type(error).__name__}: {error})", file=sys.stderr)
        return 1
    faults = _faults(made, inventory)
    if faults:
        print(faults, file=sys.stderr)
        return 1
    keys = sorted({key for sections in SECTIONS.values() for key in sections})
    groups = {
        group: [
            {
                "name": host.name,
                "data": {**{key: host.data.get(key) for key in keys}, **host.host_data},
            }
            for host in made.get_group(group)
        ]
        for group in SECTIONS
    }
    print(json.dumps(groups))
    return 0


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1]))
