"""Run pyinfra as `script/deploy` does: look first, ask where it matters, change, sum up."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

from stack.errors import StackError, UsageError
from stack.exits import EXIT_FAILED, EXIT_USAGE
from stack.inventory import read

PYINFRA = [sys.executable, "-m", "pyinfra"]


def deploy(inventory: str, *, limit: str | None, ask: bool) -> int:
    """Deploy to `inventory`; returns the exit code.

    Args:
        inventory: path of the inventory file, relative to the repository.
        limit: one host or group, or None for all.
        ask: ask once before changing anything.
    """
    target = [inventory, "deploy.py", *(["--limit", limit] if limit else [])]
    try:
        groups = read(inventory, limit)
    except StackError as error:
        print(f"script/deploy: {error}", file=sys.stderr)
        return EXIT_USAGE if isinstance(error, UsageError) else EXIT_FAILED
    hosts = [member.name for members in groups.values() for member in members]
    print(f"looking at what {inventory} needs")
    plan = look(target)
    if plan is None:
        return EXIT_FAILED
    changes = planned_changes(plan)
    if not changes:
        print(f"no changes: {_named(limit, hosts)} as the settings want it")
        return 0
    print(f"{len(changes)} changes:")
    for line in changes:
        print(f"  {line}")
    if ask and not _confirmed(inventory):
        print("script/deploy: not confirmed, nothing changed", file=sys.stderr)
        return EXIT_USAGE
    done = subprocess.run([*PYINFRA, "-y", *target], env=_environment(), check=False)
    return EXIT_FAILED if done.returncode else 0


def _named(limit: str | None, hosts: list[str]) -> str:
    return f"{limit} is" if limit else f"{' and '.join(hosts)} are each"


def look(target: list[str]) -> dict[str, Any] | None:
    """pyinfra's plan for `target`, changing nothing; None after it failed and said why."""
    done = subprocess.run(
        [*PYINFRA, "--dry", "--json", *target],
        capture_output=True,
        text=True,
        env=_environment(),
        check=False,
    )
    start = done.stdout.find("{")
    if done.returncode != 0 or start < 0:
        print("script/deploy: looking failed, nothing changed; pyinfra says:", file=sys.stderr)
        for line in (done.stderr.strip() or done.stdout.strip()).splitlines():
            print(f"  {line}", file=sys.stderr)
        return None
    plan: dict[str, Any] = json.loads(done.stdout[start:])
    return plan


def planned_changes(plan: dict[str, Any]) -> list[str]:
    """One line for each operation that would change a host; conditional ones do not count."""
    return [
        f"{', '.join(sorted(entry['hosts_with_change']))}: {entry['name']}"
        for entry in plan["plan"]
        if entry["hosts_with_change"]
    ]


def _confirmed(inventory: str) -> bool:
    if not sys.stdin.isatty():
        print("script/deploy: no terminal to ask on; say --yes", file=sys.stderr)
        return False
    try:
        answer = input(f"change the hosts of {inventory}? [y/N] ")
    except EOFError:
        return False
    return answer.strip().lower() in ("y", "yes")


def _environment() -> dict[str, str]:
    environment = dict(os.environ)
    if not sys.stderr.isatty():
        environment["PYINFRA_PROGRESS"] = "off"
    return environment
