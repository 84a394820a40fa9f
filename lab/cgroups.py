"""The lab's cgroup folders: one a host, named after the lab, so that a crash leaves nothing.

Run as a program inside a mount namespace of its own it removes what a dead lab left:
`unshare --mount python -m lab.cgroups NAME`.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from lab.places import HOSTS

ROOT = Path("/sys/fs/cgroup")


def view() -> None:
    """A pure cgroup v2 view in this mount namespace; a machine on v2 has it already (EBUSY)."""
    subprocess.run(
        ["mount", "-t", "cgroup2", "cgroup2", str(ROOT)], capture_output=True, check=False
    )


def host_cgroup(lab: str, host: str) -> Path:
    """The cgroup of one host."""
    return ROOT / f"fable-lab-{lab}-{host}"


def remove(lab: str) -> bool:
    """Remove the empty cgroups of lab `lab`; True when none is left."""
    deadline = time.monotonic() + 5
    while True:
        roots = [host_cgroup(lab, host) for host in HOSTS if host_cgroup(lab, host).exists()]
        for root in roots:
            for folder in [*sorted((p for p in root.rglob("*") if p.is_dir()), reverse=True), root]:
                try:
                    folder.rmdir()
                except OSError:
                    break
        if not any(root.exists() for root in roots):
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)


if __name__ == "__main__":
    view()
    sys.exit(0 if remove(sys.argv[1]) else 1)
