"""Times that more than one place must agree on: programs, units and settings read them here."""

from __future__ import annotations

# systemd's TimeoutStopSec of the engine's unit: then whatever is left is killed.
STOP_SECONDS = 180
# The longest time for running requests to finish: below STOP_SECONDS, with time to shut down.
LONGEST_DRAIN_SECONDS = STOP_SECONDS - 30
# A stop is over by then, the final SIGKILL included.
STOPPED_SECONDS = STOP_SECONDS + 60
# Time for an ended switch to queue the committed release; nothing is waited for then.
SWITCH_STOP_SECONDS = 30

# The longest delay before a boot whose predecessors gave no answer; the first is FIRST_DELAY.
FIRST_DELAY_SECONDS = 10
LONGEST_DELAY_SECONDS = 300
# How long cards, port and control group may need to come free after a stop.
CLEAR_SECONDS = 90
LONGEST_ADDRESS_WAIT_SECONDS = 900
LONGEST_BOOT_SECONDS = 2700
# The first request may compile kernels.
CHAT_SECONDS = 300
# The engine's lines travel through a pipe: judge again until the log has been quiet this long, so
# that the last ones have reached the file; but not longer than the second.
QUIET_SECONDS = 1.0
GATES_SECONDS = 10.0
# systemd's TimeoutStartSec, which counts for each program of a start by itself: above the delay,
# the wait for the address and for the cards; and above a boot, its first request and the gates.
START_SECONDS = 3600
assert START_SECONDS > LONGEST_DELAY_SECONDS + LONGEST_ADDRESS_WAIT_SECONDS + CLEAR_SECONDS + 60
assert START_SECONDS > LONGEST_BOOT_SECONDS + CHAT_SECONDS + GATES_SECONDS + 60

POLL_SECONDS = 0.2


def boot_delay(failed_boots: int) -> int:
    """Seconds to wait before a start after `failed_boots` in a row that gave no answer.

    10, 20, 40, … up to 300, and none after a boot that did answer. It never gives up.
    """
    if failed_boots == 0:
        return 0
    doublings = min(failed_boots - 1, LONGEST_DELAY_SECONDS.bit_length())
    return int(min(FIRST_DELAY_SECONDS << doublings, LONGEST_DELAY_SECONDS))
