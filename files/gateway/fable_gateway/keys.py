"""Keys: made here, kept nowhere, known by their sha256."""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
PREFIX = "fable-"
KEY_BYTES = 32


@dataclass(frozen=True)
class KeyRing:
    """Name → sha256 of its key, as raw bytes."""

    digests: Mapping[str, bytes]

    def name_of(self, key: str) -> str | None:
        """Whose key this is. Every entry is compared, each in constant time."""
        presented = hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
        found = None
        for name, digest in self.digests.items():
            if hmac.compare_digest(digest, presented):
                found = name
        return found

    def identify(self, headers: Mapping[str, str]) -> str | None:
        """Who sends these request headers: `Authorization: Bearer`, then `x-api-key`."""
        scheme, _, bearer = headers.get("Authorization", "").partition(" ")
        candidates = [bearer.strip() if scheme.lower() == "bearer" else ""]
        candidates.append(headers.get("x-api-key", "").strip())
        for candidate in candidates:
            if candidate and (name := self.name_of(candidate)):
                return name
        return None


def new_key() -> str:
    """A key of 256 random bits."""
    return PREFIX + secrets.token_urlsafe(KEY_BYTES)


def settings_line(name: str, key: str) -> str:
    """The line of `gateway["keys"]` in the settings that makes `key` valid; safe to commit."""
    return f'"{name}": "{hashlib.sha256(key.encode()).hexdigest()}",'
