"""The lab's cache: what is in use stays, what nobody used for a month goes."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from lab import image


def test_only_what_was_unused_for_long_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image, "CACHE", tmp_path)
    long_ago = time.time() - (image.KEPT_DAYS + 1) * 86400
    for name in ("site-used", "site-recent", "site-old", "mirror-old"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
        if name != "site-recent":
            os.utime(tmp_path / name, (long_ago, long_ago))
    image.prune("site", tmp_path / "site-used")
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "mirror-old",
        "site-recent",
        "site-used",
    ]
    image.prune("site", tmp_path / "site-used")
    assert (tmp_path / "site-used" / "file").exists()
