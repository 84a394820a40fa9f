"""The command line of script/lab. Standard library only: it is read before there is a .venv."""

from __future__ import annotations

import argparse

DESCRIPTION = """\
Bring up, look at, and break two throw-away hosts. FABLE_LAB=NAME makes every command speak of
another lab, with free ports; FABLE_LAB_CACHE moves the cache from /var/cache/fable-lab.
"""
EXIT_CODES = """\
exit codes: 0 done; 1 failed; 2 wrong usage; 3 no root; 4 no network; 5 no space; 6 apt locked;
7 port in use; 8 a stale lab that cannot be removed; of ssh: the command's own.
"""


def parser() -> argparse.ArgumentParser:
    """Verbs and hosts of script/lab."""
    made = argparse.ArgumentParser(
        prog="script/lab", description=DESCRIPTION, epilog=EXIT_CODES, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    verbs = made.add_subparsers(dest="verb", required=True, metavar="VERB")
    up = verbs.add_parser("up", help="bring both hosts up (or start those that are off)")
    up.add_argument("--watch", type=int, metavar="PID", help="go down when this process ends")
    verbs.add_parser("status", help="say what runs and where it listens")
    verbs.add_parser("down", help="end the lab and remove all that it made, also after a crash")
    ssh = verbs.add_parser(
        "ssh", help="a shell on a host, or one command there", usage="script/lab ssh HOST [COMMAND]"
    )
    ssh.add_argument("host", metavar="HOST", help="v100 or dgx")
    ssh.add_argument("command", nargs=argparse.REMAINDER, metavar="COMMAND")
    for verb, text in (
        ("start", "start a host that is off"),
        ("reboot", "reboot a host from inside"),
        ("poweroff", "shut a host down in order"),
        ("cut", "cut a host's power"),
        ("reset", "give a host a pristine disk"),
    ):
        verbs.add_parser(verb, help=text).add_argument("host", metavar="HOST", help="v100 or dgx")
    return made
