"""The proof's parts that need no compiler of CUDA: real ones are in tests/lab/test_toolkit_*.py."""

from __future__ import annotations

import dataclasses
import subprocess
import tempfile
from pathlib import Path

import pytest
from cuda_toolkit import stamp
from cuda_toolkit.environment import check_environment, host_compiler
from cuda_toolkit.headers import foreign_headers, own_names, parse_dependencies
from cuda_toolkit.nvcc import TOOLS, cubin_target
from cuda_toolkit.spec import Expected
from hypothesis import given, settings
from hypothesis import strategies as st

EXPECTED = Expected(12080, "12.8.93", ("cuda.h",))
NAMES = st.text("ab #$:é", min_size=1, max_size=6).filter(lambda name: name == name.strip())


@settings(max_examples=40, deadline=None)
@given(st.lists(NAMES, min_size=1, max_size=4, unique=True))
def test_dependencies_are_read_as_gcc_writes_them(names: list[str]) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        headers = [f"{name}.h" for name in names]
        for header in headers:
            Path(scratch, header).touch()
        source = Path(scratch, "main.c")
        source.write_text("".join(f'#include "{header}"\n' for header in headers))
        done = subprocess.run(
            ["gcc", "-M", "-nostdinc", "main.c"],
            cwd=scratch, capture_output=True, text=True, check=True,
        )  # fmt: skip
        found = [item for item in parse_dependencies(done.stdout) if not item.startswith("/")]
        assert found == ["main.c", *headers]


@pytest.mark.parametrize(
    ("path", "foreign"),
    [
        ("/usr/include/cuda_runtime.h", True),
        ("/usr/include/cuComplex.h", True),
        ("/usr/include/crt/host_config.h", True),  # by the toolkit's own list
        ("/usr/local/include/nv/target", True),
        ("/usr/include/curand.h", True),  # required, although the toolkit lacks it
        ("/usr/include/c++/12/cmath", False),
        ("/usr/include/stdio.h", False),
        ("/usr/include/curses.h", False),
        ("/usr/include/x86_64-linux-gnu/bits/host_config.h", False),
    ],
)
def test_whose_header(tmp_path: Path, path: str, foreign: bool) -> None:
    for name in ("crt/host_config.h", "nv/target", "cuda/std/cmath"):
        header = tmp_path / "include" / name
        header.parent.mkdir(parents=True, exist_ok=True)
        header.touch()
    own = own_names(tmp_path, Expected(12080, "12.8.93", ("curand.h",)))
    assert foreign_headers([Path(path)], own) == ([Path(path)] if foreign else [])


