"""The installer's refusals, through the program, with invented archives.

The archives are sound but no compiler, so an installation that gets as far as the proof fails
there; real ones are in tests/lab/test_toolkit_mirror.py.
"""

from __future__ import annotations

import copy
import os
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.toolkit_support import (
    Site,
    flip_byte,
    is_one_line,
    lay_out_programs,
    lock_archives,
    make_hostile_archive,
    make_site,
    manifest_of,
    served,
    write_manifest,
)

NOBODY = 65534


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return lay_out_programs(tmp_path_factory.mktemp("tools") / "tools")


@pytest.fixture
def site(tmp_path: Path, programs: Path) -> Site:
    return make_site(tmp_path, programs)


def refused(site: Site, *words: str, code: int = 1, more: tuple[str, ...] = ()) -> str:
    """Install; expect a refusal whose line holds `words`, and nothing published."""
    trees = site.trees()
    done = site.run("install", *more)
    assert done.returncode == code, done.stderr
    assert is_one_line(done.stderr, "cuda-install"), done.stderr
    for word in words:
        assert word in done.stderr
    assert site.trees() == trees
    assert not list(site.root.glob(".staging*")) if site.root.exists() else True
    return done.stderr


def test_sound_archives_that_are_no_toolkit_fail_the_proof(site: Site) -> None:
    text = refused(site, "the proof failed (compiler)", "it was not installed", "bin/nvcc")
    assert not site.link.exists()
    assert "checking:" in text
    with served(site.base) as address:
        site.spec["base_url"] = address
        assert "fetching:" in refused(site, "the proof failed (compiler)")


def test_one_flipped_byte_is_refused_and_healed_by_the_next_run(site: Site) -> None:
    archive = site.archive("cuda_cudart")
    sound = archive.read_bytes()
    flip_byte(archive)
    refused(site, "sha256 differs", archive.name)
    with served(site.base) as address:
        site.spec["base_url"] = address
        refused(site, "sha256 differs", archive.name)
        archive.write_bytes(sound)
        refused(site, "the proof failed")


def test_a_truncated_archive_is_refused(site: Site) -> None:
    archive = site.archive("cuda_nvcc")
    os.truncate(archive, archive.stat().st_size // 2)
    refused(site, archive.name, "bytes instead of")
    with served(site.base) as address:
        site.spec["base_url"] = address
        refused(site, archive.name, "bytes instead of")


def test_an_archive_kept_from_an_earlier_run_is_not_trusted(site: Site) -> None:
    kept = site.root / ".archives" / site.archive("cuda_nvcc").name
    kept.parent.mkdir(parents=True)
    kept.write_bytes(b"not what it was")
    with served(site.base) as address:
        site.spec["base_url"] = address
        refused(site, "the proof failed")
    sound = site.archive("cuda_nvcc").read_bytes()
    assert kept.read_bytes() == sound, "the next run has it already"


def test_an_exchanged_manifest_is_refused(site: Site) -> None:
    (site.base / site.spec["manifest"]).write_text("{}")
    refused(site, "redistrib.json", "sha256 differs")


def test_an_absent_manifest_cannot_run(site: Site) -> None:
    (site.base / site.spec["manifest"]).unlink()
    refused(site, "redistrib.json: cannot be fetched", code=2)


Change = Callable[[dict[str, Any]], object]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda raw: raw.pop("cuda_nvcc"), ("has no cuda_nvcc",)),
        (lambda raw: raw["cuda_nvcc"].pop("linux-x86_64"), ("has no cuda_nvcc",)),
        (
            lambda raw: raw["cuda_nvcc"].update(version="1.1"),
            ("cuda_nvcc", "version 1.1", "expected 1.0"),
        ),
        (
            lambda raw: raw["cuda_nvcc"]["linux-x86_64"].update(sha256="0" * 64),
            ("cuda_nvcc", "sha256"),
        ),
        (
            lambda raw: raw["cuda_cudart"]["linux-x86_64"].update(relative_path="x.tar.xz"),
            ("cuda_cudart", "relative_path x.tar.xz"),
        ),
    ],
)
def test_a_manifest_of_another_release_is_refused(
    site: Site, change: Change, words: tuple[str, ...]
) -> None:
    manifest = manifest_of(copy.deepcopy(site.spec["components"]))
    change(manifest)
    write_manifest(site, manifest)
    refused(site, "redistrib.json", *words)


