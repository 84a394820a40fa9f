#!/usr/bin/env python3
"""Starts the gateway: finds its package and its venv, and hands over.

Laid down by fable-stack: edits are lost with the next deploy.

Installed as ~/bin/fable_gateway.py, beside ~/fable-gateway with app/fable_gateway (the package),
tools/hostlib and venv. Any python3 may start it. `--place DIR` as the first argument names another
folder than ~/fable-gateway. Exit code 2 if the package or the venv is not there; all others are
documented by `fable_gateway.py --help`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

EXIT_UNABLE = 2


def main() -> int:
    """Run the command line inside the gateway's venv, isolated from the environment."""
    arguments = sys.argv[1:]
    place = Path(__file__).absolute().parent.parent / "fable-gateway"
    if arguments[:1] == ["--place"] and len(arguments) > 1:
        place = Path(arguments[1]).absolute()
        arguments = arguments[2:]
    app, python = place / "app", place / "venv" / "bin" / "python"
    for needed in (app / "fable_gateway" / "cli.py", python):
        if not needed.exists():
            print(f"fable_gateway: {needed}: is missing; deploy the gateway", file=sys.stderr)
            return EXIT_UNABLE
    inside = Path(sys.prefix).resolve() == (place / "venv").resolve()
    # Isolated also because this file, found beside itself, would shadow the package.
    if not (inside and sys.flags.isolated):
        command = [str(python), "-I", __file__, "--place", str(place), *arguments]
        os.execv(python, command)
    sys.path[:0] = [str(app), str(place / "tools")]
    from fable_gateway.cli import main as run
    from fable_gateway.errors import run_main

    return run_main(lambda: run(arguments))


if __name__ == "__main__":
    sys.exit(main())
