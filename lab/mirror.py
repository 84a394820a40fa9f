"""The lab's CUDA mirror: NVIDIA's layout and manifest, made from real CUDA 12.8 parts.

The wheels carry headers, runtime, ptxas and libdevice of CUDA 12.8; the compiler drivers that no
wheel carries (nvcc, cicc, cudafe++, fatbinary, nvlink, bin2c, cuobjdump) are Debian's, of 12.4.
All of it is under NVIDIA's licence: it is built where it is used and belongs in no repository.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cuda_toolkit.archives import PLATFORM
from cuda_toolkit.spec import Component
from hostlib.download import sha256_file

from lab.debian import fetch_package
from lab.downloads import download_wheels
from lab.errors import LabError
from stack.exits import EXIT_NO_SPACE

PARTS = Path(__file__).with_name("mirror_parts.json")
NEEDED_BYTES = 1 << 30

# nvcc reads this beside its own binary; the paths are those of the flat layout.
NVCC_PROFILE = """\
TOP = $(_HERE_)/..
NVVMIR_LIBRARY_DIR = $(TOP)/nvvm/libdevice
LD_LIBRARY_PATH += $(TOP)/lib:
PATH += $(TOP)/nvvm/bin:$(_HERE_):
INCLUDES += "-I$(TOP)/include" $(_SPACE_)
LIBRARIES =+ $(_SPACE_) "-L$(TOP)/lib64/stubs" "-L$(TOP)/lib64"
"""
EMPTY_AR = b"!<arch>\n"  # nvcc -shared always names libcudadevrt.a, and no wheel carries it

# libnvvm is a library for other compilers: 64 MB that nvcc does not open.
LEAVE_OUT = shutil.ignore_patterns("__init__.py", ".metadata", "libnvvm.so")

DEBIAN_NVCC = {
    "usr/lib/nvidia-cuda-toolkit/bin/nvcc": "bin/nvcc",
    "usr/lib/nvidia-cuda-toolkit/bin/cicc": "nvvm/bin/cicc",
    "usr/lib/nvidia-cuda-toolkit/bin/crt/link.stub": "bin/crt/link.stub",
    "usr/lib/nvidia-cuda-toolkit/bin/crt/prelink.stub": "bin/crt/prelink.stub",
    "usr/bin/bin2c": "bin/bin2c",
    "usr/bin/cudafe++": "bin/cudafe++",
    "usr/bin/fatbinary": "bin/fatbinary",
    "usr/bin/nvlink": "bin/nvlink",
    "usr/bin/__nvcc_device_query": "bin/__nvcc_device_query",
}
DEBIAN_CUOBJDUMP = {"usr/bin/cuobjdump": "bin/cuobjdump"}
DEBIAN_LICENSE = "usr/share/doc/nvidia-cuda-toolkit/copyright"


@dataclass(frozen=True)
class MirrorInfo:
    """A finished mirror: its folder, and what an installation from it must be told."""

    folder: Path
    manifest: str
    manifest_sha256: str
    cuda_version: int
    compiler_version: str
    required_headers: tuple[str, ...]
    components: tuple[Component, ...]

    def lock(self, base_url: str) -> dict[str, Any]:
        """The installer's specification, for a mirror that is reached at `base_url`."""
        return {
            "base_url": base_url,
            "manifest": self.manifest,
            "manifest_sha256": self.manifest_sha256,
            "cuda_version": self.cuda_version,
            "compiler_version": self.compiler_version,
            "required_headers": list(self.required_headers),
            "components": [asdict(component) for component in self.components],
        }


