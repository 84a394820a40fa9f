"""What the toolkit's tests share: the programs as they lie on a host, and invented archives."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import http.server
import json
import os
import shutil
import struct
import subprocess
import tarfile
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cuda_toolkit.nvcc import TOOLS

ROOT = Path(__file__).parents[2]
PATIENCE_S = 300
STANDIN_NVCC = """\
#!/bin/sh
# A stand-in for nvcc.
here=${0%/*}
mode= out= previous=
for word; do
    case $word in -M | -E | -cubin) mode=$word ;; esac
    if [ "$previous" = -o ]; then out=$word; fi
    previous=$word
done
if [ "$mode" = -cubin ]; then exec cp "$here/standin.cubin" "$out"; fi
exec gcc $mode -x c++ -I"$here/../include" -D__CUDACC_VER_MAJOR__=12 -D__CUDACC_VER_MINOR__=8 \
    -D__CUDACC_VER_BUILD__=93 "$previous"
"""
FILES: dict[str, dict[str, str | bytes]] = {
    "cuda_nvcc": {"LICENSE": "nvcc's terms", "bin/tool": "a tool", "include/shared.h": "same"},
    "cuda_cudart": {
        "LICENSE": "cudart's terms",
        "lib/libx.so.1": "lib",
        "include/shared.h": "same",
    },
}


def lay_out_programs(folder: Path) -> Path:
    """Merge programs and their packages into `folder`, as a deploy does; the folder of programs."""
    shutil.copytree(ROOT / "files/toolkit", folder, dirs_exist_ok=True)
    shutil.copytree(ROOT / "files/hostlib/hostlib", folder / "hostlib")
    return folder / "bin"


@dataclass
class Site:
    """A mirror, the specification that belongs to it, and the places of an installation."""

    base: Path
    programs: Path
    folder: Path
    spec: dict[str, Any]

    @property
    def root(self) -> Path:
        return self.folder / "toolkits"

    @property
    def link(self) -> Path:
        return self.folder / "cuda-full"

    def arguments(self, command: str, *more: str) -> list[str]:
        spec = self.folder / "spec.json"
        spec.write_text(json.dumps(self.spec))
        return [
            str(self.programs / "cuda-install"), command, "--spec", str(spec),
            "--root", str(self.root), "--link", str(self.link), *more,
        ]  # fmt: skip

    def run(
        self, command: str, *more: str, before: tuple[str, ...] = ()
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*before, *self.arguments(command, *more)],
            check=False,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )

    def status(self) -> dict[str, Any]:
        done = self.run("status")
        assert done.returncode == 0, done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    def archive(self, name: str) -> Path:
        (found,) = (item for item in self.spec["components"] if item["name"] == name)
        return self.base / str(found["relative_path"])

    def trees(self) -> list[str]:
        """What stands in the root for everyone to see; hidden folders left out."""
        if not self.root.exists():
            return []
        return sorted(path.name for path in self.root.iterdir() if not path.name.startswith("."))


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    """A server of `folder` on this machine's loopback; its address."""
    handler = functools.partial(QuietHandler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    """Serves files, and does not talk about clients that were killed."""

    def log_message(self, format: str, *args: object) -> None:
        pass

    def copyfile(self, source: Any, outputfile: Any) -> None:
        with contextlib.suppress(ConnectionError):
            super().copyfile(source, outputfile)


def write_tree(files: Mapping[str, str | bytes], tree: Path) -> None:
    """Write `files` (path -> content) below `tree`; a text that begins with #! is a program."""
    for name, content in files.items():
        path = tree / name
        path.parent.mkdir(parents=True, exist_ok=True)
        data = content.encode() if isinstance(content, str) else content
        path.write_bytes(data)
        path.chmod(0o755 if data.startswith(b"#!") else 0o644)


def make_archive(files: Mapping[str, str | bytes], target: Path, top: str) -> None:
    """Pack `files` (path -> content) below the folder `top`, with the tar program."""
    target.parent.mkdir(parents=True, exist_ok=True)
    tree = target.parent / top
    write_tree(files, tree)
    subprocess.run(["tar", "-cJf", target, "-C", target.parent, top], check=True)
    shutil.rmtree(tree)


def make_hostile_archive(target: Path, members: list[tarfile.TarInfo]) -> None:
    """Pack members as they are, with whatever names and links they have."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(target, "w:xz", preset=0) as tar:
        for member in members:
            tar.addfile(member)


def make_site(
    folder: Path, programs: Path, components: Mapping[str, Mapping[str, str | bytes]] = FILES
) -> Site:
    """An invented mirror below `folder`; by default sound archives that make no toolkit."""
    base = folder / "mirror"
    for name, files in components.items():
        top = f"{name}-linux-x86_64-1.0-archive"
        make_archive(files, base / name / "linux-x86_64" / f"{top}.tar.xz", top)
    spec = {
        "base_url": str(base),
        "manifest": "redistrib.json",
        "manifest_sha256": "",
        "components": [],
        "cuda_version": 12080,
        "compiler_version": "12.8.93",
        "required_headers": ["shared.h"],
    }
    site = Site(base, programs, folder, spec)
    lock_archives(site)
    return site


def standin_components(noise_bytes: int = 0) -> dict[str, dict[str, str | bytes]]:
    """Components of a stand-in toolkit, small and quick, that the real proof accepts.

    Its nvcc is a shell script: gcc preprocesses for it, and what it "compiles" is an ELF header
    that claims to be for sm_70 and of CUDA 12.8. For tests of the installer alone.
    """
    cubin = bytearray(64)
    cubin[:5] = b"\x7fELF\x02"
    struct.pack_into("<HI", cubin, 18, 190, 128)
    struct.pack_into("<I", cubin, 48, 70)
    nvcc: dict[str, str | bytes] = {name: f"a stand-in for {name}" for name in TOOLS}
    nvcc["bin/nvcc"] = STANDIN_NVCC
    nvcc["bin/standin.cubin"] = bytes(cubin)
    nvcc["bin/noise"] = os.urandom(noise_bytes)
    cudart: dict[str, str | bytes] = {f"include/crt/h{n}.h": f"// {n}\n" for n in range(200)}
    cudart["include/cuda.h"] = "#define CUDA_VERSION 12080\n"
    cudart["include/cuda_runtime_api.h"] = "#define CUDART_VERSION 12080\n"
    cudart["include/shared.h"] = "// required\n"
    cudart["lib/noise"] = os.urandom(noise_bytes)
    curand: dict[str, str | bytes] = {
        "include/curand.h": "// random\n",
        "include/curand_kernel.h": "// kernel\n",
        "lib/libcurand.so.10": os.urandom(1000),
    }
    return {"cuda_nvcc": nvcc, "cuda_cudart": cudart, "libcurand": curand}


def whole_tree(site: Site) -> Path:
    """Assert that the link leads to a tree that is all that its census says, by other tools."""
    found = site.status()
    assert found["changed_reason"] is None
    tree = site.link.resolve(strict=True)
    assert str(tree) == found["path"]
    assert_census(tree)
    return tree


def assert_census(tree: Path) -> None:
    """Assert that `tree` holds what its census says and nothing else, by sha256sum and find."""
    census = json.loads((tree / "census.json").read_text())
    sums = "".join(f"{entry['sha256']}  {name}\n" for name, entry in census["files"].items())
    subprocess.run(["sha256sum", "--check", "--quiet"], cwd=tree, input=sums, text=True, check=True)
    listed = subprocess.run(
        ["find", ".", "(", "-type", "f", "-o", "-type", "l", ")", "-printf", "%P\n"],
        cwd=tree, capture_output=True, text=True, check=True,
    ).stdout.splitlines()  # fmt: skip
    own = {"census.json", ".toolkit.json", ".proof.json"}
    assert set(listed) == {*census["files"], *census["links"]} | own


def lock_archives(site: Site) -> None:
    """Write manifest and specification anew from the archives that stand in the mirror."""
    site.spec["components"] = [
        {
            "name": path.parent.parent.name,
            "version": "1.0",
            "relative_path": str(path.relative_to(site.base)),
            "size": path.stat().st_size,
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        }
        for path in sorted(site.base.rglob("*.tar.xz"))
    ]
    write_manifest(site, manifest_of(site.spec["components"]))


def manifest_of(components: list[dict[str, Any]]) -> dict[str, Any]:
    """The manifest of `components` in NVIDIA's format; sizes are texts in it."""
    return {
        "release_label": "12.8.1",
        **{
            item["name"]: {
                "version": item["version"],
                "linux-x86_64": {
                    "relative_path": item["relative_path"],
                    "sha256": item["sha256"],
                    "size": str(item["size"]),
                },
            }
            for item in components
        },
    }


def write_manifest(site: Site, manifest: dict[str, Any]) -> None:
    """Put `manifest` into the mirror and its digest into the specification."""
    content = json.dumps(manifest).encode()
    (site.base / site.spec["manifest"]).write_bytes(content)
    site.spec["manifest_sha256"] = hashlib.sha256(content).hexdigest()


def flip_byte(path: Path) -> None:
    """Change one bit in the middle of a file; its size stays."""
    with path.open("r+b") as stream:
        stream.seek(path.stat().st_size // 2)
        byte = stream.read(1)[0]
        stream.seek(-1, os.SEEK_CUR)
        stream.write(bytes([byte ^ 1]))


def is_one_line(text: str, program: str) -> bool:
    """Whether standard error ends in one line of `program`, details indented, no traceback."""
    lines = [line for line in text.splitlines() if not line.startswith("  ")]
    return bool(lines) and lines[-1].startswith(f"{program}: ") and "Traceback" not in text
