"""A venv from a hash lock, for whichever role needs one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePosixPath

from stack.operations.programs import installed


def built_venv(
    name: str,
    tools: PurePosixPath,
    requirements: str,
    python: str,
    root: PurePosixPath,
    modules: Sequence[str],
    user: str,
    link: PurePosixPath | None = None,
) -> None:
    """Have `venv-build` make the venv of a hash lock, unless it stands.

    Args:
        name: of the operation.
        tools: folder of the service user's programs.
        requirements: path of the hash lock on the host, in a file named as the venv.
        python: the interpreter's name.
        root: folder of all venvs.
        modules: whose import proves it.
        user: who builds and owns it.
        link: symlink that shall point to it.
    """
    tool = str(tools / "bin" / "venv-build")
    arguments = [
        "--requirements", requirements, "--python", python, "--root", str(root),
        *(["--link", str(link)] if link else []),
    ]  # fmt: skip
    imports = [part for module in modules for part in ("--import", module)]
    installed(
        name=name,
        status=[tool, "status", *arguments],
        install=[tool, "build", *arguments, *imports],
        user=user,
    )
