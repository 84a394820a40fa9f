"""Exit codes of every `enginectl` command, and the outcomes of a switch that they stand for."""

from __future__ import annotations

from hostlib.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, EXIT_UNABLE

EXIT_REFUSED = 3
EXIT_LOCKED = 4
EXIT_ROLLED_BACK = 5
EXIT_ROLLBACK_FAILED = 6
EXIT_SWITCH_INTERRUPTED = 7
EXIT_NOTHING_TO_RETURN_TO = 8
EXIT_UNPROVED = 9
EXIT_REJECTED = 10
EXIT_DEGRADED = 11

SWITCHED = "switched"
UNCHANGED = "nothing to do"
RESTARTED = "restarted"
SERVES_DEGRADED = "serves, but not every gate passed"
ROLLED_BACK = "rolled back"
ROLLBACK_FAILED = "rollback failed"
INTERRUPTED = "interrupted"
FAILED = "failed"

EXIT_OF_OUTCOME = {
    SWITCHED: EXIT_OK,
    UNCHANGED: EXIT_OK,
    RESTARTED: EXIT_OK,
    SERVES_DEGRADED: EXIT_DEGRADED,
    ROLLED_BACK: EXIT_ROLLED_BACK,
    ROLLBACK_FAILED: EXIT_ROLLBACK_FAILED,
    INTERRUPTED: EXIT_SWITCH_INTERRUPTED,
    FAILED: EXIT_NOTHING_TO_RETURN_TO,
}

HELP = f"""exit codes:
  {EXIT_OK}    done; or nothing to do
  {EXIT_FAILED}    launch: the engine cannot be started; status: it does not serve;
       gates: one failed or cannot be told
  {EXIT_UNABLE}    wrong usage, or the system refused (permission, disk, no systemd)
  {EXIT_REFUSED}    refused before anything was touched
  {EXIT_LOCKED}    another switch is running
  {EXIT_ROLLED_BACK}    rolled back: the release from before serves again
  {EXIT_ROLLBACK_FAILED}    rollback failed: the release from before does not answer either
  {EXIT_SWITCH_INTERRUPTED}    the switch itself was ended; the committed release is being started
  {EXIT_NOTHING_TO_RETURN_TO}    failed with nothing to return to; what is committed is started
       again and again
  {EXIT_UNPROVED}    refused before anything was touched: the toolkit is not proved
  {EXIT_REJECTED}   refused before anything was touched: the release has failed before (--retry)
  {EXIT_DEGRADED}   status, switch: it serves, but not every gate passed
  {EXIT_INTERRUPTED}  Ctrl-C; a switch that has begun goes on under systemd"""
