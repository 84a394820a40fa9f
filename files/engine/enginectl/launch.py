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
from enginectl.paths import Places
from enginectl.release import Release, load_release
from enginectl.state import load_state, load_trial

INVOCATION = re.compile(r"[0-9a-f]{32}")


def launch(places: Places, environment: Mapping[str, str]) -> None:
    """Replace this process by the engine of the release to run; returns only by raising.

    `environment` is this process's own; of it the engine gets INVOCATION_ID alone.

    Raises:
        HostError: no release to run, or something that it needs is missing.
        OSError: the program could not be executed.
    """
    invocation = environment.get("INVOCATION_ID", "")
    if not INVOCATION.fullmatch(invocation):
        raise HostError(
            "launch: is for systemd alone (no INVOCATION_ID); use `systemctl start "
            f"{systemd.ENGINE_UNIT}`"
        )
    release = load_release(places, pick(places))
    check_ready(release)
    os.chdir(release.working_directory)
    log = _open_log(places, invocation)
    sys.stdout.flush()
    bootlog.split_output(log)
    print(f"enginectl: release {release.name}, start {invocation}", flush=True)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)  # Python ignores them; the engine starts afresh
    os.execve(release.argv[0], release.argv, engine_environment(release, invocation))


def pick(places: Places) -> str:
    """The name of the release to run: the candidate of an active switch, else the committed one.

    Raises:
        HostError: nothing is committed and no switch is active, or the state is damaged.
    """
    try:
        trial = load_trial(places)
        if trial is not None:
            [switch] = systemd.show(systemd.SWITCH_UNIT)
            if switch.active == "active" and switch.invocation == trial.invocation:
                return trial.release
            _warn(f"{places.trial}: left by a switch that is no longer active; ignored")
    except HostError as error:  # whatever is wrong with a trial, the committed release can run
        _warn(f"{error.message}; the trial is ignored")
    except OSError as error:
        _warn(f"{places.trial}: {error.strerror}; the trial is ignored")
    committed = load_state(places).committed
    if committed is None:
        raise HostError(
            f"{places.state}: no release is committed; run `enginectl switch NAME --reason TEXT`"
        )
    return committed


def check_ready(release: Release) -> None:
    """Wait for the listening address; check everything else that the release needs.

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
    network.wait_for_address(release.listen.host, release.address_wait_seconds)
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
        _warn(f"{places.boots}: {error.strerror}; this start is logged in the journal alone")
        return None


def _warn(text: str) -> None:
    print(f"enginectl: warning: {text}", file=sys.stderr, flush=True)
