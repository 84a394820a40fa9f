"""Refresh the locks; behind `script/lock`."""

from __future__ import annotations

import hashlib
import json
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml
from checkpoint.manifest import parse
from cuda_toolkit.archives import PLATFORM
from hostlib.atomic import write_file
from hostlib.download import join, read_bytes
from hostlib.errors import EXIT_UNABLE, HostError

from stack import FILES, REPOSITORY
from stack.artifacts import LOCK
from stack.exits import EXIT_FAILED, EXIT_NO_NETWORK
from stack.hub import manifest_at

# input → lock; all universal, for control machines and hosts differ in Python and architecture
PYTHON_LOCKS = (
    REPOSITORY / "requirements" / "control.in",
    REPOSITORY / "requirements" / "dev.in",
    FILES / "gateway" / "requirements.in",
    REPOSITORY / "lab" / "engine" / "requirements.in",
)
OLDEST_PYTHON = "3.11"


def main(arguments: list[str]) -> int:
    """Refresh all locks; `--upgrade` takes newer versions, otherwise only missing pins change."""
    unknown = [argument for argument in arguments if argument != "--upgrade"]
    if unknown:
        print(f"script/lock: {unknown[0]}: no such option; see --help", file=sys.stderr)
        return 2
    for source in PYTHON_LOCKS:
        code = compile_lock(source, upgrade="--upgrade" in arguments)
        if code:
            return code
    try:
        refresh_toolkit(LOCK, wanted_components())
        refresh_base(LOCK)
    except HostError as error:
        print(f"script/lock: {error.message}", file=sys.stderr)
        for line in error.details:
            print(f"  {line}", file=sys.stderr)
        return EXIT_NO_NETWORK if error.exit_code == EXIT_UNABLE else EXIT_FAILED
    return 0


def compile_lock(source: Path, *, upgrade: bool) -> int:
    """Write the hash lock beside `source`; returns the exit code."""
    lock = source.with_suffix(".lock")
    command = [
        sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--universal",
        "--generate-hashes", "--no-header", "--no-config", "--python-version", OLDEST_PYTHON,
        str(source.relative_to(REPOSITORY)), "--output-file", str(lock.relative_to(REPOSITORY)),
        *(["--upgrade"] if upgrade else []),
    ]  # fmt: skip
    print(f"locking {lock.relative_to(REPOSITORY)}", flush=True)
    done = subprocess.run(command, cwd=REPOSITORY, check=False)
    return EXIT_NO_NETWORK if done.returncode else 0


def wanted_components() -> list[str]:
    """The components that the settings name."""
    data = runpy.run_path(str(REPOSITORY / "group_data" / "v100.py"))
    names: list[str] = data["toolkit"]["components"]
    return names


def refresh_toolkit(lock: Path, names: list[str]) -> None:
    """Write version, path, size and sha256 of the components `names` from the pinned manifest.

    Only the lock's list of components is replaced, comments elsewhere stay; the file is replaced
    as a whole.

    Raises:
        HostError: the manifest cannot be had, has another digest than the pinned one, or lacks a
            component; nothing was written then.
    """
    text = lock.read_text()
    content: dict[str, Any] = yaml.safe_load(text)
    toolkit = content["toolkit"]
    address = join(toolkit["base_url"], toolkit["manifest"])
    manifest = read_bytes(address)
    digest = hashlib.sha256(manifest).hexdigest()
    if digest != toolkit["manifest_sha256"]:
        raise HostError(
            f"{address}: its sha256 is not the pinned one; nothing was written. Check the release "
            f"at NVIDIA, then pin the new digest in {lock.name}",
            f"pinned {toolkit['manifest_sha256']}",
            f"got    {digest}",
        )
    wanted = components(json.loads(manifest), names)
    if wanted == toolkit.get("components"):
        print(f"{lock.name}: {len(wanted)} toolkit components agree with the pinned manifest")
        return
    written = with_components(text, wanted)
    toolkit["components"] = wanted
    if yaml.safe_load(written) != content:
        raise HostError(f"{lock.name}: its toolkit.components is no plain list; restore the file")
    write_file(lock, written.encode())
    print(f"{lock.name}: {len(wanted)} toolkit components written from the pinned manifest")


def refresh_base(lock: Path) -> None:
    """Write the manifest of the checkpoint's published base, from the commit that the lock pins.

    Raises:
        HostError: the hub cannot be asked, or lists other files of this commit than are committed;
            nothing was written then.
    """
    base = yaml.safe_load(lock.read_text())["checkpoint"]["base"]
    path = REPOSITORY / base["manifest"]
    raw = manifest_at(base["source"])
    if path.exists():
        if path.read_bytes() == raw:
            print(f"{path.name}: agrees with {base['source']}")
            return
        if parse(path.read_bytes(), str(path)).provenance == parse(raw, base["source"]).provenance:
            raise HostError(
                f"{path}: not as {base['source']} lists the same commit now; nothing was written. "
                "Find out why, then remove the file and run again"
            )
    path.parent.mkdir(exist_ok=True)
    write_file(path, raw)
    print(f"{path.name}: written from {base['source']}")


def with_components(text: str, wanted: list[dict[str, Any]]) -> str:
    """The lock's text with `wanted` as the list of the toolkit's components."""
    lines = ["  components:"]
    for entry in wanted:
        lines += [
            f"    {'- ' if key == 'name' else '  '}{key}: {_plain(value)}"
            for key, value in entry.items()
        ]
    block = "\n".join(lines) + "\n"
    return re.sub(r"(?m)^  components:.*\n(?:   .*\n)*", lambda _: block, text, count=1)


def _plain(value: object) -> object:
    """Versions and digests may look like numbers to YAML."""
    return json.dumps(value) if isinstance(value, str) and not re.match(r"[a-z]", value) else value


def components(manifest: dict[str, Any], names: list[str]) -> list[dict[str, Any]]:
    """The lock's entries for `names`, from NVIDIA's manifest (sizes are strings there).

    Raises:
        HostError: the manifest lacks one.
    """
    missing = [name for name in names if PLATFORM not in manifest.get(name, {})]
    if missing:
        raise HostError(f"the manifest has no {', '.join(missing)} for {PLATFORM}")
    return [
        {
            "name": name,
            "version": manifest[name]["version"],
            "relative_path": manifest[name][PLATFORM]["relative_path"],
            "size": int(manifest[name][PLATFORM]["size"]),
            "sha256": manifest[name][PLATFORM]["sha256"],
        }
        for name in names
    ]
