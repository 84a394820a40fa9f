"""Lay down a role's files as a whole, and run the programs in files/ when something differs."""

from __future__ import annotations

import json
import shlex
from collections.abc import Generator, Sequence

from pyinfra import host
from pyinfra.api import Host, State, StringCommand, operation
from pyinfra.api.arguments import ConnectorArguments
from pyinfra.connectors.util import CommandOutput

from stack.errors import StackError
from stack.facts.programs import MANAGED_FILES, ManagedFilesDifference, ProgramStatus
from stack.managed import Entry
from stack.places import ENGINECTL


class LiveCommand(StringCommand):
    """A command whose output is shown while it comes: long steps must show their progress."""

    def __init__(self, argv: Sequence[str], user: str) -> None:
        super().__init__(shlex.join(argv), _sudo=True, _sudo_user=user)

    def execute(
        self, state: State, host: Host, connector_arguments: ConnectorArguments
    ) -> tuple[bool, CommandOutput]:
        """Run it; the output has been shown already, so none is handed back to be shown again."""
        connector_arguments.update(self.connector_arguments)
        done, _ = host.run_shell_command(
            self, print_output=True, print_input=state.print_input, **connector_arguments
        )
        return done, CommandOutput([])


@operation()
def managed_files(entries: list[Entry], user: str) -> Generator[StringCommand, None, None]:
    """Bring all `entries` of a role to their state: one remote command to ask, one to change.

    Args:
        entries: what is laid down.
        user: who lays it down; root must not write where another user can put links.

    Raises:
        StackError: a file made by hand stands in the way; nothing was changed.
    """
    expectations = json.dumps([entry.expectation() for entry in entries])
    found = host.get_fact(ManagedFilesDifference, expectations=expectations, user=user)
    if found["refused"]:
        raise StackError(f"{host.name}: {found['refused'][0]}")
    if not found["differs"]:
        host.noop(f"{len(entries)} files, folders and links are as they should be")
        return
    orders = json.dumps([entry.order() for entry in entries])
    yield StringCommand(
        shlex.join(["python3", "-I", "-c", MANAGED_FILES, "apply"]),
        _stdin=[orders],
        _sudo=True,
        _sudo_user=user,
    )


@operation()
def installed(
    status: Sequence[str],
    install: Sequence[str],
    user: str,
    before: Sequence[Sequence[str]] = (),
) -> Generator[StringCommand, None, None]:
    """Run `install` unless `status` says that all of it stands; all as `user`.

    Args:
        status: argv of a program that prints a JSON object of flags, among them "installed".
        install: argv that makes it so; safe to run again.
        user: the user that runs all.
        before: argvs that `install` needs done first; safe to run again, too.
    """
    found = host.get_fact(ProgramStatus, argv=list(status), user=user)
    flags = {key: value for key, value in found.items() if isinstance(value, bool)}
    if flags.get("installed") and all(flags.values()):
        host.noop(f"{status[0]}: stands")
        return
    for argv in (*before, install):
        yield LiveCommand(argv, user)


@operation()
def committed_release(release: str, reason: str) -> Generator[StringCommand, None, None]:
    """Ask enginectl for `release`: it switches, proves and commits, or rolls back by itself."""
    status = [str(ENGINECTL), "status", "--json"]
    found = host.get_fact(ProgramStatus, argv=status, user="root")
    if found.get("committed") == release and found.get("serving"):
        host.noop(f"release {release} is committed and serving")
        return
    yield LiveCommand([str(ENGINECTL), "switch", release, "--reason", reason], "root")
