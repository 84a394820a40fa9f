"""JSON from outside: an object, no key twice, not nested beyond the parser's depth."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hostlib.errors import HostError


def read_limited(path: Path, limit_bytes: int) -> bytes:
    """The whole of a small file.

    Raises:
        HostError: it is larger than `limit_bytes`; no more than that is read.
        OSError: it cannot be read.
    """
    with path.open("rb") as stream:
        content = stream.read(limit_bytes + 1)
    if len(content) > limit_bytes:
        raise HostError(f"{path}: larger than {limit_bytes} bytes; this is not the file expected")
    return content


def parse_object(raw: bytes | str, where: str, way_out: str) -> dict[str, Any]:
    """The JSON object in `raw` (UTF-8).

    Args:
        where: the place that errors name.
        way_out: what a person can do about a damaged text, as the end of the error's line.

    Raises:
        HostError: not JSON, not an object, or a key stands twice.
    """

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                raise HostError(f"{where}: key {key[:100]!r} stands twice; {way_out}")
            found[key] = value
        return found

    try:
        text = raw if isinstance(raw, str) else raw.decode("utf-8")
        parsed: object = json.loads(text, object_pairs_hook=once)
    except RecursionError:
        raise HostError(f"{where}: nested too deeply; {way_out}") from None
    except ValueError as error:
        raise HostError(f"{where}: is not valid JSON ({error}); {way_out}") from None
    if not isinstance(parsed, dict):
        raise HostError(f"{where}: holds no JSON object; {way_out}")
    return parsed
