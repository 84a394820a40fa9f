"""The runfile as a source: its flags, its surroundings, its traps.

The real one is 5 GB and not at hand: what runs here is a stand-in, a shell script that insists on
the flags and the environment that the real one needs, and lays out a stand-in toolkit as it does.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.toolkit_support import (
    PATIENCE_S,
    Site,
    flip_byte,
    is_one_line,
    lay_out_programs,
    served,
    standin_components,
    whole_tree,
    write_tree,
)

LOG = Path("/tmp/cuda-installer.log")
STANDIN_RUN = """\
#!/bin/sh
# A stand-in for NVIDIA's runfile.
die() { echo "standin: $*" >&2; exit 3; }
echo "[INFO]: begin" >/tmp/cuda-installer.log || die "log"
silent= toolkit= override= noman= nodrm= path= root= scratch=
for word; do
    case $word in
        --silent) silent=1 ;; --toolkit) toolkit=1 ;; --override) override=1 ;;
        --no-man-page) noman=1 ;; --no-drm) nodrm=1 ;;
        --toolkitpath=*) path=${word#*=} ;; --defaultroot=*) root=${word#*=} ;;
        --tmpdir=*) scratch=${word#*=} ;;
        *) die "unknown $word" ;;
    esac
done
[ "$silent$toolkit$override$noman$nodrm" = 11111 ] || die "flags: $*"
[ -n "$path" ] && [ "$path" = "$root" ] || die "no path"
[ -z "${DISPLAY+x}${SUDO_USER+x}" ] || die "surroundings of a desktop"
[ "$LANG $LC_ALL" = "C C" ] || die "language"
[ "$(stat -c %d "$scratch")" = "$(stat -c %d "${path%/*}")" ] || die "scratch on another disk"
here=$(dirname "$0")
if [ -e "$here/fail" ]; then
    echo "extracting"; echo "cp: error writing: No space left on device"; exit 1
fi
touch "$here/began"
left=400
while [ -e "$here/wait" ] && [ $left -gt 0 ]; do left=$((left - 1)); sleep 0.05; done
mkdir -p "$path"
cp -R PAYLOAD/. "$path" || die "copy"
if [ -e "$here/whole-paths" ]; then ln -sfn "$path/targets/x86_64-linux/include" "$path/include"; fi
if [ -e "$here/leads-out" ]; then ln -s "$here" "$path/bin/elsewhere"; fi
: payload PADDING
"""


def make_payload(folder: Path) -> None:
    """A stand-in toolkit in the layout of a runfile: include and lib64 are links."""
    for files in standin_components().values():
        moved = {
            (
                f"targets/x86_64-linux/{name}" if name.startswith(("include/", "lib/")) else name
            ): data
            for name, data in files.items()
        }
        write_tree(moved, folder)
    (folder / "include").symlink_to("targets/x86_64-linux/include")
    (folder / "lib64").symlink_to("targets/x86_64-linux/lib")
    (folder / "version.json").write_text("{}")


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return lay_out_programs(tmp_path_factory.mktemp("tools") / "tools")


@pytest.fixture(autouse=True)
def log() -> Iterator[Path]:
    """The runfile's one log file, for this test alone."""
    with Path("/tmp/fable-runfile-tests.lock").open("w") as lock:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                assert time.monotonic() < deadline, "another run of these tests holds the log file"
                time.sleep(0.1)
        LOG.unlink(missing_ok=True)  # the lock is ours: what stands there is a dead run's
        yield LOG
        LOG.unlink(missing_ok=True)


@pytest.fixture(autouse=True)
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty libxml2.so.2 that is found before any other."""
    folder = tmp_path / "libraries"
    folder.mkdir()
    found = folder / "libxml2.so.2"
    subprocess.run(["gcc", "-shared", "-x", "c", "/dev/null", "-o", found], check=True)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(folder))
    monkeypatch.setenv("DISPLAY", ":0")
    monkeypatch.setenv("SUDO_USER", "somebody")
    monkeypatch.setenv("LANG", "de_DE.UTF-8")
    return found


@pytest.fixture
def runfile(tmp_path: Path) -> Path:
    make_payload(tmp_path / "disk/payload")
    file = tmp_path / "disk/cuda_standin.run"
    text = STANDIN_RUN.replace("PAYLOAD", f"{tmp_path}/disk/payload")
    file.write_text(text.replace("PADDING", "x" * 1000))
    return file


@pytest.fixture
def site(tmp_path: Path, programs: Path, runfile: Path) -> Site:
    content = runfile.read_bytes()
    spec = {
        "runfile": {
            "location": str(runfile),
            "size": len(content),
            "sha256": hashlib.sha256(content).hexdigest(),
        },
        "cuda_version": 12080,
        "compiler_version": "12.8.93",
        "required_headers": ["shared.h"],
    }
    return Site(tmp_path / "disk", programs, tmp_path, spec)


def refused(site: Site, *words: str, code: int = 1) -> str:
    done = site.run("install")
    assert done.returncode == code, done.stderr
    assert is_one_line(done.stderr, "cuda-install"), done.stderr
    for word in words:
        assert word in done.stderr
    assert not site.link.is_symlink()
    assert site.trees() == []
    assert not list(site.root.glob(".staging*"))
    return done.stderr


def test_the_toolkit_comes_out_of_a_runfile_on_a_disk(site: Site, runfile: Path) -> None:
    before = runfile.stat()
    done = site.run("install")
    assert done.returncode == 0, done.stderr
    tree = whole_tree(site)
    assert (tree / "include").readlink() == Path("targets/x86_64-linux/include")
    census = json.loads((tree / "census.json").read_text())
    assert {entry["component"] for entry in census["files"].values()} == {"runfile"}
    assert sorted(path.name for path in site.root.iterdir()) == [".lock", tree.name]
    assert runfile.stat() == before
    assert not LOG.exists(), "it would stand in another user's way"
    again = site.run("install")
    assert (again.returncode, again.stdout) == (0, f"already installed: {tree}\n")


def test_links_by_the_staged_trees_whole_path_survive_its_renaming(
    site: Site, runfile: Path
) -> None:
    (runfile.parent / "whole-paths").touch()
    assert site.run("install").returncode == 0
    tree = whole_tree(site)
    assert (tree / "include").readlink() == Path("targets/x86_64-linux/include")


def test_a_link_out_of_the_tree_is_refused(site: Site, runfile: Path) -> None:
    (runfile.parent / "leads-out").touch()
    refused(site, "1 of its links lead out of it", f"bin/elsewhere -> {runfile.parent}")


def test_the_toolkit_comes_out_of_a_runfile_at_an_address(site: Site, runfile: Path) -> None:
    runfile.write_text(runfile.read_text().replace('$(dirname "$0")', str(runfile.parent)))
    content = runfile.read_bytes()
    with served(runfile.parent) as address:
        site.spec["runfile"] = {
            "location": f"{address}/{runfile.name}",
            "size": len(content),
            "sha256": hashlib.sha256(content).hexdigest(),
        }
        done = site.run("install")
    assert done.returncode == 0, done.stderr
    tree = whole_tree(site)
    assert sorted(path.name for path in site.root.iterdir()) == [".lock", tree.name]


def test_one_flipped_byte_is_refused(site: Site, runfile: Path) -> None:
    flip_byte(runfile)
    refused(site, f"{runfile}: sha256 differs from the locked one")
    assert not (runfile.parent / "began").exists()


def test_a_truncated_runfile_is_refused(site: Site, runfile: Path) -> None:
    os.truncate(runfile, 500)
    refused(site, f"{runfile}: 500 bytes instead of")


def test_an_absent_runfile_cannot_run(site: Site, runfile: Path) -> None:
    runfile.unlink()
    refused(site, f"{runfile}: cannot be read", "put the file there", code=2)


def test_its_failure_is_told_in_its_own_words(site: Site, runfile: Path) -> None:
    (runfile.parent / "fail").touch()
    text = refused(
        site, f"{runfile}: failed with 1", "  cp: error writing: No space left on device"
    )
    assert str(LOG) in text


def test_another_users_log_is_seen_before_the_runfile_crashes_on_it(
    site: Site, runfile: Path, log: Path
) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can make a file of another user")
    log.touch()
    os.chown(log, 65534, 65534)
    refused(site, f"{log}: belongs to another user (uid 65534)", code=2)
    log.unlink()
    log.symlink_to(runfile.parent / "aim")
    refused(site, f"{log}: belongs to another user (uid 0) or is no file", code=2)
    log.unlink()
    assert not (runfile.parent / "began").exists()


def test_a_missing_library_is_named(site: Site, runfile: Path, library: Path) -> None:
    library.write_text("no library")
    refused(site, "libxml2.so.2: the runfile needs it", "install libxml2", code=2)
    assert not (runfile.parent / "began").exists()


def test_lack_of_space_is_seen_first(site: Site, runfile: Path) -> None:
    site.spec["runfile"]["size"] = 10**15
    refused(site, "3000000.0 GB needed for archives and tree")


def test_what_makes_no_toolkit_is_not_installed(site: Site, runfile: Path) -> None:
    (runfile.parent / "payload/nvvm/bin/cicc").unlink()
    refused(site, "the proof failed (compiler)", "nvvm/bin/cicc")


def test_no_other_installer_begins_while_a_killed_ones_runfile_still_works(
    site: Site, runfile: Path
) -> None:
    wait, began = runfile.parent / "wait", runfile.parent / "began"
    wait.touch()
    installer = subprocess.Popen(
        site.arguments("install"), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 60
    while not began.exists():
        assert installer.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    installer.send_signal(signal.SIGKILL)
    installer.wait()
    try:
        second = site.run("install", "--lock-wait", "0")
        assert second.returncode == 1
        assert f"held by cuda-install (pid {installer.pid})" in second.stderr
    finally:
        wait.unlink()
    assert site.run("install").returncode == 0
    whole_tree(site)


def test_an_installer_that_is_ended_ends_the_runfile_too(site: Site, runfile: Path) -> None:
    wait, began = runfile.parent / "wait", runfile.parent / "began"
    wait.touch()
    installer = subprocess.Popen(
        site.arguments("install"), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + PATIENCE_S
    while not began.exists():
        assert installer.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    installer.terminate()
    _, errors = installer.communicate(timeout=PATIENCE_S)
    assert installer.returncode == 130
    assert errors.splitlines()[-1] == "cuda-install: interrupted; run it again to go on"
    assert sorted(path.name for path in site.root.iterdir()) == [".archives", ".lock"]
    # The runfile inherits the lock: nobody holds it any more.
    subprocess.run(["flock", "--wait", "60", site.root / ".lock", "true"], check=True)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("sha256", "ab", "runfile: sha256: must be"),
        ("size", "5 GB", "runfile: size: must be"),
        ("location", "", "runfile: location: must be"),
        ("md5", "x", "runfile: key 'md5' is unknown"),
    ],
)
def test_a_wrong_specification_is_refused(site: Site, key: str, value: str, words: str) -> None:
    site.spec["runfile"][key] = value
    refused(site, words, code=2)
