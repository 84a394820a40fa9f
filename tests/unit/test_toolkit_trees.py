"""Trees that stand: the census, adoption, collection. With a stand-in toolkit."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.toolkit_support import (
    Site,
    assert_census,
    is_one_line,
    lay_out_programs,
    make_site,
    standin_components,
    whole_tree,
)

NOBODY = 65534


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Site:
    folder = tmp_path_factory.mktemp("origin")
    site = make_site(folder, lay_out_programs(folder / "tools"), standin_components())
    done = site.run("install")
    assert done.returncode == 0, done.stderr
    return site


@pytest.fixture
def copied(installed: Site, tmp_path: Path) -> Site:
    """A site of its own whose installed tree is a copy."""
    site = Site(installed.base, installed.programs, tmp_path, installed.spec)
    subprocess.run(["cp", "-a", installed.root, site.root], check=True)
    site.link.symlink_to(site.root / Path(installed.link.readlink()).name)
    return site


@pytest.fixture
def hand_made(installed: Site, tmp_path: Path) -> Site:
    """A site with a tree at the fixed path that no installer put there, in a runfile's layout."""
    site = Site(installed.base, installed.programs, tmp_path, installed.spec)
    subprocess.run(["cp", "-a", installed.link.resolve(), site.link], check=True)
    for name in (".proof.json", ".toolkit.json", "census.json"):
        (site.link / name).unlink()
    (site.link / "lib64").unlink()
    target = site.link / "targets/x86_64-linux"
    target.mkdir(parents=True)
    for name in ("include", "lib"):
        (site.link / name).rename(target / name)
    (site.link / "include").symlink_to("targets/x86_64-linux/include")
    (site.link / "lib64").symlink_to("targets/x86_64-linux/lib")
    (site.link / "bin/by-hand").write_text("notes")
    (site.link / "bin/by-hand").chmod(0o640)
    return site


def snapshot(folder: Path) -> list[str]:
    """Kind, mode, size, time, inode and link target of everything below a folder."""
    return sorted(
        subprocess.run(
            ["find", ".", "-mindepth", "1", "-printf", "%P %y %m %s %T@ %i %l\n"],
            cwd=folder, capture_output=True, text=True, check=True,
        ).stdout.splitlines()
    )  # fmt: skip


def files_only(lines: list[str]) -> list[str]:
    """Without folders, whose times change with what is added to them, and without what is ours."""
    own = (".proof.json ", ".toolkit.json ", "census.json ")
    return [line for line in lines if line.split(" ")[1] != "d" and not line.startswith(own)]


