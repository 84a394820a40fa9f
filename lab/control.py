"""Bring a lab up and down, and speak with the process that holds it."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lab import image, network, places
from lab.errors import LabError
from lab.places import DEFAULT_NAME, HOSTS, LOGIN_USER, Lab
from lab.supplies import Supplies, build_supplies
from stack.exits import EXIT_NO_ROOT, EXIT_STALE_LAB

REPOSITORY = Path(__file__).resolve().parent.parent
SSH_DEADLINE_S = 90.0
VERB_DEADLINE_S = 150.0
DOWN_DEADLINE_S = 15.0
DOWN_PATIENCE_S = 10.0


def up(name: str, watch_pid: int | None = None) -> Lab:
    """The lab `name`, both hosts answering over ssh; brought up when it is not.

    Args:
        name: the default lab has well-known ports; any other takes free ones.
        watch_pid: the lab goes down when this process ends.

    Raises:
        LabError: with the exit code of its kind.
    """
    need_root()
    with _one_at_a_time(name):
        running = places.load(name)
        unreadable = running is None and (places.folder(name) / "lab.json").exists()
        stale = unreadable and places.holders(name)
        if stale or (running is not None and running.ready and running.recipe != recipe()):
            raise LabError(
                f"lab {name}: was brought up from other sources than these; run "
                f"`{places.prefix(name)}script/lab down`, then again",
                exit_code=EXIT_STALE_LAB,
            )
        if running is not None and running.ready:
            for host, is_running in status(running).items():
                if not is_running:
                    ask(running, "start", host)
            for host in HOSTS:
                wait_ssh(running, host)
            return running
        _down(name)
        return _up(name, watch_pid)


def down(name: str) -> bool:
    """End the lab `name` and remove all that it left, also after a crash; True if it was there.

    Raises:
        LabError: something of it cannot be removed.
    """
    need_root()
    with _one_at_a_time(name) as lock:
        was_there = _down(name)
        lock.unlink()
        return was_there


@contextlib.contextmanager
def _one_at_a_time(name: str) -> Iterator[Path]:
    """Two commands must not bring a lab up or down at the same time; yields the lock's path."""
    places.RUN.mkdir(mode=0o755, exist_ok=True)
    path = places.RUN / f".{name}.lock"
    while True:
        with path.open("w") as stream:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                print(f"lab {name}: waiting for another command on it", file=sys.stderr)
                fcntl.flock(stream, fcntl.LOCK_EX)
            # whoever held it before may have removed it together with the lab
            if path.exists() and os.path.samestat(os.fstat(stream.fileno()), path.stat()):
                yield path
                return