def build(cache: Path, apt_source: str) -> MirrorInfo:
    """The mirror, built below `cache` when it is not there yet.

    Args:
        cache: folder of the lab's caches; the mirror is `mirror-<digest of the recipe>` in it.
        apt_source: address of the Debian archive that this machine reaches.

    Raises:
        LabError: no space, a part cannot be had, or its digest is not the pinned one.
    """
    final = cache / f"mirror-{recipe_digest()}"
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / ".lock-mirror").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if final.exists() and not _is_whole(final):
            _say(f"{final}: is damaged; building it anew")
            shutil.rmtree(final)
        if not final.exists():
            for stale in cache.glob("mirror-tmp.*"):
                shutil.rmtree(stale)
            if shutil.disk_usage(cache).free < NEEDED_BYTES:
                raise LabError(
                    f"{cache}: less than {NEEDED_BYTES >> 30} GiB free; free some, or choose a "
                    "cache folder on a larger disk",
                    exit_code=EXIT_NO_SPACE,
                )
            with tempfile.TemporaryDirectory(prefix="mirror-tmp.", dir=cache) as work:
                staged = Path(work) / "mirror"
                _build(staged, Path(work), apt_source)
                staged.rename(final)
    return _info(final)


def recipe_digest() -> str:
    """Digest of all that determines the mirror: this file and the list of parts."""
    return hashlib.sha256(Path(__file__).read_bytes() + PARTS.read_bytes()).hexdigest()[:16]


def _build(staged: Path, work: Path, apt_source: str) -> None:
    parts: dict[str, Any] = json.loads(PARTS.read_text(encoding="utf-8"))
    _say("fetching the CUDA 12.8 wheels and Debian's compiler drivers (130 MB)")
    with ThreadPoolExecutor() as pool:
        wheels = pool.submit(_fetch_wheels, parts["wheels"], work / "wheels")
        debian = pool.submit(fetch_package, parts["debian"], work, apt_source)
        trees = {**wheels.result(), "debian": debian.result()}
    _say("laying out the components")
    versions = _lay_out(trees, parts, work / "components")
    _say("packing the archives")
    staged.mkdir()
    manifest: dict[str, Any] = {
        "release_date": "2025-03-06",
        "release_label": parts["release"],
        "release_product": "cuda",
    }
    with ThreadPoolExecutor() as pool:
        packed = pool.map(
            lambda item: _pack(work / "components" / item[0], item[0], item[1], staged),
            sorted(versions.items()),
        )
        manifest.update(packed)
    with (staged / f"redistrib_{parts['release']}.json").open("w", encoding="utf-8") as stream:
        stream.write(json.dumps(manifest, indent=4) + "\n")
        stream.flush()
        os.fsync(stream.fileno())


def _info(mirror: Path) -> MirrorInfo:
    parts: dict[str, Any] = json.loads(PARTS.read_text(encoding="utf-8"))
    manifest = mirror / f"redistrib_{parts['release']}.json"
    content = manifest.read_bytes()
    components = tuple(
        Component(
            name=name,
            version=entry["version"],
            relative_path=entry[PLATFORM]["relative_path"],
            size=int(entry[PLATFORM]["size"]),
            sha256=entry[PLATFORM]["sha256"],
        )
        for name, entry in json.loads(content).items()
        if isinstance(entry, dict)
    )
    return MirrorInfo(
        folder=mirror,
        manifest=manifest.name,
        manifest_sha256=hashlib.sha256(content).hexdigest(),
        cuda_version=parts["cuda_version"],
        compiler_version=parts["compiler_version"],
        required_headers=tuple(parts["required_headers"]),
        components=components,
    )


def _is_whole(mirror: Path) -> bool:
    """Whether every archive that the mirror's manifest names is there and unchanged."""
    try:
        return all(
            sha256_file(mirror / component.relative_path) == component.sha256
            for component in _info(mirror).components
        )
    except (OSError, ValueError, KeyError):
        return False


