"""script/lab behind its command line: obeys it, and says in one line what cannot be done."""

from __future__ import annotations

import argparse
import errno
import os
import signal
import subprocess
import sys

from hostlib.errors import HostError

from lab import control, places
from lab.arguments import parser
from lab.errors import LabError
from lab.places import HOSTS, Lab
from stack.exits import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_NO_SPACE, EXIT_USAGE


def main() -> int:
    """Parse the command line and obey it; every error a person can cause is one line."""
    arguments = parser().parse_args()
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
        return EXIT_INTERRUPTED


def _obey(arguments: argparse.Namespace) -> int:
    name = places.lab_name()
    if arguments.verb == "up":
        _describe(control.up(name, arguments.watch))
        return 0
    if arguments.verb == "down":
        print(f"lab {name}: {'gone' if control.down(name) else 'was not there'}")
        return 0
    lab = places.load_ready(arguments.verb)
    if arguments.verb != "status" and arguments.host not in HOSTS:
        raise LabError(
            f"{arguments.host}: no host of the lab; there are {' and '.join(HOSTS)}",
            exit_code=EXIT_USAGE,
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
