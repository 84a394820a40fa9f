"""script/lab: bring up, look at, and break two throw-away hosts.

Exit codes: 0 done; 1 failed; 2 wrong usage; 3 no root; 4 no network; 5 no space; 6 apt locked;
7 port in use; 8 a stale lab that cannot be removed.
"""

from __future__ import annotations

import argparse
import errno
import os
import signal
import subprocess
import sys

from hostlib.errors import HostError

from lab import control, places
from lab.errors import EXIT_FAILED, EXIT_NO_SPACE, EXIT_STALE_LAB, LabError
from lab.places import HOSTS, Lab


def main() -> int:
    """Parse the command line and obey it; every error a person can cause is one line."""
    parser = argparse.ArgumentParser(prog="script/lab", description=__doc__, allow_abbrev=False)
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    up = verbs.add_parser("up", help="bring both hosts up (or start those that are off)")
    up.add_argument("--watch", type=int, metavar="PID", help="go down when this process ends")
    verbs.add_parser("status", help="say what runs and where it listens")
    verbs.add_parser("down", help="end the lab and remove all that it made, also after a crash")
    ssh = verbs.add_parser("ssh", help="a shell on a host, or one command there")
    ssh.add_argument("host", choices=HOSTS)
    ssh.add_argument("command", nargs=argparse.REMAINDER)
    for verb, text in (
        ("start", "start a host that is off"),
        ("reboot", "reboot a host from inside"),
        ("poweroff", "shut a host down in order"),
        ("cut", "cut a host's power"),
        ("reset", "give a host a pristine disk"),
    ):
        verbs.add_parser(verb, help=text).add_argument("host", choices=HOSTS)
    arguments = parser.parse_args()
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        return _obey(arguments)
    except subprocess.SubprocessError as error:
        print(f"script/lab: {error}; look at the logs in {places.RUN}", file=sys.stderr)
        return EXIT_FAILED
    except LabError as error:
        print(f"script/lab: {error.message}", file=sys.stderr)
        for line in error.details:
            print(f"  {line}", file=sys.stderr)
        return error.exit_code
    except HostError as error:
        print(f"script/lab: {error.message}", file=sys.stderr)
        return EXIT_FAILED
    except OSError as error:
        print(f"script/lab: {error.filename or 'the lab'}: {error.strerror}", file=sys.stderr)
        return EXIT_NO_SPACE if error.errno == errno.ENOSPC else EXIT_FAILED
    except KeyboardInterrupt:
        print("script/lab: interrupted; `script/lab down` removes what is left", file=sys.stderr)
        return 130


def _obey(arguments: argparse.Namespace) -> int:
    name = places.lab_name()
    if arguments.verb == "up":
        _describe(control.up(name, arguments.watch))
        return 0
    if arguments.verb == "down":
        print(f"lab {name}: {'gone' if control.down(name) else 'was not there'}")
        return 0
    lab = places.load(name)
    if lab is None or not lab.ready:
        raise LabError(
            f"lab {name}: is not up; `script/lab up` starts it, `script/deploy` fills it too",
            exit_code=EXIT_STALE_LAB if places.folder(name).exists() else 1,
        )
    if arguments.verb == "status":
        _describe(lab)
    elif arguments.verb == "ssh":
        os.execvp("ssh", ["ssh", "-F", str(lab.ssh_config), arguments.host, *arguments.command])
    else:
        control.change(lab, arguments.verb, arguments.host)
        print(f"{arguments.host}: {arguments.verb} done")
    return 0


def _describe(lab: Lab) -> None:
    for host, running in control.status(lab).items():
        port = lab.ports[f"ssh-{host}"]
        state = "up" if running else "off"
        print(f"{host:5} {state:4} {HOSTS[host].address}  ssh on 127.0.0.1:{port}")
    print(f"engine  127.0.0.1:{lab.ports['engine']}   gateway 127.0.0.1:{lab.ports['gateway']}")
    print(f"ssh_config {lab.ssh_config}   gateway key in {lab.gateway_key}")


if __name__ == "__main__":
    sys.exit(main())
