"""How a finished checkpoint takes its place: what is there is looked at first, and never lost."""

from __future__ import annotations

import os
from pathlib import Path

from hostlib.adoption import replace_dir
from hostlib.atomic import publish_dir
from hostlib.errors import EXIT_UNABLE, HostError

from checkpoint import manifest, verify
from checkpoint.manifest import Manifest


def check_places(root: Path, link: Path | None) -> None:
    """Raise HostError unless checkpoints may stand below `root`, and a symlink at `link`."""
    if link is not None and link == root:
        raise HostError(
            f"{link}: is the folder of all checkpoints; choose another place for the link or --root"
        )
    if link is not None and link.exists() and not link.is_symlink():
        raise HostError(
            f"{link}: a checkpoint or file of its own stands here, not a symlink; take it in with"
            " ckpt adopt, or move it away, then run again"
        )
    for parent in {root.parent, (link or root).parent} - {root}:
        if not parent.is_dir():
            raise HostError(
                f"{parent}: no such folder; mount the data disk or create it, then run again",
                exit_code=EXIT_UNABLE,
            )


def check_replaceable(folder: Path, listed: Manifest) -> None:
    """Raise HostError unless all that lies in `folder` is of this checkpoint: nothing is lost."""
    if not os.path.lexists(folder) or (folder.is_symlink() and not folder.exists()):
        return
    if folder.is_symlink() or not folder.is_dir():
        raise HostError(f"{folder}: is no folder of its own; move it away, then run again")
    try:
        standing = manifest.read(folder).sha256
    except HostError:
        standing = listed.sha256  # damaged or gone: written anew
    if standing != listed.sha256:
        raise other_manifest(folder)
    verify.check_strangers(folder, listed)


def other_manifest(folder: Path) -> HostError:
    """The error of a folder whose name is the beginning of another manifest's digest."""
    return HostError(f"{folder}: holds another manifest; move the folder away, then run again")


def put_in_place(staging: Path, folder: Path) -> None:
    """Rename the proved `staging` to `folder`, or swap it with the damaged checkpoint there.

    In the second case the damaged one lies at `staging` then: there is never none at `folder`.

    Raises:
        HostError: the file system cannot swap two names; nothing was changed.
    """
    if not folder.exists():
        publish_dir(staging, folder)
        return
    replace_dir(staging, folder)