@pytest.mark.parametrize(
    ("name", "kind", "target"),
    [
        ("top/../../evil", tarfile.REGTYPE, ""),
        ("/evil", tarfile.REGTYPE, ""),
        ("top/evil", tarfile.SYMTYPE, "/etc"),
        ("top/evil", tarfile.SYMTYPE, "../evil"),
        ("top/evil", tarfile.LNKTYPE, "../../spec.json"),
        ("top/evil", tarfile.CHRTYPE, ""),
        ("top/evil", tarfile.FIFOTYPE, ""),
    ],
)
def test_an_archive_that_leaves_its_folder_is_refused(
    site: Site, name: str, kind: bytes, target: str
) -> None:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, target
    make_hostile_archive(site.archive("cuda_nvcc"), [member])
    lock_archives(site)
    refused(site, site.archive("cuda_nvcc").name, "evil")
    assert not list(site.folder.rglob("evil"))


def test_a_file_that_claims_more_than_the_disk_holds_is_not_begun(site: Site) -> None:
    member = tarfile.TarInfo("top/include/sparse.h")
    member.pax_headers = {"GNU.sparse.map": "0,0", "GNU.sparse.size": str(1 << 60)}
    make_hostile_archive(site.archive("cuda_nvcc"), [member])
    lock_archives(site)
    refused(site, "include/sparse.h: No space left on device; free space", code=2)


@pytest.mark.parametrize("name", ["census.json", ".toolkit.json", ".proof.json", "version.json"])
def test_a_name_that_is_the_installers_own_is_refused(site: Site, name: str) -> None:
    """A link there would lead the installer's own write into another file."""
    link = tarfile.TarInfo(f"top/{name}")
    link.type, link.linkname = tarfile.SYMTYPE, "include/shared.h"
    make_hostile_archive(site.archive("cuda_nvcc"), [link])
    lock_archives(site)
    refused(site, f"cuda_nvcc: brings {name}, a name that is the installer's own")


def test_components_that_differ_on_one_file_are_refused(site: Site) -> None:
    archive = site.archive("cuda_nvcc")
    member = tarfile.TarInfo("top/include/shared.h")
    make_hostile_archive(archive, [member])
    lock_archives(site)
    refused(site, "include/shared.h: cuda_cudart and cuda_nvcc bring different files")


@pytest.mark.parametrize(("kind", "word"), [("folder", "tree"), ("file", "file")])
def test_what_stands_at_the_link_is_not_touched(site: Site, kind: str, word: str) -> None:
    if kind == "folder":
        site.link.mkdir()
        (site.link / "hand-made").touch()
    else:
        site.link.write_text("hand-made")
    refused(site, f"{site.link}: a {word} stands there", "was not made by this installer")
    assert not site.root.exists()
    assert (site.link / "hand-made").exists() or site.link.read_text() == "hand-made"


def test_a_strange_folder_at_the_trees_place_is_not_touched(site: Site) -> None:
    tree = Path(site.status()["path"])
    (tree / "bin").mkdir(parents=True)
    refused(site, f"{tree}: stands there and was not made by this installer")
    assert list(tree.iterdir()) == [tree / "bin"]


def test_a_link_to_nowhere_at_the_trees_place_is_not_touched(site: Site) -> None:
    tree = Path(site.status()["path"])
    tree.parent.mkdir()
    tree.symlink_to("/nowhere")
    text = refused(site, f"{tree}: stands there and was not made by this installer")
    assert "checking" not in text, "nothing was read before"
    assert tree.readlink() == Path("/nowhere")


def test_lack_of_space_is_seen_before_the_first_byte(site: Site) -> None:
    site.spec["components"][0]["size"] = 10**15
    refused(site, "needed for archives and tree", "free")
    assert not (site.root / ".archives").exists()


@pytest.mark.parametrize(
    ("variable", "words"),
    [("PATH=/nonexistent", "gcc: is not on PATH"), ("NVCC_CCBIN=/nothing", "/nothing: is no comp")],
)
def test_lack_of_a_host_compiler_is_seen_before_the_first_byte(
    site: Site, variable: str, words: str
) -> None:
    done = site.run("install", before=("env", variable))
    assert done.returncode == 2, done.stderr
    assert is_one_line(done.stderr, "cuda-install")
    assert words in done.stderr
    assert not (site.root / ".archives").exists()


def test_another_architecture_is_refused(site: Site) -> None:
    done = site.run("install", before=("setarch", "i686"))
    assert done.returncode == 1
    assert "this host is i686" in done.stderr
    assert not site.root.exists()


