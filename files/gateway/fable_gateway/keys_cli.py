"""`fable_gateway.py keys`: make, list, take away, replace and take over keys in the key file."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from hostlib.atomic import locked, write_file
from hostlib.errors import HostError

from fable_gateway import checked, keyfile, keys
from fable_gateway.checked import Wrong
from fable_gateway.errors import EXIT_OK, EXIT_UNABLE, GatewayError
from fable_gateway.keys import Key

LOCK_WAIT_S = 30.0
MODE = 0o600
IMPORTED_LINE = re.compile(rf"({keys.NAME.pattern})\s*[=:\s]\s*[\"']?([^\s\"']+)[\"']?,?")


def add_parser(parser: argparse.ArgumentParser) -> None:
    """Add the actions and their arguments to the parser of `keys`."""
    actions = parser.add_subparsers(dest="action", required=True)
    for action, argument, text in (
        ("add", "NAME", "make a key and show it once"),
        ("list", "", "names, limits and the begin of each sha256"),
        ("revoke", "NAME", "take a key away"),
        ("rotate", "NAME", "replace a key by a new one with the same limits; shown once"),
        ("import", "SOURCE", "take over keys in use: a file ('-': standard input) with a JSON "
         "object NAME: KEY, or lines of NAME and KEY; only their sha256 is kept"),
    ):  # fmt: skip
        command = actions.add_parser(action, help=text, description=text, allow_abbrev=False)
        command.add_argument("--file", type=Path, default=keyfile.DEFAULT, metavar="FILE")
        if argument:
            command.add_argument(argument.lower(), metavar=argument)
        if action == "add":
            _add_limits(command)


def _add_limits(command: argparse.ArgumentParser) -> None:
    text = "the day from whose start (UTC) it is refused, as 2027-01-31"
    command.add_argument("--expires", metavar="DATE", help=text)
    text = "a model that it may ask for, again for more; default: all"
    command.add_argument("--model", metavar="MODEL", action="append", help=text)
    text = "its requests inside the engine at the same time"
    command.add_argument("--max-in-flight", metavar="N", type=int, help=text)
    text = "in any 60 seconds"
    command.add_argument("--requests-per-minute", metavar="N", type=int, help=text)


def run(chosen: argparse.Namespace) -> int:
    """Carry out one action.

    Raises:
        GatewayError: refused (1) or unable (2); the file is as it was.
    """
    if chosen.action == "list":
        for key in keyfile.load(chosen.file).keys:
            print(_row(key))
        return EXIT_OK
    with _rewritten(chosen.file) as found:
        if chosen.action == "import":
            fresh = _imported(chosen.source, found)
        elif chosen.action == "revoke":
            _existing(found, chosen.name, chosen.file)
            del found[chosen.name]
            fresh = []
        else:
            made = keys.new_key()
            if chosen.action == "add":
                key = _new(chosen, keys.sha256(made))
                if key.name in found:
                    raise GatewayError(f"{key.name}: has a key already; rotate or revoke it")
            else:
                key = _existing(found, chosen.name, chosen.file)
                key = dataclasses.replace(key, sha256=keys.sha256(made))
            fresh = [key]
        found.update({key.name: key for key in fresh})
    if chosen.action in ("add", "rotate"):
        print(f"key, shown only now:  {made}")
    for key in fresh:
        print(f"line for the settings:  {key.settings_line()}")
    print(f'{chosen.file}: written; do the same in gateway["keys"] of the settings, or the next '
          "deploy undoes it")  # fmt: skip
    return EXIT_OK


@contextlib.contextmanager
def _rewritten(path: Path) -> Iterator[dict[str, Key]]:
    """The keys of `path`, to be changed; written back, checked, at the end of the block."""
    try:
        if path.parent.stat().st_uid != os.geteuid():
            raise GatewayError(
                f"{path.parent}: belongs to {path.parent.owner()}, who must run this, for the "
                f"gateway would not be let read a new file: sudo -u {path.parent.owner()} …",
                EXIT_UNABLE,
            )
        with locked(path.with_name(f".{path.name}.lock"), "keys", LOCK_WAIT_S):
            before = keyfile.load(path).keys if path.exists() else ()
            found = {key.name: key for key in before}
            yield found
            content = keyfile.text(found.values())
            keyfile.parse(content.encode(), str(path))
            write_file(path, content.encode(), MODE)
    except HostError as error:
        raise GatewayError(error.message, EXIT_UNABLE) from None
    except OSError as error:
        place = error.filename or path
        raise GatewayError(f"{place}: cannot be written ({error.strerror})", EXIT_UNABLE) from None


def _existing(found: dict[str, Key], name: str, path: Path) -> Key:
    if name not in found:
        raise GatewayError(f"{name}: has no key in {path}; `keys list` shows the names")
    return found[name]


def _new(chosen: argparse.Namespace, digest: str) -> Key:
    if not keys.NAME.fullmatch(chosen.name):
        raise GatewayError(
            f"{chosen.name!r}: no name for a key; use letters, digits, '.', '_' and '-', at most 64"
        )
    try:
        expires = None if chosen.expires is None else keyfile.day(chosen.expires)
    except Wrong as wrong:
        raise GatewayError(f"--expires {wrong}") from None
    models = tuple(chosen.model or ())
    return Key(
        chosen.name, digest, expires, models, chosen.max_in_flight, chosen.requests_per_minute
    )


def _imported(source: str, found: dict[str, Key]) -> list[Key]:
    """The keys in `source` that are not there yet. Errors never quote what may be a key."""
    place = "standard input" if source == "-" else source
    content = sys.stdin.buffer.read() if source == "-" else checked.read_file(Path(source))
    fresh: dict[str, Key] = {}
    for name, key in _pairs(content, place):
        digest = keys.sha256(key)
        if name in found and found[name].sha256 == digest:
            continue
        if name in found or name in fresh:
            raise GatewayError(f"{place}: {name}: has another key already; nothing imported")
        fresh[name] = Key(name, digest)
    return list(fresh.values())


def _pairs(content: bytes, place: str) -> Iterator[tuple[str, str]]:
    try:
        text = content.decode()
    except UnicodeDecodeError:
        raise GatewayError(f"{place}: is not UTF-8; nothing imported") from None
    if text.lstrip().startswith("{"):
        value = checked.parsed(content, place, lambda value: checked.mapping(value, "the keys"))
        for number, (name, key) in enumerate(value.items(), 1):
            if not keys.NAME.fullmatch(name) or not isinstance(key, str) or not key.strip():
                raise GatewayError(f"{place}: entry {number}: must be NAME: KEY; nothing imported")
            yield name, key
        return
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        pair = IMPORTED_LINE.fullmatch(line.strip())
        if not pair:
            raise GatewayError(f"{place}: line {number}: must be NAME KEY; nothing imported")
        yield pair[1], pair[2]


def _row(key: Key) -> str:
    limits = {name: value for name, value in key.settings().items() if name != "sha256"}
    shown = json.dumps(limits) if limits else ""
    return f"{key.name:20} sha256 {key.sha256[:8]}…  {shown}".rstrip()