def run(site: Site, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [str(site.programs / "cuda-install"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


def test_an_installed_tree_is_as_its_census_says(installed: Site) -> None:
    for more in ([], ["--deep"]):
        done = run(installed, "census", installed.link, *more)
        assert (done.returncode, done.stdout.count("as they were installed")) == (0, 1)
    census = json.loads((installed.link / "census.json").read_text())
    assert census["files"]["include/curand.h"]["component"] == "libcurand"
    assert census["links"]["lib64"]["target"] == "lib"
    assert census["files"]["version.json"]["component"] == "cuda"


def test_stray_variables_do_not_spoil_an_installation_and_a_chosen_compiler_counts(
    installed: Site, tmp_path: Path
) -> None:
    site = Site(installed.base, installed.programs, tmp_path, installed.spec)
    gcc = shutil.which("gcc")
    stray = ("CPATH=/elsewhere", "NVCC_PREPEND_FLAGS=-I/elsewhere", "CUDA_HOME=/elsewhere")
    done = site.run("install", before=("env", *stray, f"NVCC_CCBIN={gcc}"))
    assert done.returncode == 0, done.stderr
    stamp = json.loads((site.link / ".proof.json").read_text())
    assert stamp["proofs"][0]["question"]["variables"] == {"NVCC_CCBIN": gcc}


def test_two_installers_at_once_end_in_one_tree(installed: Site, tmp_path: Path) -> None:
    site = Site(installed.base, installed.programs, tmp_path, installed.spec)
    command = site.arguments("install")
    running = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    answers = [process.communicate(timeout=120) for process in running]
    assert [process.returncode for process in running] == [0, 0], answers
    assert sum("waiting up to" in errors for _, errors in answers) <= 1
    assert site.trees() == [whole_tree(site).name]


def test_headers_deleted_to_free_space_are_named(copied: Site) -> None:
    for header in copied.link.glob("include/curand*.h"):
        header.unlink()
    done = run(copied, "census", copied.link)
    assert done.returncode == 1
    assert is_one_line(done.stderr, "cuda-install")
    assert f"{copied.link.resolve()}: 2 missing (libcurand)" in done.stderr
    assert "missing  include/curand.h\n" in done.stderr


def test_what_changed_and_what_was_added_is_named(copied: Site) -> None:
    tree = copied.link.resolve()
    (tree / "include/shared.h").write_text("// of another size")
    header = tree / "include/cuda.h"
    header.write_text(header.read_text().replace("12080", "12000"))
    (tree / "lib64").unlink()
    (tree / "lib64").symlink_to("lib/../lib")
    (tree / "lib/libcurand.so.10").unlink()
    (tree / "lib/libcurand.so.10").mkdir()
    (tree / "include/stray.h").touch()
    done = run(copied, "census", copied.link)
    assert done.returncode == 1
    assert ": 1 missing (libcurand), 2 changed (" in done.stderr
    assert "1 extra;" in done.stderr
    assert "extra    include/stray.h" in done.stderr
    done = run(copied, "census", copied.link, "--deep")
    assert "3 changed (" in done.stderr
    assert "changed  include/cuda.h" in done.stderr


def remove_what_no_proof_reads(tree: Path) -> None:
    (tree / "lib/libcurand.so.10").unlink()


def remove_a_required_header(tree: Path) -> None:
    (tree / "include/shared.h").unlink()


def exchange_a_tool(tree: Path) -> None:
    (tree / "bin/ptxas").write_text("a stand-in for bin/XXXXX")


def remove_the_census(tree: Path) -> None:
    (tree / "census.json").unlink()


def empty_the_description(tree: Path) -> None:
    (tree / ".toolkit.json").write_text("")


DAMAGES = pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (remove_what_no_proof_reads, "1 missing (libcurand)"),
        (remove_a_required_header, "1 missing (cuda_cudart)"),
        (exchange_a_tool, "bin/ptxas was changed since the proof"),
        (remove_the_census, "census.json: is not there"),
        (empty_the_description, ".toolkit.json: is no JSON"),
    ],
)


@DAMAGES
def test_a_damaged_tree_is_named_and_healed_in_its_place(
    copied: Site, spoil: Callable[[Path], None], words: str
) -> None:
    tree = copied.link.resolve()
    spoil(tree)
    found = copied.status()
    assert found["proved"] is False
    assert words in found["changed_reason"] or "was removed since" in found["changed_reason"]
    done = copied.run("install")
    assert done.returncode == 0, done.stderr
    assert "installing it anew" in done.stderr
    assert whole_tree(copied) == tree
    assert sorted(path.name for path in copied.root.iterdir()) == [".lock", tree.name]


@DAMAGES
def test_a_damaged_tree_that_cannot_be_made_anew_stays_as_it_is(
    copied: Site, spoil: Callable[[Path], None], words: str
) -> None:
    spoil(copied.link.resolve())
    copied.spec = {**copied.spec, "base_url": "/nonexistent"}
    before = [line for line in snapshot(copied.link.resolve()) if " d " not in line]
    done = copied.run("install")
    assert (done.returncode, "cannot be fetched" in done.stderr) == (2, True), done.stderr
    assert is_one_line(done.stderr, "cuda-install")
    assert [line for line in snapshot(copied.link.resolve()) if " d " not in line] == before


def test_what_people_lay_beside_the_files_is_left_there(copied: Site) -> None:
    notes = copied.link.resolve() / "notes"
    notes.touch()
    assert copied.status()["changed_reason"] is None
    assert copied.run("install").returncode == 0
    assert notes.exists()


def test_a_handful_is_shown_and_the_rest_counted(copied: Site) -> None:
    shutil.rmtree(copied.link.resolve() / "include/crt")
    done = run(copied, "census", copied.link)
    assert "200 missing (cuda_cudart)" in done.stderr
    assert "missing  and 190 more" in done.stderr
    assert len(done.stderr.splitlines()) == 12 + done.stderr.count("reading")


@pytest.mark.parametrize("text", [None, "{", "[]", '{"files": {"x": 1}, "links": {}}'])
def test_without_a_census_nothing_can_be_said(tmp_path: Path, installed: Site, text: str) -> None:
    if text is not None:
        (tmp_path / "census.json").write_text(text)
    done = run(installed, "census", tmp_path)
    assert done.returncode == 2
    assert is_one_line(done.stderr, "cuda-install")
    assert f"{tmp_path}/census.json" in done.stderr


def test_a_tree_is_adopted_as_it_is(hand_made: Site) -> None:
    before = snapshot(hand_made.link)
    done = hand_made.run("adopt")
    assert done.returncode == 0, done.stderr
    tree = hand_made.link.readlink()
    assert done.stdout == f"adopted and proved: {tree}\n"
    assert hand_made.root.is_dir() and tree.parent == hand_made.root
    assert files_only(snapshot(tree)) == files_only(before)  # the same inodes: nothing was copied
    assert_census(tree)
    assert run(hand_made, "census", hand_made.link, "--deep").returncode == 0
    proof = subprocess.run(
        [hand_made.programs / "cuda-proof", hand_made.link], capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert (proof.returncode, "from the stamp" in proof.stdout) == (0, True), proof.stdout
    again = hand_made.run("adopt")
    assert (again.returncode, "already adopted" in again.stdout) == (0, True)
    assert hand_made.trees() == [tree.name]


def test_the_name_of_an_adopted_tree_is_its_content(hand_made: Site, tmp_path: Path) -> None:
    other = Site(hand_made.base, hand_made.programs, tmp_path / "other", hand_made.spec)
    other.folder.mkdir()
    subprocess.run(["cp", "-a", hand_made.link, other.link], check=True)
    third = Site(hand_made.base, hand_made.programs, tmp_path / "third", hand_made.spec)
    third.folder.mkdir()
    subprocess.run(["cp", "-a", hand_made.link, third.link], check=True)
    (third.link / "bin/by-hand").write_text("xxxxx")
    for site in (hand_made, other, third):
        assert site.run("adopt").returncode == 0
    assert hand_made.trees() == other.trees() != third.trees()


def test_after_adoption_an_installation_keeps_the_old_tree(hand_made: Site) -> None:
    assert hand_made.run("install").returncode == 1
    assert hand_made.run("adopt").returncode == 0
    adopted = hand_made.link.readlink()
    done = hand_made.run("install")
    assert done.returncode == 0, done.stderr
    assert whole_tree(hand_made) != adopted
    assert_census(adopted)


def choose_adopted(site: Site, name: str) -> None:
    """Make the specification say: use the tree of that name."""
    kept = ("cuda_version", "compiler_version", "required_headers")
    site.spec = {"adopted": name, **{key: site.spec[key] for key in kept}}


def test_an_adopted_tree_can_be_the_chosen_one(hand_made: Site) -> None:
    assert hand_made.run("adopt").returncode == 0
    adopted = hand_made.link.readlink()
    assert hand_made.run("install").returncode == 0  # leads to another tree now
    assert hand_made.link.readlink() != adopted
    choose_adopted(hand_made, adopted.name)
    assert hand_made.status()["changed_reason"].endswith(f"does not point to {adopted}")
    for words in ("installed and proved", "already installed"):
        done = hand_made.run("install")
        assert (done.returncode, done.stdout) == (0, f"{words}: {adopted}\n"), done.stderr
    assert whole_tree(hand_made) == adopted


def test_an_adopted_tree_is_proved_anew_but_never_made_anew(hand_made: Site) -> None:
    assert hand_made.run("adopt").returncode == 0
    adopted = hand_made.link.readlink()
    choose_adopted(hand_made, adopted.name)
    hand_made.spec["required_headers"] = ["shared.h", "cuda.h"]
    assert hand_made.status()["changed_reason"] == "proved against other expectations"
    assert hand_made.run("install").returncode == 0
    described = json.loads((adopted / ".toolkit.json").read_text())
    assert (described["adopted"], described["required_headers"]) == (True, ["shared.h", "cuda.h"])
    hand_made.spec["required_headers"] = ["cublas_v2.h"]
    done = hand_made.run("install")
    assert done.returncode == 1
    assert f"{adopted}: the proof failed (header origin); its files are as they" in done.stderr
    (adopted / "bin/by-hand").unlink()
    done = hand_made.run("install")
    assert done.returncode == 1
    assert f"{adopted}: 1 missing (adopted); mend it, or choose another source" in done.stderr
    assert hand_made.trees() == [adopted.name]


def test_an_adopted_tree_that_is_not_there_is_named(copied: Site) -> None:
    before = copied.link.readlink()
    choose_adopted(copied, "cuda-0123456789abcdef")
    done = copied.run("install")
    assert done.returncode == 1
    assert "cuda-0123456789abcdef: no tree of that name was adopted or installed" in done.stderr
    assert copied.link.readlink() == before
    choose_adopted(copied, "cuda-full")
    done = copied.run("install")
    assert (done.returncode, "adopted: must be a text like /cuda-" in done.stderr) == (2, True)


def test_what_a_killed_proof_leaves_is_not_extra(copied: Site) -> None:
    for name in ("..proof.json.a1_b2c3d", ".census.json.a1_b2c3d"):
        (copied.link / name).touch()
    assert run(copied, "census", copied.link).returncode == 0
    (copied.link / "bin/..proof.json.a1_b2c3d").touch()
    done = run(copied, "census", copied.link)
    assert (done.returncode, "1 extra" in done.stderr) == (1, True)


def test_a_proof_that_cannot_be_noted_down_is_good_all_the_same(copied: Site) -> None:
    """As on a disk that is full or mounted read-only."""
    (copied.link / ".proof.json").unlink()
    (copied.link / ".proof.json").mkdir()
    proof = [copied.programs / "cuda-proof", copied.link]
    done = subprocess.run(proof, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert sorted(path.name for path in copied.link.glob(".*")) == [".proof.json", ".toolkit.json"]


def test_a_tree_that_nothing_describes_is_named_with_the_way_out(copied: Site) -> None:
    (copied.link / ".toolkit.json").unlink()
    proof = [copied.programs / "cuda-proof", copied.link]
    done = subprocess.run(proof, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert is_one_line(done.stderr, "cuda-proof")
    assert "was neither installed nor adopted by cuda-install" in done.stderr
    assert "take it in with cuda-install adopt" in done.stderr
    spec = copied.folder / "spec.json"
    spec.write_text(json.dumps(copied.spec))
    done = subprocess.run([*proof, "--spec", spec], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def not_adopted(site: Site, *words: str, code: int = 1, user: int | None = None) -> None:
    before = snapshot(site.folder)
    command = site.arguments("adopt")
    spec = site.folder / "spec.json"
    done = subprocess.run(command, capture_output=True, text=True, check=False, user=user)
    assert done.returncode == code, done.stderr
    assert is_one_line(done.stderr, "cuda-install"), done.stderr
    for word in words:
        assert word in done.stderr
    own = ("spec.json ", "toolkits ", "toolkits/.lock ")  # the test's own file, and the lock
    assert [line for line in snapshot(site.folder) if not line.startswith(own)] == [
        line for line in before if not line.startswith(own)
    ]
    spec.unlink()


def test_an_unproved_tree_is_left_alone(hand_made: Site) -> None:
    header = hand_made.link / "include/cuda.h"
    header.write_text(header.read_text().replace("12080", "12000"))
    not_adopted(hand_made, "the proof failed (versions)", "it was left as it is")
    header.write_text(header.read_text().replace("12000", "12080"))
    hand_made.spec = {**hand_made.spec, "compiler_version": "12.8.61"}
    not_adopted(hand_made, "nvcc is 12.8.93, expected 12.8.61")


def test_a_shell_that_borrows_from_elsewhere_is_left_alone(hand_made: Site) -> None:
    (hand_made.link / "nvvm/libdevice/libdevice.10.bc").unlink()
    (hand_made.link / "nvvm/libdevice/libdevice.10.bc").symlink_to("/etc/hostname")
    not_adopted(hand_made, "1 of its links lead out of it", "libdevice.10.bc -> /etc/hostname")


def test_nothing_a_file_and_a_foreign_link_are_not_adopted(hand_made: Site) -> None:
    elsewhere = hand_made.folder / "elsewhere"
    hand_made.link.rename(elsewhere)
    not_adopted(hand_made, "nothing stands there to adopt")
    hand_made.link.write_text("a file")
    not_adopted(hand_made, "is no folder")
    hand_made.link.unlink()
    hand_made.link.symlink_to(elsewhere)
    not_adopted(hand_made, "is no folder")
    done = hand_made.run("install")
    assert done.returncode == 1
    assert f"a symlink to {elsewhere} stands there" in done.stderr
    assert hand_made.link.readlink() == elsewhere


def test_a_census_of_another_program_is_not_overwritten(hand_made: Site) -> None:
    (hand_made.link / "census.json").write_text('{"people": 3}')
    not_adopted(hand_made, "census.json: is no census of this installer", code=2)


def test_a_tree_on_another_file_system_is_not_copied(hand_made: Site) -> None:
    elsewhere = Path("/dev/shm") / f"toolkit-test-{os.getpid()}"
    elsewhere.mkdir()
    try:
        assert elsewhere.stat().st_dev != hand_made.folder.stat().st_dev
        command = hand_made.arguments("adopt")
        command[command.index("--root") + 1] = str(elsewhere / "toolkits")
        before = snapshot(hand_made.link)
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 1
        assert f"{hand_made.link}: is on another file system than" in done.stderr
        assert is_one_line(done.stderr, "cuda-install")
        assert snapshot(hand_made.link) == before
        assert list(elsewhere.iterdir()) == []
    finally:
        shutil.rmtree(elsewhere)


def test_a_tree_of_another_user_is_not_adopted(
    hand_made: Site, tmp_path_factory: pytest.TempPathFactory
) -> None:
    if os.getuid() == 0:
        for folder in (hand_made.folder, *hand_made.folder.parents):
            if folder.owner() == "root" and str(folder).startswith("/tmp/pytest"):
                folder.chmod(folder.stat().st_mode | 0o055)
        for parent in hand_made.programs.parents:
            if str(parent).startswith("/tmp/pytest"):
                parent.chmod(parent.stat().st_mode | 0o055)
        not_adopted(hand_made, "cannot be written by this user", user=NOBODY)
    else:
        hand_made.link.chmod(0o555)
        not_adopted(hand_made, "cannot be written by this user")


def old_tree(site: Site, name: str) -> Path:
    """Another installed tree, as far as a collector can see."""
    tree = site.root / name
    (tree / "bin").mkdir(parents=True)
    (tree / ".toolkit.json").write_text("{}")
    (tree / "bin/data").write_bytes(bytes(1000))
    return tree


def collect(site: Site, *more: object) -> subprocess.CompletedProcess[str]:
    return run(site, "collect", "--root", site.root, "--link", site.link, *more)


def test_what_nothing_names_is_collected(copied: Site) -> None:
    current = copied.link.resolve()
    running, kept, old = (old_tree(copied, f"cuda-{n * 16}") for n in "123")
    foreign = copied.root / "cuda-by-hand"
    foreign.mkdir()
    release = copied.folder / "releases/skinny-1/release.json"
    release.parent.mkdir(parents=True)
    release.write_text(json.dumps({"paths": {"toolkit": str(running)}}))
    releases = ("--releases", release.parent.parent)
    (copied.root / ".removing.killed").mkdir()
    done = collect(copied, *releases, "--keep", kept)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"removed {old} (1.0 kB)\n1 trees removed, 1002 bytes\n"
    stand = sorted([".lock", *(path.name for path in (current, running, kept, foreign))])
    assert sorted(path.name for path in copied.root.iterdir()) == stand
    assert collect(copied, *releases, "--keep", kept).stdout == "0 trees removed, 0 bytes\n"
    whole_tree(copied)


@pytest.mark.parametrize(
    ("more", "code", "words"),
    [
        ([], 1, "name what must stay"),
        (["--releases", "/nonexistent"], 2, "what it needs is not known"),
        (["--keep", "/nonexistent"], 1, "to be kept, but is no folder"),
    ],
)
def test_nothing_is_collected_unless_it_is_known_what_must_stay(
    copied: Site, more: list[str], code: int, words: str
) -> None:
    old = old_tree(copied, "cuda-0123456789abcdef")
    done = collect(copied, *more)
    assert (done.returncode, words in done.stderr) == (code, True), done.stderr
    assert is_one_line(done.stderr, "cuda-install")
    assert old.is_dir()


def test_at_a_mistyped_place_nothing_is_collected_or_made(copied: Site) -> None:
    old = old_tree(copied, "cuda-0123456789abcdef")
    copied.link.unlink()
    done = collect(copied, "--keep", old)
    assert (done.returncode, f"{copied.link}: leads nowhere" in done.stderr) == (1, True)
    copied.root.rename(copied.folder / "elsewhere")
    done = collect(copied, "--keep", copied.folder)
    assert (done.returncode, f"{copied.root}: is no folder" in done.stderr) == (1, True)
    assert not copied.root.exists()
    assert len(list((copied.folder / "elsewhere").glob("cuda-*"))) == 2


@pytest.mark.skipif(os.getuid() != 0, reason="only root can work in another user's folder")
def test_root_does_not_collect_where_another_user_works(copied: Site) -> None:
    """Its lock file would lock that user out."""
    (copied.root / ".lock").unlink()
    os.chown(copied.root, NOBODY, -1)
    done = collect(copied, "--keep", copied.link)
    assert (done.returncode, f"{copied.root}: belongs to nobody" in done.stderr) == (2, True)
    assert not (copied.root / ".lock").exists()


def test_a_release_that_cannot_be_read_keeps_everything(copied: Site) -> None:
    old = old_tree(copied, "cuda-0123456789abcdef")
    (copied.folder / "releases/skinny-1").mkdir(parents=True)
    done = collect(copied, "--releases", copied.folder / "releases")
    assert (done.returncode, "skinny-1/release.json" in done.stderr) == (2, True)
    assert old.is_dir()
