"""Run a program whose children's uptime starts at 0, as on a real machine that boots.

`python -m lab.fresh_clock COMMAND…` replaces itself by COMMAND in a new time namespace
(time_namespaces(7)). util-linux's `unshare --boottime` does the same, but refuses every negative
offset in version 2.39, which is Ubuntu 24.04's.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from pathlib import Path

CLONE_NEWTIME = 0x80  # linux/sched.h; os.unshare is there from Python 3.12 on


def main() -> None:
    """Make the namespace, set its clock back by the machine's uptime, and run the command."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWTIME) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error), "time namespace")
    uptime = int(time.clock_gettime(time.CLOCK_BOOTTIME))
    # must be written before the first process enters the namespace: the exec below, or its children
    Path("/proc/self/timens_offsets").write_text(f"boottime -{uptime} 0\n")
    os.execvp(sys.argv[1], sys.argv[1:])


if __name__ == "__main__":
    main()
