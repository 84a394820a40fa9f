"""`cuda-install`: its commands, and what they print."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from pathlib import Path

from hostlib.errors import EXIT_OK, interrupt_on_sigterm, run_main

from cuda_toolkit.install import LOCK_WAIT_S, alone, install, state
from cuda_toolkit.spec import SPEC_FILE, TREE, load_expected, load_spec


def run(argv: list[str] | None = None) -> int:
    """`cuda-install`: exit code 0 done, 1 refused or failed, 2 could not run."""
    options = _parser().parse_args(argv)
    os.umask(0o022)  # others may look at the tree and prove it
    command: Callable[[argparse.Namespace], None] = options.run
    command(options)
    return EXIT_OK


def main() -> int:
    """The program, with errors as one line."""
    interrupt_on_sigterm()
    return run_main("cuda-install", run)


def _install(options: argparse.Namespace) -> None:
    spec = load_spec(options.spec)
    print(install(spec, options.root, options.link, options.lock_wait))


def _status(options: argparse.Namespace) -> None:
    print(json.dumps(state(load_spec(options.spec), options.root, options.link)))


def _adopt(options: argparse.Namespace) -> None:
    from cuda_toolkit.adopt import adopt, check, is_adopted

    expected = load_expected(options.spec)
    if is_adopted(options.root, options.link):
        print(f"already adopted or installed: {options.link.readlink()}")
        return
    check(options.root, options.link)
    with alone(options.root, options.lock_wait):
        print(f"adopted and proved: {adopt(expected, options.root, options.link)}")


def _census(options: argparse.Namespace) -> None:
    from cuda_toolkit.census import check

    print(check(options.prefix.resolve(), options.deep))


def _collect(options: argparse.Namespace) -> None:
    from hostlib.collection import check_places, removable, remove, wanted_by

    check_places(options.root, options.link)
    releases = wanted_by(options.releases, options.keep)
    with alone(options.root, options.lock_wait):
        trees = [tree for tree in options.root.glob(f"{TREE}*") if (tree / SPEC_FILE).is_file()]
        print("\n".join(remove(removable(trees, options.link, releases, options.keep))))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="cuda-install",
        description="Install a CUDA toolkit without root: checked, proved, published by a rename.",
        epilog="exit codes: 0 done, 1 refused (nothing changed), 2 could not run",
    )
    commands = parser.add_subparsers(dest="command", required=True)

    def add(
        name: str, run: Callable[[argparse.Namespace], None], text: str, *groups: str
    ) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text)
        command.set_defaults(run=run)
        if "spec" in groups:
            command.add_argument("--spec", type=Path, required=True, help="specification (JSON)")
        if "place" in groups:
            command.add_argument(
                "--root", type=_absolute, required=True, help="folder of the trees"
            )
            command.add_argument("--link", type=_absolute, required=True, help="symlink for people")
        if "lock" in groups:
            command.add_argument(
                "--lock-wait", type=_seconds, default=LOCK_WAIT_S, metavar="SECONDS",
                help="how long to wait for another installer (default: %(default).0f)",
            )  # fmt: skip
        return command

    add(
        "install", _install, "install the toolkit, or do nothing when it stands",
        "spec", "place", "lock",
    )  # fmt: skip
    add("status", _status, "print one line of JSON about what stands", "spec", "place")
    add(
        "adopt", _adopt, "prove the tree that stands at --link and take it in as it is",
        "spec", "place", "lock",
    )  # fmt: skip
    command = add("census", _census, "hold an installed tree against its census")
    command.add_argument("prefix", type=Path, help="the tree, or a link to it")
    command.add_argument("--deep", action="store_true", help="read every file, not sizes alone")
    command = add(
        "collect", _collect, "remove the trees that neither the link nor a release names",
        "place", "lock",
    )  # fmt: skip
    command.add_argument("--releases", type=_absolute, help="folder of releases, all of them kept")
    command.add_argument(
        "--keep", type=_absolute, nargs="+", default=[], metavar="PATH", help="trees that stay"
    )
    return parser


def _absolute(text: str) -> Path:
    return Path(text).absolute()


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 <= seconds < float("inf"):
        raise ValueError
    return seconds
