"""venv-build: make or look at the venv of a lock.

Exit codes: 0 done; 1 refused or failed, nothing was installed; 2 could not run.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

from hostlib.errors import run_main

from venv_build import build as venvs


def main() -> int:
    """Parse the command line and obey it."""
    os.umask(0o022)  # Ubuntu gives a service user 002: nobody else may write what the engine runs
    parser = argparse.ArgumentParser(
        prog="venv-build", description=__doc__, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("verb", choices=("build", "status"))
    parser.add_argument("--requirements", type=Path, required=True, help="hash lock")
    parser.add_argument("--python", required=True, help="interpreter, such as python3.12")
    parser.add_argument("--root", type=Path, required=True, help="folder of all venvs")
    parser.add_argument("--link", type=Path, help="symlink that leads to it")
    parser.add_argument("--import", dest="imports", action="append", default=[], metavar="MODULE")
    arguments = parser.parse_args()

    def obey() -> int:
        requirements = arguments.requirements.read_text()
        if arguments.verb == "status":
            found = venvs.status(requirements, arguments.python, arguments.root, arguments.link)
            print(json.dumps(found))
        else:
            path = venvs.build(
                requirements, arguments.python, arguments.root, arguments.link, arguments.imports
            )
            print(f"venv: {path}")
        return 0

    return run_main("venv-build", obey)
