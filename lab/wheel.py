"""Build the stand-in's wheel with the standard library alone, byte for byte repeatable.

The lab is built without a network, so no build backend can be fetched. Run it as
`python -m lab.wheel OUT_FOLDER`; it prints the wheel's path. Exit code 0, or 2 on a wrong call.
"""

from __future__ import annotations

import base64
import hashlib
import sys
import zipfile
from pathlib import Path

import tomllib

HERE = Path(__file__).resolve().parent / "engine"
TIMESTAMP = (1980, 1, 1, 0, 0, 0)  # the zip format's epoch: the same bytes on every build
SUFFIXES = {".py", ".json"}


def _record_line(name: str, data: bytes) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    return f"{name},sha256={digest},{len(data)}\n"


def build(out: Path) -> Path:
    """Write `<name>-<version>-py3-none-any.whl` into folder `out` and return its path.

    Name, version, packages and dependencies come from pyproject.toml, which stays the one home of
    them; the layout is the binary distribution format's (METADATA, WHEEL, RECORD).
    """
    config = tomllib.loads((HERE / "pyproject.toml").read_text())
    project = config["project"]
    name = project["name"].replace("-", "_")
    info = f"{name}-{project['version']}.dist-info"
    folders = [package.replace(".", "/") for package in config["tool"]["setuptools"]["packages"]]
    sources = sorted(p for f in folders for p in (HERE / f).iterdir() if p.suffix in SUFFIXES)
    files = {p.relative_to(HERE).as_posix(): p.read_bytes() for p in sources}
    metadata = [
        "Metadata-Version: 2.1",
        f"Name: {project['name']}",
        f"Version: {project['version']}",
        f"Summary: {project['description']}",
        f"Requires-Python: {project['requires-python']}",
        *(f"Requires-Dist: {requirement}" for requirement in project["dependencies"]),
    ]
    files[f"{info}/METADATA"] = ("\n".join(metadata) + "\n").encode()
    files[f"{info}/WHEEL"] = (
        b"Wheel-Version: 1.0\nGenerator: lab-build-wheel\nRoot-Is-Purelib: true\n"
        b"Tag: py3-none-any\n"
    )
    record = "".join(_record_line(name, data) for name, data in files.items())
    files[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n".encode()

    out.mkdir(parents=True, exist_ok=True)
    wheel = out / f"{name}-{project['version']}-py3-none-any.whl"
    staged = wheel.with_suffix(".part")
    with zipfile.ZipFile(staged, "w") as archive:
        for path, data in files.items():
            entry = zipfile.ZipInfo(path, TIMESTAMP)
            entry.external_attr = 0o100644 << 16
            archive.writestr(entry, data)
    return staged.rename(wheel)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        print("usage: python -m lab.wheel OUT_FOLDER", file=sys.stderr)
        sys.exit(2)
    print(build(Path(sys.argv[1])))
