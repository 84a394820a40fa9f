"""Exit codes of the scripts, as docs/operations.md lists them. Standard library only."""

EXIT_FAILED = 1
EXIT_USAGE = 2  # also: not confirmed
EXIT_NO_ROOT = 3
EXIT_NO_NETWORK = 4
EXIT_NO_SPACE = 5
EXIT_APT_LOCKED = 6
EXIT_PORT_IN_USE = 7
EXIT_STALE_LAB = 8
EXIT_INTERRUPTED = 130