def recipe() -> str:
    """Digest of all that a lab is made from besides the base image's packages."""
    digest = hashlib.sha256(image.recipe_digest().encode())
    sources = [path for path in (REPOSITORY / "lab").rglob("*") if "__pycache__" not in path.parts]
    for path in sorted(path for path in sources if path.is_file()):
        digest.update(f"{path.relative_to(REPOSITORY)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _up(name: str, watch_pid: int | None) -> Lab:
    base = image.build()
    supplies = build_supplies(base)
    ports = network.choose_ports(fixed=name == DEFAULT_NAME)
    lab_folder = places.folder(name)
    lab_folder.mkdir(mode=0o755)
    try:
        _make_keys(lab_folder)
        lab = _start_holder(name, base, supplies, ports, watch_pid)
        _write_ssh_files(lab)
        for host in HOSTS:
            wait_ssh(lab, host)
    except BaseException:
        _down(name)
        raise
    lab.ready = True
    lab.save()
    _give_to_invoker(lab_folder)
    return lab


def _down(name: str) -> bool:
    lab_folder = places.folder(name)
    lab = places.load(name)
    patience = 0.0
    if lab is not None and lab.ready:
        with contextlib.suppress(LabError):
            ask(lab, "down")
            patience = DOWN_PATIENCE_S
    asked = time.monotonic()
    while held_by := places.holders(name):
        waited = time.monotonic() - asked
        if waited > patience:
            with contextlib.suppress(ProcessLookupError):
                os.kill(held_by[0], signal.SIGKILL)  # its child dies with it
        if waited > patience + DOWN_DEADLINE_S:
            raise LabError(f"lab {name}: process {held_by[0]} cannot be ended; reboot this machine")
        time.sleep(0.02)
    if not lab_folder.exists():
        return False
    cleaned = subprocess.run(
        ["unshare", "--mount", sys.executable, "-m", "lab.cgroups", name],
        cwd=REPOSITORY,
        check=False,
    )
    if cleaned.returncode != 0:
        raise LabError(
            f"lab {name}: processes of a dead lab are left in its cgroups; end them "
            "(`systemd-cgls` shows them), then run again",
            exit_code=EXIT_STALE_LAB,
        )
    shutil.rmtree(lab_folder)
    return True


def ask(lab: Lab, verb: str, host: str | None = None) -> dict[str, Any]:
    """One request to the lab's holder.

    Raises:
        LabError: the holder refuses, or does not answer.
    """
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(DOWN_DEADLINE_S if verb == "down" else VERB_DEADLINE_S)
        try:
            client.connect(str(lab.folder / "control"))
            client.sendall(json.dumps({"verb": verb, "host": host}).encode() + b"\n")
            line = client.makefile("rb").readline()
            answer: dict[str, Any] = json.loads(line)
        except (OSError, ValueError) as error:
            raise LabError(
                f"lab {lab.name}: its holder does not answer ({error}); run "
                f"`{places.prefix(lab.name)}script/lab down`",
                exit_code=EXIT_STALE_LAB,
            ) from None
    if "error" in answer:
        raise LabError(answer["error"])
    return answer


def status(lab: Lab) -> dict[str, bool]:
    """Which hosts run."""
    running: dict[str, bool] = ask(lab, "status")["running"]
    return running


def change(lab: Lab, verb: str, host: str) -> None:
    """Start, reboot, power off, cut or reset a host, and wait until it answers again."""
    _forget_connection(lab, host)
    ask(lab, verb, host)
    if verb in ("start", "reboot", "reset"):
        wait_ssh(lab, host)


def wait_ssh(lab: Lab, host: str) -> None:
    """Wait until `host` lets the login user in.

    Raises:
        LabError: it does not within the deadline.
    """
    command = [
        "ssh", "-F", str(lab.ssh_config), "-o", "ControlPath=none", "-o", "ConnectTimeout=2",
        "-o", "LogLevel=QUIET", host, "true",
    ]  # fmt: skip
    deadline = time.monotonic() + SSH_DEADLINE_S
    while time.monotonic() < deadline:
        try:
            if subprocess.run(command, timeout=10, check=False).returncode == 0:
                return
        except subprocess.TimeoutExpired:
            continue
        time.sleep(0.05)
    console = lab.folder / f"{host}.console"
    tail = console.read_text(errors="replace").splitlines()[-15:] if console.exists() else []
    raise LabError(f"{host}: no ssh within {SSH_DEADLINE_S:.0f} s; its console ends:", *tail)


def inside(lab: Lab, *command: str) -> list[str]:
    """`command` as it must be run to be in the lab's own network."""
    children = Path(f"/proc/{lab.pid}/task/{lab.pid}/children").read_text().split()
    return ["nsenter", f"--net=/proc/{children[0]}/ns/net", "--", *command]


def need_root() -> None:
    """Refuse to go on without root, or in a chroot that is no mount: hosts pivot their root."""
    mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    if not any(line.split()[4] == "/" for line in mounts):
        raise LabError(
            "the lab cannot run in a chroot; enter this tree with `systemd-nspawn --boot`, or use "
            "a privileged container"
        )
    if os.geteuid() != 0:
        raise LabError(
            "the lab needs root for its namespaces: run this as root or with sudo",
            exit_code=EXIT_NO_ROOT,
        )


def _start_holder(
    name: str, base: Path, supplies: Supplies, ports: dict[str, int], watch_pid: int | None
) -> Lab:
    lab_folder = places.folder(name)
    reader, writer = os.pipe()
    outer_network = os.open("/proc/self/ns/net", os.O_RDONLY)
    watch = os.pidfd_open(watch_pid) if watch_pid else None
    plan = {
        "name": name, "image": str(base), "site": str(supplies.site), "ports": ports,
        "report": writer, "outer_network": outer_network, "watch": watch,
    }  # fmt: skip
    kept = [fd for fd in (writer, outer_network, watch) if fd is not None]
    with (lab_folder / "holder.log").open("ab") as log:
        holder = subprocess.Popen(
            [
                "unshare", "--mount", "--net", "--pid", "--ipc", "--fork", "--kill-child=KILL",
                "--mount-proc", "--", sys.executable, "-m", "lab.holder", json.dumps(plan),
            ],
            cwd=REPOSITORY,
            pass_fds=kept,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )  # fmt: skip
    for descriptor in kept:
        os.close(descriptor)
    lab = Lab(
        name=name,
        pid=holder.pid,
        pid_start=places.process_start(holder.pid) or 0,
        ports=ports,
        artifacts=str(supplies.lock),
        recipe=recipe(),
        gateway_key_sha256=hashlib.sha256((lab_folder / "gateway.key").read_bytes()).hexdigest(),
    )
    lab.save()
    with os.fdopen(reader) as stream:
        line = stream.readline()
    answer: dict[str, Any] = (
        json.loads(line) if line else {"error": "its holder died", "exit_code": 1}
    )
    if "error" in answer:
        details = (lab_folder / "holder.log").read_text().splitlines()[-8:]
        raise LabError(f"lab {name}: {answer['error']}", *details, exit_code=answer["exit_code"])
    return lab


def _make_keys(lab_folder: Path) -> None:
    subprocess.run(
        ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "lab", "-f", lab_folder / "id"],
        check=True,
    )
    key = lab_folder / "gateway.key"
    key.touch(mode=0o600)
    key.write_text(f"fk-lab-{secrets.token_urlsafe(24)}")


