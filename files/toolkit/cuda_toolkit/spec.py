"""The specification of a toolkit: which archives make it, and what its proof expects."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from hostlib.errors import EXIT_UNABLE, HostError

LAYOUT = 1  # raise when the same archives are merged into another tree
SPEC_FILE = ".toolkit.json"
TREE = "cuda-"  # begins the name of every tree
_SHA256 = re.compile(r"[0-9a-f]{64}")
_TREE = re.compile(rf"{TREE}[0-9a-f]{{16}}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]*")
_LOCATION = re.compile(r"\S(.*\S)?")
_RELATIVE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+-]*(/[A-Za-z0-9_][A-Za-z0-9._+-]*)*")


@dataclass(frozen=True)
class Component:
    """One archive of the toolkit; `size` in bytes, `relative_path` below the base address."""

    name: str
    version: str
    relative_path: str
    size: int
    sha256: str

    @property
    def archive_name(self) -> str:
        return self.relative_path.rpartition("/")[2]


@dataclass(frozen=True)
class Expected:
    """What a proof holds a toolkit against.

    Args:
        cuda_version: `CUDA_VERSION` and `CUDART_VERSION` of its headers (12080 is 12.8).
        compiler_version: nvcc's own version, as in `12.8.93`.
        required_headers: headers that must be there, as written in an `#include`.
    """

    cuda_version: int
    compiler_version: str
    required_headers: tuple[str, ...]


@dataclass(frozen=True)
class Archives:
    """NVIDIA's redistributable archives, at its own address or a mirror's (URL or folder)."""

    base_url: str
    manifest: str
    manifest_sha256: str
    components: tuple[Component, ...]

    @property
    def size(self) -> int:
        return sum(component.size for component in self.components)

    @property
    def identity(self) -> dict[str, Any]:
        """What determines the files that come of it."""
        return {
            "manifest_sha256": self.manifest_sha256,
            "components": sorted(
                [item.name, item.version, item.sha256] for item in self.components
            ),
        }


@dataclass(frozen=True)
class Runfile:
    """NVIDIA's self-installing file, at a path or URL; `size` in bytes."""

    location: str
    size: int
    sha256: str

    @property
    def identity(self) -> dict[str, Any]:
        """What determines the files that come of it."""
        return {"runfile_sha256": self.sha256}


@dataclass(frozen=True)
class Adopted:
    """A tree that stands below the root already, by its name; nothing is fetched for it."""

    tree: str


@dataclass(frozen=True)
class Spec:
    """A toolkit: where its files come from, and what its proof expects."""

    source: Archives | Runfile | Adopted
    expected: Expected


def canonical(value: object) -> bytes:
    """The one JSON text of `value`, to be digested."""
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def to_json(value: object) -> bytes:
    """`value` as these programs write it to files, for people too."""
    return json.dumps(value, indent=1).encode() + b"\n"


def tree_name(spec: Spec) -> str:
    """Folder name of the tree: a digest of what determines the files in it."""
    if isinstance(spec.source, Adopted):
        return spec.source.tree
    return name_of({"layout": LAYOUT, **spec.source.identity})


def name_of(content: object) -> str:
    """Folder name of the tree that `content` determines."""
    return f"{TREE}{hashlib.sha256(canonical(content)).hexdigest()[:16]}"


def load_spec(path: Path) -> Spec:
    """Read and check a specification file.

    Raises:
        HostError: unreadable, unknown or missing keys, or a value of the wrong form.
    """
    return parse_spec(_read_json(path), f"{path}")


def parse_spec(raw: dict[str, Any], place: str) -> Spec:
    """Check a specification: its expectations, and its archives' keys, `runfile` or `adopted`.

    Raises:
        HostError: names `place`, the key and what it must be.
    """
    kind = next((key for key in ("runfile", "adopted") if key in raw), None)
    own = {kind} if kind else {field.name for field in fields(Archives)}
    _keys(raw, own | {field.name for field in fields(Expected)}, place)
    source: Archives | Runfile | Adopted
    if kind == "adopted":
        source = Adopted(_text(raw, "adopted", _TREE, place))
    else:
        source = _runfile(raw, place) if kind else _archives(raw, place)
    return Spec(source, _expected(raw, place))


def load_expected(path: Path) -> Expected:
    """The expectations in a specification.

    Raises:
        HostError: unreadable, or a value of the wrong form.
    """
    return _expected(_read_json(path), f"{path}")


