"""The base image of both hosts: Debian 12 with systemd, sshd and a compiler, built once."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lab.errors import LabError
from lab.places import CACHE, LOGIN_USER, SERVICE_USER
from stack.exits import EXIT_NO_NETWORK, EXIT_NO_SPACE

SUITE = "bookworm"
PACKAGES = (
    "systemd,systemd-sysv,dbus,dbus-user-session,libpam-systemd,openssh-server,sudo,python3,"
    "python3-venv,ca-certificates,iproute2,iputils-ping,curl,nftables,procps,kmod,g++,locales-all-"
)
KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"
KEPT_DAYS = 30
NEEDED_BYTES = 4 << 30
EXTRA_CERTIFICATES = Path("/usr/local/share/ca-certificates")
LEAVE_OUT = ("/usr/share/man/*", "/usr/share/doc/*", "/usr/share/locale/*")


def recipe_digest() -> str:
    """Digest of all that determines the image: this file and the machine's own certificates."""
    digest = hashlib.sha256(Path(__file__).read_bytes())
    for certificate in sorted(EXTRA_CERTIFICATES.glob("*.crt")):
        digest.update(certificate.read_bytes())
    return digest.hexdigest()[:16]


def build() -> Path:
    """The root folder of the image, built when the cache lacks it.

    Raises:
        LabError: no space, or the distribution's packages cannot be had.
    """
    CACHE.mkdir(parents=True, exist_ok=True)
    image = CACHE / f"base-{recipe_digest()}"
    with cache_lock("base"):
        if not image.exists():
            if shutil.disk_usage(CACHE).free < NEEDED_BYTES:
                raise no_space(CACHE)
            for stale in CACHE.glob("base-tmp.*"):
                shutil.rmtree(stale)
            print("lab: building the base image (about a minute, once)", flush=True)
            with tempfile.TemporaryDirectory(prefix="base-tmp.", dir=CACHE) as work:
                root = Path(work) / "root"
                root.mkdir()
                _bootstrap(root, Path(work))
                _furnish(root)
                root.rename(image)
        prune("base", image)
    return image


def no_space(place: Path) -> LabError:
    """The error for a cache on a full disk."""
    return LabError(
        f"{place}: less than {NEEDED_BYTES >> 30} GiB free; free some, or set FABLE_LAB_CACHE to "
        "a folder on a larger disk",
        exit_code=EXIT_NO_SPACE,
    )


def apt_sources(image: Path) -> str:
    """The image's own apt source list: it names the mirror that this machine reaches."""
    return (image / "etc/apt/sources.list").read_text()


def prune(kind: str, used: Path) -> None:
    """Mark `used` as used now; remove of the cache's folders KIND-… those unused for a month."""
    os.utime(used)
    oldest = time.time() - KEPT_DAYS * 86400
    for folder in CACHE.glob(f"{kind}-*"):
        if folder.stat().st_mtime < oldest:
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def cache_lock(name: str) -> Iterator[None]:
    """Hold the cache's lock `name`: two labs must not build the same thing twice."""
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / f".lock-{name}").open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def _bootstrap(root: Path, work: Path) -> None:
    tar = work / "base.tar"
    scratch = work / "scratch"
    scratch.mkdir()
    options = [f"--dpkgopt=path-exclude={pattern}" for pattern in LEAVE_OUT]
    command = [
        "mmdebstrap", "--quiet", "--mode=root", "--variant=minbase", f"--include={PACKAGES}",
        f"--keyring={KEYRING}",  # Ubuntu's apt does not trust Debian's keys by itself
        '--aptopt=Acquire::Check-Valid-Until "false"', '--aptopt=Acquire::Check-Date "false"',
        '--aptopt=DPkg::Lock::Timeout "120"', *options, SUITE, str(tar),
    ]  # fmt: skip
    # A chroot on a tmpfs: dpkg's fsyncs cost nothing there.
    inner = 'mount -t tmpfs -o size=3g,mode=1777 scratch "$0" && TMPDIR=$0 exec "$@"'
    done = subprocess.run(
        ["unshare", "--mount", "bash", "-c", inner, str(scratch), *command],
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    if "No space left on device" in done.stderr:
        raise no_space(work)
    if done.returncode != 0:
        raise LabError(
            "base image: mmdebstrap cannot fetch or unpack the distribution's packages; check the "
            "network and apt's proxy settings, then run again",
            *done.stderr.strip().splitlines()[-6:],
            exit_code=EXIT_NO_NETWORK,
        )
    # xattrs carry ping's file capability.
    subprocess.run(
        ["tar", "-C", str(root), "--xattrs", "--xattrs-include=*", "--numeric-owner", "-xf", tar],
        check=True,
    )


def _furnish(root: Path) -> None:
    certificates = root / "usr/local/share/ca-certificates"
    for certificate in EXTRA_CERTIFICATES.glob("*.crt"):
        shutil.copy(certificate, certificates)
    _chroot(root, "update-ca-certificates")
    (root / "etc/pip.conf").write_text("[global]\ncert = /etc/ssl/certs/ca-certificates.crt\n")
    for key in (root / "etc/ssh").glob("ssh_host_*"):
        key.unlink()
    for name in ("hostname", "resolv.conf"):
        (root / "etc" / name).unlink(missing_ok=True)
    (root / "etc/machine-id").write_text("")  # unique per host
    (root / "etc/ssh/sshd_config.d/lab.conf").write_text(
        "UseDNS no\nHostKey /etc/ssh/ssh_host_ed25519_key\n"
    )
    for user in (LOGIN_USER, SERVICE_USER):
        _chroot(root, "useradd", "--create-home", "--shell", "/bin/bash", user)
        ssh = root / "home" / user / ".ssh"
        ssh.mkdir(mode=0o700)
        (root / "home" / user).chmod(0o750)  # as on Ubuntu: closed to the other user
        home = (root / "home" / user).stat()
        os.chown(ssh, home.st_uid, home.st_gid)
    sudoers = root / "etc/sudoers.d" / LOGIN_USER
    sudoers.write_text(f"{LOGIN_USER} ALL=(ALL) NOPASSWD:ALL\n")
    sudoers.chmod(0o440)
    for session in (root / "etc/pam.d").glob("common-session*"):  # umask 002, as on Ubuntu
        with session.open("a") as rules:
            rules.write("session optional pam_umask.so usergroups\n")
    _chroot(root, "systemctl", "--quiet", "enable", "systemd-networkd.service")
    _chroot(
        root, "systemctl", "--quiet", "mask", "apt-daily.timer", "apt-daily-upgrade.timer",
        "e2scrub_all.timer", "systemd-networkd-wait-online.service", "console-getty.service",
    )  # fmt: skip


def _chroot(root: Path, *command: str) -> None:
    subprocess.run(["chroot", str(root), *command], check=True, capture_output=True)
