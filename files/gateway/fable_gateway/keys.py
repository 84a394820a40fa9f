"""Keys: made here, kept nowhere, known by their sha256. Standard library only.

Also the control machine makes keys with this module.
"""

from __future__ import annotations

import datetime
import hashlib
import hmac
import json
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
SHA256 = re.compile(r"[0-9a-f]{64}")
PREFIX = "fable-"
KEY_BYTES = 32
MOST_IN_FLIGHT = 10_000
MOST_PER_MINUTE = 100_000


@dataclass(frozen=True)
class Key:
    """What is known of one key.

    Attributes:
        name: whose it is; stands in the journal and in the metrics.
        sha256: of the key, 64 lower-case hex digits.
        expires: the day (UTC) from whose first moment on it is refused; None: never.
        models: names that it may ask for; empty: all.
        max_in_flight: its requests inside the engine at the same time; None: no own cap.
        requests_per_minute: in any 60 seconds; None: no limit.
    """

    name: str
    sha256: str
    expires: datetime.date | None = None
    models: tuple[str, ...] = ()
    max_in_flight: int | None = None
    requests_per_minute: int | None = None

    def settings(self) -> dict[str, object]:
        """The key as the key file and the settings hold it, without limits that are not set."""
        found: dict[str, object] = {"sha256": self.sha256}
        if self.expires is not None:
            found["expires"] = self.expires.isoformat()
        if self.models:
            found["models"] = list(self.models)
        if self.max_in_flight is not None:
            found["max_in_flight"] = self.max_in_flight
        if self.requests_per_minute is not None:
            found["requests_per_minute"] = self.requests_per_minute
        return found

    def settings_line(self) -> str:
        """The line of `gateway["keys"]` in the settings; safe to commit."""
        settings = self.settings()
        value = self.sha256 if len(settings) == 1 else settings
        return f"{json.dumps(self.name)}: {json.dumps(value)},"


class KeyRing:
    """All keys, each under another name and with another sha256."""

    def __init__(self, keys: tuple[Key, ...]) -> None:
        self.keys = keys
        self._digests = [(bytes.fromhex(key.sha256), key) for key in keys]

    def find(self, presented: str) -> Key | None:
        """The key that `presented` is. Every entry is compared, each in constant time."""
        digest = hashlib.sha256(presented.encode("utf-8", "surrogateescape")).digest()
        found = None
        for known, key in self._digests:
            if hmac.compare_digest(known, digest):
                found = key
        return found

    def identify(self, headers: Mapping[str, str], today: datetime.date) -> Key | None:
        """Who sends these request headers: `Authorization: Bearer`, then `x-api-key`.

        An unknown and an expired key are both nobody's.
        """
        scheme, _, bearer = headers.get("Authorization", "").partition(" ")
        candidates = [bearer.strip() if scheme.lower() == "bearer" else ""]
        candidates.append(headers.get("x-api-key", "").strip())
        for candidate in candidates:
            key = self.find(candidate) if candidate else None
            if key and (key.expires is None or today < key.expires):
                return key
        return None


def new_key() -> str:
    """A key of 256 random bits."""
    return PREFIX + secrets.token_urlsafe(KEY_BYTES)


def sha256(key: str) -> str:
    """What is kept of a key."""
    return hashlib.sha256(key.encode()).hexdigest()


def settings_line(name: str, key: str) -> str:
    """The line of `gateway["keys"]` in the settings that makes `key` valid; safe to commit."""
    return Key(name, sha256(key)).settings_line()