def test_a_file_that_is_no_cubin_has_no_target() -> None:
    assert cubin_target(Path("/bin/true").read_bytes()) is None
    assert cubin_target(b"\x7fELF") is None


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A folder with the parts of a compiler, none of which runs."""
    for name in TOOLS:
        path = tmp_path / "tree" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
        path.chmod(0o755)
    return (tmp_path / "tree").resolve()


def good_environment(tree: Path) -> dict[str, str]:
    return {"CUDA_HOME": str(tree), "PATH": f"{tree}/bin:/usr/bin:/bin"}


def test_the_engines_environment_must_lead_to_the_tree(tree: Path, tmp_path: Path) -> None:
    folder = tmp_path / "folder-link"
    folder.symlink_to(tree)
    for home in (tree, folder):
        assert check_environment(tree, good_environment(home), engines=True).ok
    assert not check_environment(tree, {"PATH": f"{tree}/bin"}, engines=True).ok
    assert check_environment(tree, {"PATH": "/usr/bin:/bin"}, engines=False).ok


@pytest.mark.parametrize(
    "name",
    [
        "NVCC_PREPEND_FLAGS",
        "NVCC_APPEND_FLAGS",
        "CPATH",
        "TL_CUTLASS_PATH",
        "PYTORCH_NVCC",
        "LIBRARY_PATH",
        "LIBRARIES",
    ],
)
@pytest.mark.parametrize("engines", [True, False])
def test_a_stray_variable_is_named_with_its_value(tree: Path, name: str, engines: bool) -> None:
    found = check_environment(tree, {**good_environment(tree), name: "/elsewhere"}, engines)
    assert not found.ok
    assert f"{name}=/elsewhere" in found.text


def test_another_toolkit_is_named(tree: Path, tmp_path: Path) -> None:
    other = tmp_path / "other/bin"
    other.mkdir(parents=True)
    (other / "nvcc").write_text("")
    (other / "nvcc").chmod(0o755)
    good = good_environment(tree)
    for changed, words in (
        ({"CUDA_HOME": str(other.parent)}, f"CUDA_HOME={other.parent} is not {tree}"),
        ({"PATH": f"{other}:{tree}/bin"}, f"PATH leads to {other}/nvcc"),
        ({"PATH": "/nonexistent"}, "PATH has no nvcc"),
    ):
        found = check_environment(tree, {**good, **changed}, engines=True)
        assert (found.ok, words in found.text) == (False, True), found
    (other / "nvcc").unlink()
    (other / "nvcc").symlink_to(tree / "bin/nvcc")
    found = check_environment(tree, {**good, "PATH": f"{other}:/usr/bin"}, engines=True)
    assert (found.ok, "symlink to the file" in found.text) == (False, True)


def keep(tree: Path, venv: str, expected: Expected = EXPECTED) -> dict[str, object]:
    asked = {**stamp.question(expected, good_environment(tree)), "venv": venv}
    checks = [{"name": venv, "ok": True, "text": "", "details": [], "applies": True}]
    (tree / stamp.STAMP_FILE).write_bytes(stamp.make(tree, asked, [tree / "bin/nvcc"], checks))
    return asked


def test_proofs_for_several_engines_stand_beside_each_other(tree: Path) -> None:
    asked = {venv: keep(tree, venv) for venv in ("a", "b", "a")}
    for venv, question in asked.items():
        found = stamp.answer(tree, question)
        assert found is not None
        assert found[0]["name"] == venv
    assert stamp.answer(tree, {**asked["a"], "venv": "c"}) is None
    assert len(stamp.read(tree)) == 2
    for number in range(9):
        keep(tree, str(number))
    assert len(stamp.read(tree)) == 4
    assert stamp.stale_reason(tree, EXPECTED) is None


def test_a_stamp_ends_with_the_file_that_it_hangs_on(tree: Path) -> None:
    asked = keep(tree, "a")
    assert stamp.stale_reason(tree, dataclasses.replace(EXPECTED, cuda_version=12090)) == (
        "proved against other expectations"
    )
    (tree / "bin/nvcc").write_text("changed")
    assert stamp.answer(tree, asked) is None
    assert stamp.stale_reason(tree, EXPECTED) == "bin/nvcc was changed since the proof"
    (tree / "bin/nvcc").unlink()
    assert stamp.stale_reason(tree, EXPECTED) == "bin/nvcc was removed since the proof"


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": 1}', '{"format": 2, "proofs": [1]}'])
def test_a_damaged_stamp_is_no_stamp(tree: Path, text: str) -> None:
    (tree / stamp.STAMP_FILE).write_text(text)
    assert stamp.stale_reason(tree, EXPECTED) == "never proved"


def test_every_module_and_probe_of_the_proof_is_part_of_its_digest() -> None:
    package = Path(stamp.__file__).parent
    installer = {"__init__.py", "install.py", "spec.py", "unpack.py", "stamp.py"}
    modules = {path.name for path in package.glob("*.py")} - installer
    probes = {f"probes/{path.name}" for path in (package / "probes").iterdir() if path.is_file()}
    assert set(stamp.PROGRAM) >= probes | {"proof.py", "headers.py", "probing.py", "extension.py"}
    assert all(name.startswith("probes/") or name in modules for name in stamp.PROGRAM)


def test_a_compilers_plain_name_is_looked_for_on_path_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not where the caller stands: sudo leaves the service user in the login's home."""
    (tmp_path / "gcc").mkdir()
    monkeypatch.chdir(tmp_path)
    assert host_compiler({"PATH": "/usr/bin"}) == Path("/usr/bin/gcc").resolve()
    assert host_compiler({"PATH": "", "NVCC_CCBIN": "/usr/bin"}) == Path("/usr/bin/gcc").resolve()