def _write_ssh_files(lab: Lab) -> None:
    blocks = []
    known = []
    for name, plan in HOSTS.items():
        port = lab.ports[f"ssh-{name}"]
        blocks.append(f"Host {name}\n  HostName 127.0.0.1\n  Port {port}\n  HostKeyAlias {name}\n")
        kind, key = (lab.folder / f"{name}.hostkey.pub").read_text().split()[:2]
        known.append(f"{name},{plan.address},[127.0.0.1]:{port} {kind} {key}\n")
    common = (
        f"Host *\n  User {LOGIN_USER}\n  IdentityFile {lab.ssh_key}\n  IdentitiesOnly yes\n"
        f"  UserKnownHostsFile {lab.known_hosts}\n  StrictHostKeyChecking yes\n"
        f"  ControlMaster auto\n  ControlPath {lab.folder}/cm-%C\n  ControlPersist 60\n"
        "  ServerAliveInterval 2\n"
    )
    lab.known_hosts.write_text("".join(known))
    lab.ssh_config.write_text("".join(blocks) + common)


def _give_to_invoker(lab_folder: Path) -> None:
    """Let the person behind sudo use the lab's keys from a plain shell."""
    owner = os.environ.get("SUDO_UID"), os.environ.get("SUDO_GID")
    if not (owner[0] and owner[1]):
        return
    os.chown(lab_folder, int(owner[0]), int(owner[1]))
    for name in ("id", "id.pub", "known_hosts", "ssh_config", "gateway.key", "control"):
        os.chown(lab_folder / name, int(owner[0]), int(owner[1]))


def _forget_connection(lab: Lab, host: str) -> None:
    """A dead host's control connection would hang the next ssh."""
    subprocess.run(
        ["ssh", "-F", str(lab.ssh_config), "-O", "exit", host],
        capture_output=True,
        check=False,
        timeout=10,
    )
