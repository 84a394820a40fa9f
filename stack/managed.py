"""What a role lays down, as data: files, folders and links with owner and mode."""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass
from pathlib import Path, PurePath, PurePosixPath
from typing import Any

import jinja2

from stack import REPOSITORY

TEMPLATES = REPOSITORY / "templates"
EXECUTABLE = 0o755
PLAIN = 0o644


@dataclass(frozen=True)
class Owner:
    """User and group of what is laid down."""

    user: str
    group: str


ROOT = Owner("root", "root")


@dataclass(frozen=True)
class Guard:
    """Keeps a file that people may have made by hand from being overwritten unawares.

    Attributes:
        marker: text that every file of ours at this place holds.
        take_over: replace a foreign file all the same, and keep it beside as NAME.original.
        way_out: the setting that says so, for the error.
    """

    marker: str
    take_over: bool
    way_out: str


@dataclass(frozen=True)
class Entry:
    """One file, folder or link; `files/managed/managed_files.py` sets it right."""

    kind: str
    path: str
    owner: Owner
    mode: int
    content: bytes = b""
    target: str = ""
    validate: tuple[str, ...] = ()
    exclusive: bool = False
    guard: Guard | None = None

    def expectation(self) -> dict[str, Any]:
        """The entry without content: enough to tell whether it differs."""
        entry: dict[str, Any] = {
            "kind": self.kind,
            "path": self.path,
            "owner": self.owner.user,
            "group": self.owner.group,
            "mode": f"{self.mode:o}",
        }
        if self.kind == "file":
            entry["sha256"] = hashlib.sha256(self.content).hexdigest()
            if self.guard:
                entry |= {
                    "marker": self.guard.marker,
                    "take_over": self.guard.take_over,
                    "way_out": self.guard.way_out,
                }
        if self.kind == "link":
            entry["target"] = self.target
        if self.exclusive:
            entry["exclusive"] = True
        return entry

    def order(self) -> dict[str, Any]:
        """The entry with content: enough to set it right."""
        entry = self.expectation()
        if self.kind == "file":
            entry["content"] = base64.b64encode(self.content).decode()
            entry["validate"] = list(self.validate)
        return entry


def file(
    path: PurePath | str,
    content: str | bytes,
    owner: Owner = ROOT,
    mode: int = PLAIN,
    validate: tuple[str, ...] = (),
    guard: Guard | None = None,
) -> Entry:
    """A file; `validate` is an argv in which "{}" stands for the candidate."""
    data = content.encode() if isinstance(content, str) else content
    return Entry("file", str(path), owner, mode, content=data, validate=validate, guard=guard)


def directory(
    path: PurePath | str,
    owner: Owner = ROOT,
    mode: int = EXECUTABLE,
    exclusive: bool = False,
) -> Entry:
    """A folder; an exclusive one holds nothing but what is listed."""
    return Entry("directory", str(path), owner, mode, exclusive=exclusive)


def link(path: PurePath | str, target: PurePath | str, owner: Owner = ROOT) -> Entry:
    """A symlink."""
    return Entry("link", str(path), owner, 0o777, target=str(target))


def program(
    source: Path, folder: PurePosixPath, owner: Owner, packages: tuple[str, ...]
) -> list[Entry]:
    """The packages named, and the launchers of `source`, as they lie in `files/`.

    Args:
        source: a folder of `files/` with packages in it, and perhaps `bin/`.
        folder: where packages and `bin/` go on the host; both must be listed by the caller.
        owner: of everything.
        packages: folders below `source` to take; each becomes exclusive on the host.
    """
    entries: list[Entry] = []
    for package in packages:
        for path in sorted((source / package).rglob("*")):
            if "__pycache__" in path.parts:
                continue
            place = folder / path.relative_to(source)
            if path.is_dir():
                entries.append(directory(place, owner, exclusive=True))
            else:
                entries.append(file(place, path.read_bytes(), owner))
        entries.insert(0, directory(folder / package, owner, exclusive=True))
    for launcher in sorted((source / "bin").glob("*")):
        if launcher.is_file():
            place = folder / "bin" / launcher.name
            entries.append(file(place, launcher.read_bytes(), owner, EXECUTABLE))
    return entries


def render(template: str, **values: object) -> str:
    """A template of `templates/`; an undefined variable is an error."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=False,  # noqa: S701  # units and rule sets, not HTML
    )
    return environment.get_template(template).render(**values)
