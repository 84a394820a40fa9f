"""Command line of `ckpt`.

Exit codes: 0 good, or done; 1 the checkpoint or its source is wrong, or the request is refused;
2 it could not be tried: usage, no such folder, not reachable, no space, no permission; 130
interrupted.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

from hostlib.errors import EXIT_OK, EXIT_UNABLE, HostError

from checkpoint import census, manifest, report, verify
from checkpoint.adopt import adopt
from checkpoint.against import check_trunk
from checkpoint.assemble import Order, assemble
from checkpoint.collect import collect
from checkpoint.fetch import Place, fetch_checkpoint, status
from checkpoint.manifest import Manifest
from checkpoint.strict import as_sha256, read_small


def main(arguments: list[str] | None = None) -> int:
    """Run one command and return the exit code; raises HostError for what the user can cure."""
    options = _parser().parse_args(arguments)
    os.umask(0o022)  # Ubuntu gives a service user 002: nobody else may write what the engine reads
    code: int = options.run(options)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ckpt",
        description="Fetch, assemble, adopt, count and verify the engine's checkpoint.",
        epilog="exit codes: 0 good or done, 1 wrong or refused, 2 could not be tried",
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    fetch = commands.add_parser("fetch", help="install a checkpoint or parent from elsewhere")
    fetch.add_argument("source", metavar="SOURCE", nargs="?",
                       help="http(s)://…, ssh://host/folder or a folder")  # fmt: skip
    _add_place(fetch)
    fetch.add_argument("--manifest", type=Path, metavar="FILE",
                       help="its manifest; default: manifest.json at SOURCE")  # fmt: skip
    fetch.set_defaults(run=_fetch)

    take = commands.add_parser("adopt", help="take in a checkpoint or parent that stands here")
    take.add_argument("folder", type=Path, metavar="DIR", help="becomes a symlink to it")
    take.add_argument("--root", type=Path, help="folder of all; default: `checkpoints` beside DIR")
    take.set_defaults(run=_adopt)

    clear = commands.add_parser("collect", help="remove those that neither link nor release names")
    clear.add_argument("--root", required=True, type=Path, help="folder of all checkpoints")
    clear.add_argument("--link", required=True, type=Path, help="symlink to the wanted one")
    clear.add_argument("--releases", type=Path, help="folder of releases, all of them kept")
    clear.add_argument("--keep", type=Path, nargs="+", default=[], metavar="PATH")
    clear.set_defaults(run=_collect)

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
    parser.add_argument("--link", type=Path, help="symlink to the wanted one; a parent has none")


def _sha256(options: argparse.Namespace, name: str) -> str:
    try:
        return as_sha256(getattr(options, name), f"--{name.replace('_', '-')}")
    except HostError as error:
        raise HostError(error.message, exit_code=EXIT_UNABLE) from None


def _place(options: argparse.Namespace) -> Place:
    link = options.link.absolute() if options.link else None
    return Place(options.root.absolute(), link, _sha256(options, "manifest_sha256"))


def _fetch(options: argparse.Namespace) -> int:
    place = _place(options)
    listed: Manifest | None = None
    if options.manifest:
        raw = read_small(options.manifest)
        listed = manifest.parse_locked(raw, str(options.manifest), place.manifest_sha256)
    changed = fetch_checkpoint(options.source, place, listed)
    linked = f"; {place.link} points to it" if place.link else ""
    print(f"{place.folder}: {'installed' if changed else 'unchanged'}{linked}")
    return EXIT_OK


def _adopt(options: argparse.Namespace) -> int:
    folder = options.folder.absolute()
    listed = adopt(folder, (options.root or folder.parent / "checkpoints").absolute())
    print(f"{folder}: adopted, now a symlink to {folder.readlink()}")
    print(f"commit {folder / manifest.MANIFEST} (sha256 {listed.sha256}) with the lock")
    return EXIT_OK


def _collect(options: argparse.Namespace) -> int:
    keep = [path.absolute() for path in options.keep]
    told = collect(options.root.absolute(), options.link.absolute(), options.releases, keep)
    print("\n".join(told))
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
        print(json.dumps(report.as_json(found, wanted, difference)))
    else:
        print(report.table(found, wanted))
    if difference:
        raise HostError(
            f"{options.folder}: the tensors are not those that config.json asks for",
            *difference.lines(),
        )
    if not options.json:
        print(f"{options.folder}: {report.total(wanted)}, as config.json asks for")
    return EXIT_OK


def _status(options: argparse.Namespace) -> int:
    print(json.dumps(status(_place(options))))
    return EXIT_OK
