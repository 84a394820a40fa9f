"""JSON from outside, read strictly: no duplicate keys, no surprises of type."""

from __future__ import annotations

import re
import stat
from collections.abc import Sequence
from pathlib import Path

from hostlib import strict_json
from hostlib.errors import HostError

LIMIT_BYTES = 4 << 20  # an index of 2,194 tensors has 0.3 MB
NAMED_AT_MOST = 5
NAME_CHARACTERS_AT_MOST = 200
_SHA256 = re.compile(r"[0-9a-f]{64}")
_HALF_CHARACTER = re.compile("[\ud800-\udfff]")  # JSON can escape one half of a pair alone
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,199}")


def parse_object(raw: bytes, where: str) -> dict[str, object]:
    """The JSON object in `raw`; raises HostError as `hostlib.strict_json.parse_object`."""
    return strict_json.parse_object(raw, where, "the file is damaged")


def read_object(path: Path) -> dict[str, object]:
    """The JSON object in file `path`; raises HostError as `parse_object` and `read_small`."""
    return parse_object(read_small(path), str(path))


def read_small(path: Path) -> bytes:
    """The whole of `path`; raises HostError if it is absent, no regular file, or large."""
    require_regular(path)
    return strict_json.read_limited(path, LIMIT_BYTES)


def as_object(value: object, where: str) -> dict[str, object]:
    """`value` itself if it is a JSON object; raises HostError otherwise."""
    if not isinstance(value, dict):
        raise HostError(f"{where}: missing, or not a JSON object")
    return value


def as_text(value: object, where: str) -> str:
    """`value` itself if it is a string of whole characters; raises HostError otherwise."""
    if not isinstance(value, str) or _HALF_CHARACTER.search(value):
        raise HostError(f"{where}: missing, or not a string")
    return value


def as_count(value: object, where: str, least: int = 0, most: int = 1 << 62) -> int:
    """`value` itself if it is a whole number within the bounds; raises HostError otherwise."""
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise HostError(f"{where}: missing, or not a whole number from {least} to {most}")
    return value


def as_sha256(value: object, where: str) -> str:
    """`value` itself if it is a hex sha256; raises HostError otherwise."""
    if not isinstance(value, str) or not _SHA256.fullmatch(value):
        raise HostError(f"{where}: missing, or not a sha256 (64 lower-case hex digits)")
    return value


def as_file_name(value: object, where: str) -> str:
    """`value` itself if it names a file inside one folder; raises HostError otherwise."""
    if not isinstance(value, str) or not _FILE_NAME.fullmatch(value):
        raise HostError(f"{where}: {str(value)[:100]!r} is not a plain file name")
    return value


def require_regular(path: Path) -> None:
    """Raise HostError unless `path` is a regular file, not a symlink."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        raise HostError(f"{path}: missing; the checkpoint is incomplete") from None
    if not stat.S_ISREG(mode):
        raise HostError(f"{path}: not a regular file; a checkpoint holds files, not links")


def few(names: Sequence[str]) -> str:
    """The first names and how many more there are."""
    shown = ", ".join(
        name
        if name.isprintable() and len(name) <= NAME_CHARACTERS_AT_MOST
        else repr(name[:NAME_CHARACTERS_AT_MOST])
        for name in names[:NAMED_AT_MOST]
    )
    more = len(names) - NAMED_AT_MOST
    return f"{shown} and {more} more" if more > 0 else shown
