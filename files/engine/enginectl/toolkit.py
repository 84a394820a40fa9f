"""The toolkit's proof before a switch, run by the service user in the engine's own environment."""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hostlib.errors import EXIT_FAILED, EXIT_OK, HostError

from enginectl import exits
from enginectl.release import Release

# Root's own copy: the service user could exchange the one beside the toolkit.
PROGRAM = Path(__file__).resolve().parent.parent / "bin" / "cuda-proof"
# Longer than the proof's own deadlines for compilations (300 s) and the extension (1200 s).
PROOF_SECONDS = 1800
LIMIT_BYTES = 1 << 20
LONGEST_LINE = 400


def prove(release: Release, environment: Mapping[str, str], say: Callable[[str], None]) -> None:
    """Prove the toolkit of `release` as its user, in `environment`; `say` is given each line.

    Raises:
        HostError: a check failed, or the proof could not run.
    """
    reasons = _reasons(release, environment, say)
    if reasons:
        raise HostError(
            f"{release.name}: its toolkit is not proved, nothing was touched: {reasons[0]}",
            *reasons[1:],
            exit_code=exits.EXIT_UNPROVED,
        )


def report(
    release: Release, environment: Mapping[str, str], say: Callable[[str], None]
) -> str | None:
    """Prove as `prove` does, for a release that must run whatever comes of it.

    Returns:
        Why its toolkit is not proved, on one line; None when it is.
    """
    reasons = _reasons(release, environment, say)
    return f"{release.name}: its toolkit is not proved: {reasons[0]}" if reasons else None


def _reasons(
    release: Release, environment: Mapping[str, str], say: Callable[[str], None]
) -> list[str]:
    """Why the toolkit is not proved: a line for each check that failed; none when it is."""
    try:
        command = [
            *as_user(release.user),
            "nice",  # an engine may be serving beside it
            str(PROGRAM), "--json", f"--venv={release.paths['venv']}",
            f"--engine={release.engine}", "--environment=-", str(release.paths["toolkit"]),
        ]  # fmt: skip
        code, found, last = _run(command, json.dumps(dict(environment)), say)
    except KeyError:
        return [f"the host has no user {release.user}; deploy it again"]
    except FileNotFoundError as error:
        return [f"{error.filename} is not installed; deploy it again"]
    except OSError as error:
        return [f"the proof could not be started ({error.strerror})"]
    if code == EXIT_OK:
        return []
    failures = found.get("failures")
    if code == EXIT_FAILED and isinstance(failures, list) and failures:
        return [str(failure) for failure in failures]
    return [f"the proof could not run (exit code {code}): {last}"]


def as_user(user: str) -> list[str]:
    """What drops root's rights for good: the service user can write all that the proof runs."""
    if os.geteuid() != 0:
        return []
    entry = pwd.getpwnam(user)
    return [
        "setpriv", f"--reuid={entry.pw_uid}", f"--regid={entry.pw_gid}", "--init-groups",
        "--no-new-privs", "--",
    ]  # fmt: skip


def _run(
    command: list[str], text: str, say: Callable[[str], None]
) -> tuple[int, dict[str, Any], str]:
    """Run `command` with `text` as its input; exit code, its JSON object, its last line."""
    last = "without a word"
    expired = threading.Event()
    with (
        tempfile.TemporaryFile() as output,
        subprocess.Popen(
            command,
            cwd="/",
            env={"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8"},
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,
        ) as process,
    ):

        def expire() -> None:
            expired.set()
            _end(process)

        deadline = threading.Timer(PROOF_SECONDS, expire)
        deadline.start()
        try:
            assert process.stdin is not None
            assert process.stderr is not None
            with contextlib.suppress(BrokenPipeError):  # its own words say why it ended
                process.stdin.write(text)
                process.stdin.close()
            for line in process.stderr:
                last = printable(line)
                say(last)
            code = process.wait()
        finally:
            deadline.cancel()
            _end(process)
        output.seek(0)
        content = output.read(LIMIT_BYTES)
    try:
        report = json.loads(content)
    except ValueError:
        report = {}
    if expired.is_set():
        last = f"not done after {PROOF_SECONDS} s"
    return code, report if isinstance(report, dict) else {}, last


def _end(process: subprocess.Popen[str]) -> None:
    """SIGTERM first: the proof ends its compilers then."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)


def printable(line: str) -> str:
    text = line.rstrip()[:LONGEST_LINE]
    return "".join(sign if sign.isprintable() else "?" for sign in text)
