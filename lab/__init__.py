"""Two throw-away hosts with real systemd and sshd, and the stand-ins for what cannot be had.

Nothing in here is used by a production host.
"""

import stack  # noqa: F401  # makes the hosts' programs importable