def expected_of(tree: Path) -> Expected:
    """The expectations that an installed or adopted tree was proved against.

    Raises:
        HostError: it is neither, or its description is damaged.
    """
    if not (tree / SPEC_FILE).exists():
        raise _unusable(
            f"{tree}: was neither installed nor adopted by cuda-install, so what it should be is "
            "not known; take it in with cuda-install adopt, or name expectations with --spec"
        )
    return load_expected(tree / SPEC_FILE)


def tree_description(name: str, identity: dict[str, Any], expected: Expected) -> dict[str, Any]:
    """What an installed tree says about itself in `.toolkit.json`."""
    return {"tree": name, **identity, **asdict(expected)}


def described_anew(tree: Path, expected: Expected) -> dict[str, Any]:
    """The description in the installed `tree`, with other expectations."""
    return {**_read_json(tree / SPEC_FILE), **asdict(expected)}


def _read_json(path: Path) -> dict[str, Any]:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise _unusable(f"{path}: is not there; name a specification with --spec") from None
    except ValueError as error:
        raise _unusable(f"{path}: is no JSON ({error}); write it anew") from None
    if not isinstance(raw, dict):
        raise _wrong(f"{path}", "a JSON object")
    return raw


def _archives(raw: dict[str, Any], place: str) -> Archives:
    components = raw["components"]
    if not isinstance(components, list) or not components:
        raise _wrong(f"{place}: components", "a list of at least one component")
    checked = tuple(
        _component(item, f"{place}: components[{index}]") for index, item in enumerate(components)
    )
    for field in ("name", "archive_name"):
        names = [getattr(item, field) for item in checked]
        for twice in sorted({name for name in names if names.count(name) > 1}):
            raise _unusable(f"{place}: components: {twice} stands there twice; remove one")
    return Archives(
        base_url=_text(raw, "base_url", _LOCATION, place),
        manifest=_text(raw, "manifest", _NAME, place),
        manifest_sha256=_text(raw, "manifest_sha256", _SHA256, place),
        components=checked,
    )


def _runfile(raw: dict[str, Any], place: str) -> Runfile:
    place = f"{place}: runfile"
    found = raw["runfile"]
    if not isinstance(found, dict):
        raise _wrong(place, "an object")
    _keys(found, {field.name for field in fields(Runfile)}, place)
    return Runfile(
        location=_text(found, "location", _LOCATION, place),
        size=_number(found, "size", place),
        sha256=_text(found, "sha256", _SHA256, place),
    )


def _component(raw: object, place: str) -> Component:
    if not isinstance(raw, dict):
        raise _wrong(place, "an object")
    _keys(raw, {field.name for field in fields(Component)}, place)
    return Component(
        name=_text(raw, "name", _NAME, place),
        version=_text(raw, "version", _NAME, place),
        relative_path=_text(raw, "relative_path", _RELATIVE, place),
        size=_number(raw, "size", place),
        sha256=_text(raw, "sha256", _SHA256, place),
    )


def _expected(raw: dict[str, Any], place: str) -> Expected:
    _keys(raw, {field.name for field in fields(Expected)}, place, others=True)
    headers = raw["required_headers"]
    if not isinstance(headers, list) or not all(
        isinstance(header, str) and _RELATIVE.fullmatch(header) for header in headers
    ):
        raise _wrong(f"{place}: required_headers", "a list of relative paths")
    return Expected(
        cuda_version=_number(raw, "cuda_version", place),
        compiler_version=_text(raw, "compiler_version", re.compile(r"\d+\.\d+\.\d+"), place),
        required_headers=tuple(headers),
    )


def _keys(raw: dict[str, Any], names: set[str], place: str, others: bool = False) -> None:
    for name in sorted(names - raw.keys()):
        raise _unusable(f"{place}: key {name!r} is missing; add it")
    for name in sorted(raw.keys() - names):
        if not others:
            known = ", ".join(sorted(names))
            raise _unusable(f"{place}: key {name!r} is unknown; known are {known}")


def _text(raw: dict[str, Any], key: str, form: re.Pattern[str], place: str) -> str:
    value = raw[key]
    if not isinstance(value, str) or not form.fullmatch(value):
        raise _wrong(f"{place}: {key}", f"a text like /{form.pattern}/")
    return value


def _number(raw: dict[str, Any], key: str, place: str) -> int:
    value = raw[key]
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise _wrong(f"{place}: {key}", "a whole number above zero")
    return value


def _wrong(place: str, wanted: str) -> HostError:
    return _unusable(f"{place}: must be {wanted}; correct it")


def _unusable(message: str) -> HostError:
    return HostError(message, exit_code=EXIT_UNABLE)
