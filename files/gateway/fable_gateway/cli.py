"""The commands of fable_gateway.py."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from fable_gateway import config, keyfile, keys_cli
from fable_gateway.errors import EXIT_OK

DEFAULT_CONFIG = Path("/etc/fable-gateway/config.json")
EXIT_CODES = """\
exit codes:
  0    done; for serve: stopped by SIGTERM or SIGINT
  1    refused: the config, a key or an argument is wrong
  2    unable: a file cannot be read or written, the address is taken, the command line is wrong
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
    if chosen.command == "keys":
        return keys_cli.run(chosen)
    return _check(chosen.config, chosen.keys)


def _check(config_file: Path | None, keys_file: Path | None) -> int:
    if config_file is None and keys_file is None:
        config_file, keys_file = DEFAULT_CONFIG, keyfile.DEFAULT
    if config_file is not None:
        found = config.load(config_file)
        print(
            f"{config_file}: valid; {found.host}:{found.port} to {found.upstream}, "
            f"{found.max_in_flight} in flight"
        )
    if keys_file is not None:
        print(f"{keys_file}: valid; {len(keyfile.load(keys_file).keys)} keys")
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
    text = "listen and serve until SIGTERM; the key file is followed, SIGHUP reads it at once"
    serve = commands.add_parser("serve", help=text, description=text, allow_abbrev=False)
    serve.add_argument("--config", type=Path, default=DEFAULT_CONFIG, metavar="FILE")
    text = "say whether a config and a key file are valid; without arguments the installed ones"
    check = commands.add_parser("check", help=text, description=text, allow_abbrev=False)
    check.add_argument("--config", type=Path, metavar="FILE")
    check.add_argument("--keys", type=Path, metavar="FILE")
    text = "make, list, take away, replace and take over keys"
    keys = commands.add_parser("keys", help=text, description=text, allow_abbrev=False)
    keys_cli.add_parser(keys)
    return parser
