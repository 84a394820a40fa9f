"""Starting the engine: what ExecStart of fable-engine.service does, as the service user."""

from __future__ import annotations

import os
import pwd
import re
import signal
import sys
from collections.abc import Mapping

from hostlib.errors import HostError

from enginectl import bootlog, network, systemd
from enginectl.choice import choose, warn
from enginectl.paths import Places
from enginectl.release import Release, load_release
from enginectl.runfiles import load_start

INVOCATION = re.compile(r"[0-9a-f]{32}")


def launch(places: Places, environment: Mapping[str, str]) -> None:
    """Replace this process by the engine of the release to run; returns only by raising.

    `environment` is this process's own; of it the engine gets INVOCATION_ID alone.

    Raises:
        HostError: no release to run, or something that it needs is missing.
        OSError: the program could not be executed.
    """
    invocation = invocation_of(environment)
    start = load_start(places, invocation)
    release = load_release(places, start.release if start else choose(places).release)
    check_ready(release)
    os.chdir(release.working_directory)
    log = _open_log(places, invocation)
    sys.stdout.flush()
    bootlog.split_output(log)
    print(f"enginectl: release {release.name}, start {invocation}", flush=True)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)  # Python ignores them; the engine starts afresh
    os.execve(release.argv[0], release.argv, engine_environment(release, invocation))


def invocation_of(environment: Mapping[str, str]) -> str:
    """systemd's id of this start.

    Raises:
        HostError: this process was not started by systemd.
    """
    invocation = environment.get("INVOCATION_ID", "")
    if not INVOCATION.fullmatch(invocation):
        raise HostError(
            "this command is for systemd alone (no INVOCATION_ID); use `systemctl start "
            f"{systemd.ENGINE_UNIT}`"
        )
    return invocation


def check_ready(release: Release) -> None:
    """Check what the release needs, once more and as its user.

    Raises:
        HostError: names what is missing or in the way.
    """
    user = pwd.getpwuid(os.geteuid()).pw_name
    if user != release.user:
        raise HostError(
            f"{release.name}: runs as {release.user}, not as {user}; set User= of "
            f"{systemd.ENGINE_UNIT}"
        )
    check_paths(release)
    if network.taken(release.listen):
        raise HostError(
            f"{release.listen}: another process listens there; find it with "
            f"`ss -ltnp sport = :{release.listen.port}` and end it"
        )


def check_paths(release: Release) -> None:
    """Check that everything the release is made of is in place.

    Raises:
        HostError: lists what is not.
    """
    try:
        pwd.getpwnam(release.user)
    except KeyError:
        raise HostError(
            f"{release.name}: there is no user {release.user} on this host; deploy it again"
        ) from None
    missing = release.missing_paths()
    if missing:
        raise HostError(
            f"{release.name}: {missing[0]} is missing; mount its disk or deploy it again",
            *(f"missing {path}" for path in missing),
        )


def release_environment(release: Release) -> dict[str, str]:
    """What is the same in every start of `release`: HOME, LANG, PATH, over them its own."""
    return {
        "HOME": pwd.getpwnam(release.user).pw_dir,
        "LANG": "C.UTF-8",
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        **release.env,
    }


def engine_environment(release: Release, invocation: str) -> dict[str, str]:
    """All that the engine inherits: the release's environment, and INVOCATION_ID."""
    return {**release_environment(release), "INVOCATION_ID": invocation}


def _open_log(places: Places, invocation: str) -> int | None:
    try:
        return bootlog.create(places, invocation)
    except OSError as error:  # serving outranks the log
        warn(f"{places.boots}: {error.strerror}; this start is logged in the journal alone")
        return None
