"""The command line of `enginectl`."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from hostlib.errors import run_main

from enginectl import ask, commands, exits, releases


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code (see `exits`)."""
    arguments = _parser().parse_args(argv)
    return run_main("enginectl", lambda: int(arguments.command(arguments)))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="enginectl",
        description="Starts, switches and inspects the engine of this host.",
        epilog=exits.HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    verbs = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(
        name: str, run: Callable[[argparse.Namespace], int], words: str, *, rooted: bool = False
    ) -> argparse.ArgumentParser:
        one = verbs.add_parser(name, help=words, description=words, allow_abbrev=False)
        one.set_defaults(command=run, root=Path("/"))
        one.add_argument("--json", action="store_true", help="answer in JSON on standard output")
        # What runs as root on behalf of others takes no other folder.
        if rooted:
            one.add_argument("--root", type=Path, metavar="DIR", help="files below DIR, not /")
        return one

    def add_reason(one: argparse.ArgumentParser) -> None:
        one.add_argument("--reason", required=True, metavar="TEXT", help="why, for the history")

    def add_release(one: argparse.ArgumentParser, name: str = "name") -> None:
        one.add_argument(name, metavar=name.upper(), help="a release of this host")

    add("status", commands.run_status, "show what is committed, what runs and how", rooted=True)
    one = add("switch", ask.run_switch, "make NAME the running, committed release")
    add_release(one)
    add_reason(one)
    one.add_argument("--retry", action="store_true", help="also if it failed before")
    one = add("rollback", ask.run_rollback, "go back to the release before the committed one")
    add_reason(one)
    one.add_argument("--retry", action="store_true", help="also if that one failed before")
    one = add("gates", commands.run_gates, "judge the running start by the 11 gates", rooted=True)
    one.add_argument("--log", type=Path, metavar="FILE", help="judge this log; ask no server")
    one = add("prepare", commands.run_prepare, "say whether NAME could be switched to; only looks")
    add_release(one)
    one = add("drain", commands.run_drain, "let requests finish, stop the engine, keep it stopped")
    add_reason(one)
    one = add("settle", commands.run_settle, "have the committed release serve; ends a drain")
    one.add_argument("--restore", action="store_true", help="also replace a newer version's state")
    one.add_argument("--unattended", action="store_true", help="for the timer: respect a drain")
    add("releases", commands.run_releases, "list the releases of this host", rooted=True)
    one = add("diff", commands.run_diff, "say what changes from ONE to OTHER", rooted=True)
    add_release(one, "one")
    add_release(one, "other")
    one = add("history", commands.run_history, "show what happened, the latest last", rooted=True)
    one.add_argument("--number", type=_count, default=20, metavar="N", help="how many (20)")
    one = add("collect", commands.run_collect, "remove releases that nobody needs")
    one.add_argument(
        "--keep", type=_count, default=releases.KEPT, metavar="N",
        help=f"the latest N stay, besides those in use ({releases.KEPT})",
    )  # fmt: skip
    add("before-start", commands.run_before_start, "for the unit's ExecStartPre", rooted=True)
    add("launch", commands.run_launch, "become the engine (for the unit's ExecStart)", rooted=True)
    add("after-start", commands.run_after_start, "for the unit's ExecStartPost", rooted=True)
    return parser


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
    return number
