"""The commands of fable_gateway.py."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from fable_gateway import config, keys
from fable_gateway.errors import EXIT_OK, GatewayError

EXIT_CODES = """\
exit codes:
  0    done; for serve: stopped by SIGTERM or SIGINT
  1    refused: the config or an argument is wrong
  2    unable: a file cannot be read, the address is taken, the command line is wrong
  130  interrupted
"""


def main(arguments: Sequence[str]) -> int:
    """Run one command.

    Raises:
        GatewayError: one line for the operator, with its exit code.
    """
    chosen = _parser().parse_args(arguments)
    if chosen.command == "serve":
        from fable_gateway.service import serve

        return serve(chosen.config)
    if chosen.command == "check":
        return _check(chosen.config)
    return _new_key(chosen.name)


def _check(path: Path) -> int:
    found = config.load(path)
    print(
        f"{path}: valid; {found.host}:{found.port} to {found.upstream}, "
        f"{len(found.keys.digests)} keys, {found.max_in_flight} in flight"
    )
    return EXIT_OK


def _new_key(name: str) -> int:
    if not keys.NAME.fullmatch(name):
        raise GatewayError(
            f"{name!r}: no name for a key; use letters, digits, '.', '_' and '-', at most 64"
        )
    key = keys.new_key()
    print(f"key, shown only now:  {key}")
    print(f"line for the settings:  {keys.settings_line(name, key)}")
    return EXIT_OK


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fable_gateway.py",
        description="The gateway between the users and the engine.",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in (
        ("serve", "listen and serve until SIGTERM; SIGHUP reloads the keys"),
        ("check", "say whether a config is valid"),
    ):
        command = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        command.add_argument("--config", type=Path, required=True, metavar="FILE")
    keys_parser = commands.add_parser("keys", help="make keys", allow_abbrev=False)
    actions = keys_parser.add_subparsers(dest="action", required=True)
    new = actions.add_parser("new", help="make a key and show it once", allow_abbrev=False)
    new.add_argument("name", metavar="NAME")
    return parser
