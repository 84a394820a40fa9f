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
from checkpoint.against import check_trunk
from checkpoint.assemble import Order, assemble
from checkpoint.census import Census, Difference
from checkpoint.fetch import Place, fetch_checkpoint, status
from checkpoint.strict import NAMED_AT_MOST, as_sha256

GROUP_LABELS = {"mtp": "MTP", "input_scale": "input scales"}


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
    check.add_argument("--against", type=Path, metavar="PARENT",
                       help="compare the trunk's bytes with those of a parent")  # fmt: skip
    check.set_defaults(run=_verify)

    tell = commands.add_parser("census", help="count tensors against what config.json asks for")
    tell.add_argument("folder", type=Path)
    tell.add_argument("--json", action="store_true", help="one line of JSON")
    tell.set_defaults(run=_census)

    build = commands.add_parser("assemble", help="put a checkpoint together from its parents")
    build.add_argument("--trunk", required=True, type=Path, help="folder of the own fine-tune")
    build.add_argument("--base", required=True, type=Path, help="folder of the published base")
    build.add_argument("--out", "--link", dest="link", required=True, type=Path,
                       help="symlink to the result")  # fmt: skip
    build.add_argument("--root", type=Path, help="folder of all; default: `checkpoints` beside OUT")
    for role in ("manifest", "trunk-manifest", "base-manifest"):
        build.add_argument(f"--{role}-sha256", help="refuse another one than this")
    build.set_defaults(run=_assemble)

    state = commands.add_parser("status", help="one line of JSON: is it installed and linked?")
    _add_place(state)
    state.set_defaults(run=_status)
    return parser


def _add_place(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--manifest-sha256", required=True, help="digest of manifest.json")
    parser.add_argument("--root", required=True, type=Path, help="folder of all checkpoints")
    parser.add_argument("--link", required=True, type=Path, help="symlink to the wanted one")


def _sha256(options: argparse.Namespace, name: str) -> str:
    try:
        return as_sha256(getattr(options, name), f"--{name.replace('_', '-')}")
    except HostError as error:
        raise HostError(error.message, exit_code=EXIT_UNABLE) from None


def _place(options: argparse.Namespace) -> Place:
    digest = _sha256(options, "manifest_sha256")
    return Place(options.root.absolute(), options.link.absolute(), digest)


def _fetch(options: argparse.Namespace) -> int:
    place = _place(options)
    changed = fetch_checkpoint(options.source, place)
    print(f"{place.folder}: {'installed' if changed else 'unchanged'}; {place.link} points to it")
    return EXIT_OK


def _assemble(options: argparse.Namespace) -> int:
    wanted = {
        name: _sha256(options, name) if getattr(options, name) is not None else None
        for name in ("manifest_sha256", "trunk_manifest_sha256", "base_manifest_sha256")
    }
    link = options.link.absolute()
    root = (options.root or link.parent / "checkpoints").absolute()
    order = Order(options.trunk.absolute(), options.base.absolute(), root, link, *wanted.values())
    listed = assemble(order)
    print(f"{link}: {len(listed.files)} files, manifest sha256 {listed.sha256}")
    return EXIT_OK


def _verify(options: argparse.Namespace) -> int:
    listed = (verify.deep if options.deep else verify.quick)(options.folder)
    how = "every digest" if options.deep else "stamp, sizes and headers"
    if options.against:
        count = check_trunk(options.folder, options.against)
        how += f", {count} tensors as in {options.against}"
    print(f"{options.folder}: good ({len(listed.files)} files, {how})")
    return EXIT_OK


def _census(options: argparse.Namespace) -> int:
    verify.require_folder(options.folder)
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
    if not options.json:
        parts = " + ".join(
            f"{count:,} {GROUP_LABELS.get(group, group)}"
            for group, count in wanted.groups.items()
            if count
        )
        print(f"{options.folder}: {wanted.tensors:,} = {parts}, as config.json asks for")
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