@pytest.fixture
def foreign_folder() -> Iterator[Path]:
    """A folder that every user may enter and none but its owner may write."""
    folder = Path(tempfile.mkdtemp(prefix="toolkit-test."))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def test_no_permission_is_named(programs: Path, foreign_folder: Path) -> None:
    site = make_site(foreign_folder, lay_out_programs(foreign_folder / "tools"))
    command = site.arguments("install")
    if os.getuid() != 0:
        foreign_folder.chmod(0o555)
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        user=NOBODY if os.getuid() == 0 else None,
    )
    foreign_folder.chmod(0o755)
    assert done.returncode == 1
    assert f"{foreign_folder}: cannot be written by this user" in done.stderr


@pytest.mark.skipif(os.getuid() != 0, reason="only root can work in another user's folder")
def test_root_does_not_install_where_another_user_works(site: Site) -> None:
    site.root.mkdir()
    os.chown(site.root, NOBODY, -1)
    refused(site, f"{site.root}: belongs to nobody", "sudo -u nobody", code=2)
    assert list(site.root.iterdir()) == []


def test_folders_without_write_permission_are_removed_too(
    programs: Path, foreign_folder: Path
) -> None:
    """As a runfile may leave them; root would not notice."""
    site = make_site(foreign_folder, lay_out_programs(foreign_folder / "tools"))
    leftover = site.root / ".staging.killed/tree/bin"
    leftover.mkdir(parents=True)
    (leftover / "tool").touch()
    user = NOBODY if os.getuid() == 0 else None
    command = site.arguments("install")
    for path in (site.root, *site.root.rglob("*")):
        if user:
            os.chown(path, user, -1)
        if path.is_dir() and path != site.root:
            path.chmod(0o555)
    site.folder.chmod(0o777)
    done = subprocess.run(command, capture_output=True, text=True, check=False, user=user)
    assert (done.returncode, "the proof failed" in done.stderr) == (1, True), done.stderr
    assert not leftover.exists()


@pytest.mark.parametrize("wait", ["nan", "inf", "-1", "soon"])
def test_a_wait_without_end_is_no_wait(site: Site, wait: str) -> None:
    done = site.run("install", "--lock-wait", wait)
    assert (done.returncode, "--lock-wait: invalid" in done.stderr) == (2, True)


def test_a_second_installer_says_who_holds_the_lock(site: Site) -> None:
    site.root.mkdir()
    (site.root / ".lock").write_text("cuda-install (pid 4711)\n")
    holder = subprocess.Popen(
        ["flock", "--no-fork", site.root / ".lock", "sh", "-c", "echo held; exec sleep 600"],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout is not None
    try:
        assert holder.stdout.readline() == "held\n"
        refused(site, "held by cuda-install (pid 4711)", more=("--lock-wait", "0"))
    finally:
        holder.terminate()
        holder.wait()
        holder.stdout.close()
    refused(site, "the proof failed")


def test_leftovers_of_a_killed_run_are_removed(site: Site) -> None:
    leftover = site.root / ".staging.killed/tree/include"
    leftover.mkdir(parents=True)
    refused(site, "the proof failed")
    assert not leftover.exists()


def test_status_of_nothing(site: Site) -> None:
    found = site.status()
    assert found["installed"] is found["proved"] is found["link_ok"] is False
    assert found["changed_reason"] == f"{found['path']} is not installed"
    assert not site.root.exists()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda raw: raw.pop("manifest"), "key 'manifest' is missing"),
        (lambda raw: raw.update(mirror="x"), "key 'mirror' is unknown"),
        (lambda raw: raw.update(components=[]), "components: must be"),
        (lambda raw: raw["components"][0].pop("size"), "components[0]: key 'size' is missing"),
        (lambda raw: raw["components"][0].update(size="12"), "components[0]: size: must be"),
        (lambda raw: raw["components"][0].update(sha256="ab"), "components[0]: sha256: must be"),
        (
            lambda raw: raw["components"][1].update(relative_path="../x"),
            "components[1]: relative_path: must be",
        ),
        (lambda raw: raw["components"].append(raw["components"][0]), "stands there twice"),
        (lambda raw: raw.update(cuda_version="12.8"), "cuda_version: must be"),
        (lambda raw: raw.update(required_headers=["a>\n#error"]), "required_headers: must be"),
    ],
)
def test_a_wrong_specification_is_refused(site: Site, change: Change, words: str) -> None:
    change(site.spec)
    text = refused(site, words, code=2)
    assert "spec.json" in text
    assert not site.root.exists()


def test_text_that_is_no_json_is_refused(site: Site) -> None:
    command = site.arguments("status")
    (site.folder / "spec.json").write_text("{")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert is_one_line(done.stderr, "cuda-install")
