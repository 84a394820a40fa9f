"""The data disk of a host."""

from __future__ import annotations

from collections.abc import Generator

from pyinfra import host
from pyinfra.api import StringCommand, operation

from stack.errors import StackError
from stack.facts.programs import MountPoint


@operation()
def mounted(path: str) -> Generator[StringCommand, None, None]:
    """Refuse to go on unless `path` is a mount point.

    Without the disk everything would be written below it, out of sight once it is mounted.

    Raises:
        StackError: it is none; nothing was changed.
    """
    if not host.get_fact(MountPoint, path=path):
        raise StackError(
            f"{host.name}: {path} is not mounted, nothing changed; mount it (it belongs into "
            "/etc/fstab), then run again"
        )
    host.noop(f"{path} is mounted")
    yield from ()
