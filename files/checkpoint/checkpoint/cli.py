"""Command line of `ckpt`.

Exit codes: 0 good, or done; 1 the checkpoint or its source is wrong, or the request is refused;
2 it could not be tried: usage, no such folder, not reachable, no space, no permission; 130
interrupted.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from hostlib.errors import EXIT_OK, EXIT_UNABLE, HostError

from checkpoint import census, verify
from checkpoint.census import Census, Difference
from checkpoint.fetch import Place, fetch_checkpoint, status
from checkpoint.strict import NAMED_AT_MOST, as_sha256


def main(arguments: list[str] | None = None) -> int:
    """Run one command and return the exit code; raises HostError for what the user can cure."""
    options = _parser().parse_args(arguments)
    code: int = options.run(options)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ckpt",
        description="Fetch, count and verify the engine's checkpoint.",
        epilog="exit codes: 0 good or done, 1 wrong or refused, 2 could not be tried",
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    fetch = commands.add_parser("fetch", help="install a checkpoint from a URL or folder")
    fetch.add_argument("--source", required=True, help="URL or folder that holds manifest.json")
    _add_place(fetch)
    fetch.set_defaults(run=_fetch)

    check = commands.add_parser("verify", help="is the checkpoint in a folder whole?")
    check.add_argument("folder", type=Path)
    check.add_argument("--deep", action="store_true", help="hash every file, renew the stamp")
    check.set_defaults(run=_verify)

    tell = commands.add_parser("census", help="count tensors against what config.json asks for")
    tell.add_argument("folder", type=Path)
    tell.add_argument("--json", action="store_true", help="one line of JSON")
    tell.set_defaults(run=_census)

    state = commands.add_parser("status", help="one line of JSON: is it installed and linked?")
    _add_place(state)
    state.set_defaults(run=_status)
    return parser


def _add_place(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--manifest-sha256", required=True, help="digest of manifest.json")
    parser.add_argument("--root", required=True, type=Path, help="folder of all checkpoints")
    parser.add_argument("--link", required=True, type=Path, help="symlink to the wanted one")


def _place(options: argparse.Namespace) -> Place:
    try:
        digest = as_sha256(options.manifest_sha256, "--manifest-sha256")
    except HostError as error:
        raise HostError(error.message, exit_code=EXIT_UNABLE) from None
    return Place(options.root.absolute(), options.link.absolute(), digest)


def _fetch(options: argparse.Namespace) -> int:
    place = _place(options)
    changed = fetch_checkpoint(options.source, place)
    print(f"{place.folder}: {'installed' if changed else 'unchanged'}; {place.link} points to it")
    return EXIT_OK


def _verify(options: argparse.Namespace) -> int:
    listed = (verify.deep if options.deep else verify.quick)(options.folder)
    how = "every digest" if options.deep else "stamp, sizes and headers"
    print(f"{options.folder}: good ({len(listed.files)} files, {how})")
    return EXIT_OK


def _census(options: argparse.Namespace) -> int:
    if not options.folder.is_dir():
        raise HostError(f"{options.folder}: no such folder", exit_code=EXIT_UNABLE)
    expected = verify.expected_in(options.folder)
    tensors = verify.read_tensors(options.folder)
    found, wanted = census.count(tensors), census.count(expected)
    difference = census.compare(tensors, expected)
    if options.json:
        print(json.dumps(_as_json(found, wanted, difference)))
    else:
        _print_table(found, wanted)
    if difference:
        raise HostError(
            f"{options.folder}: the tensors are not those that config.json asks for",
            *difference.lines(),
        )
    return EXIT_OK


def _status(options: argparse.Namespace) -> int:
    print(json.dumps(status(_place(options))))
    return EXIT_OK


def _as_json(found: Census, expected: Census, difference: Difference) -> dict[str, object]:
    def named(names: list[str]) -> dict[str, object]:
        return {"count": len(names), "first": names[:NAMED_AT_MOST]}

    return {
        "found": found.as_json(),
        "expected": expected.as_json(),
        "missing": named(difference.missing),
        "extra": named(difference.extra),
        "differing": named(difference.differing),
    }


def _print_table(found: Census, expected: Census) -> None:
    rows = [("tensors", found.tensors, expected.tensors)]
    rows += [(group, found.groups[group], expected.groups[group]) for group in census.GROUPS]
    rows += [
        (dtype, found.dtypes.get(dtype, 0), expected.dtypes.get(dtype, 0))
        for dtype in sorted(found.dtypes.keys() | expected.dtypes)
    ]
    rows += [("bytes", found.bytes, expected.bytes)]
    print(f"{'':12} {'found':>15} {'expected':>15}")
    for label, have, want in rows:
        print(f"{label:12} {have:15,} {want:15,}{'' if have == want else '  differs'}")