def _fetch_wheels(wheels: dict[str, dict[str, str]], folder: Path) -> dict[str, Path]:
    """Download and unpack the wheels; package name -> folder of its component's files."""
    folder.mkdir()
    download_wheels("CUDA wheels", wheels, folder)
    trees: dict[str, Path] = {}
    for name in wheels:
        tree = folder / name
        stem = name.replace("-", "_")
        (wheel,) = folder.glob(f"{stem}-*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(tree)  # noqa: S202 - its digest is the pinned one
        (component,) = (path for path in (tree / "nvidia").iterdir() if path.is_dir())
        (license_file,) = tree.glob("*.dist-info/License.txt")
        shutil.copyfile(license_file, component / "LICENSE")
        trees[name] = component
    return trees


def _lay_out(trees: dict[str, Path], parts: dict[str, Any], components: Path) -> dict[str, str]:
    """Put the files of each component where NVIDIA's archives have them; name -> version."""
    wheels = parts["wheels"]
    versions: dict[str, str] = {}
    for component, package in (
        ("cuda_nvcc", "nvidia-cuda-nvcc-cu12"),
        ("cuda_cudart", "nvidia-cuda-runtime-cu12"),
        ("cuda_cccl", "nvidia-cuda-cccl-cu12"),
        ("cuda_profiler_api", "nvidia-cuda-profiler-api-cu12"),
        ("cuda_nvtx", "nvidia-nvtx-cu12"),
    ):
        shutil.copytree(trees[package], components / component, ignore=LEAVE_OUT)
        versions[component] = wheels[package]["version"]
    nvcc = components / "cuda_nvcc"
    _copy(trees["debian"], DEBIAN_NVCC, nvcc)
    (nvcc / "bin/ptxas").chmod(0o755)  # a zip file's modes are not unpacked
    (nvcc / "bin/nvcc.profile").write_text(NVCC_PROFILE)
    library = components / "cuda_cudart/lib"
    (library / "libcudart.so").symlink_to("libcudart.so.12")
    (library / "libcudadevrt.a").write_bytes(EMPTY_AR)
    cuobjdump = components / "cuda_cuobjdump"
    _copy(trees["debian"], {**DEBIAN_CUOBJDUMP, DEBIAN_LICENSE: "LICENSE"}, cuobjdump)
    versions["cuda_cuobjdump"] = parts["compiler_version"]
    return versions


def _copy(source: Path, files: dict[str, str], target: Path) -> None:
    for origin, place in files.items():
        (target / place).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source / origin, target / place)


def _pack(tree: Path, name: str, version: str, staged: Path) -> tuple[str, dict[str, Any]]:
    """Pack one component; the same files give the same archive. Returns its manifest entry."""
    top = f"{name}-{PLATFORM}-{version}-archive"
    relative = f"{name}/{PLATFORM}/{top}.tar.xz"
    archive = staged / relative
    archive.parent.mkdir(parents=True)
    with (
        archive.open("wb") as output,
        subprocess.Popen(["xz", "-0", "-T1"], stdin=subprocess.PIPE, stdout=output) as xz,
    ):
        assert xz.stdin is not None
        with tarfile.open(fileobj=xz.stdin, mode="w|", format=tarfile.GNU_FORMAT) as tar:
            for path in [tree, *sorted(tree.rglob("*"))]:
                member = tar.gettarinfo(path, arcname=str(top / path.relative_to(tree)))
                member.uid = member.gid = member.mtime = 0
                member.uname = member.gname = "root"
                member.mode = 0o755 if path.is_dir() or member.mode & 0o100 else 0o644
                with path.open("rb") if member.isreg() else io.BytesIO() as stream:
                    tar.addfile(member, stream)
        xz.stdin.close()
        xz.wait()
        os.fsync(output.fileno())
    if xz.returncode != 0:
        raise LabError(f"{archive}: xz failed; look for a full disk, then run again")
    content = archive.read_bytes()
    return name, {
        "name": name,
        "license": "CUDA Toolkit",
        "license_path": f"{name}/LICENSE.txt",
        "version": version,
        PLATFORM: {
            "relative_path": relative,
            "sha256": sha256_file(archive),
            "md5": hashlib.md5(content, usedforsecurity=False).hexdigest(),
            "size": str(len(content)),
        },
    }


def _say(text: str) -> None:
    print(f"mirror: {text}", file=sys.stderr, flush=True)
