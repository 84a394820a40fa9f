"""Where a checkpoint may be fetched from: addresses whose bytes stay what they are.

An HTTP(S) base address, Hugging Face's `…/resolve/<commit>` among them; `ssh://host/folder`; a
folder.
"""

from __future__ import annotations

import re
import urllib.parse
from pathlib import Path

from hostlib import ssh
from hostlib.download import is_local
from hostlib.errors import EXIT_UNABLE, HostError

HUBS = ("huggingface.co", "hf.co")  # and all below them
PAGES = ("blob", "tree", "raw", "commit")  # of the hub: for people, or not for large files
_COMMIT = re.compile(r"[0-9a-f]{40}")


def as_source(text: str) -> str:
    """`text` as `hostlib.download.fetch` takes it, a folder with its whole path.

    Raises:
        HostError: no address, of a kind that is not known, with a password or a query in it, or
            one that may lead to other bytes tomorrow.
    """
    if not text.isprintable():
        raise _unusable(repr(text), "leave out what cannot be printed")
    if is_local(text):
        if re.match(r"[^/]+:", text):
            raise _unusable(text, "another host is written ssh://[user@]host/absolute/path")
        return str(Path(text).absolute())
    if text.startswith(ssh.SCHEME):
        ssh.command(text, 0)
        return text
    url = urllib.parse.urlsplit(text)
    if url.scheme == "file":
        return text
    if url.scheme not in ("http", "https") or not url.hostname:
        raise _unusable(text, "give http(s)://, ssh://, file:// or a folder")
    if ".." in urllib.parse.unquote(url.path).split("/"):
        raise _unusable(text, "write the path without ..")
    if url.query or url.fragment or "@" in url.netloc:
        raise _unusable(text, "leave out user, password, ? and #")
    _check_revision(text, url)
    return text


def revision(source: str) -> str | None:
    """The commit in an address of the hub's layout, if it is one."""
    parts = source.split("/resolve/", maxsplit=1)
    return parts[1].split("/")[0] if len(parts) == 2 else None


def _check_revision(text: str, url: urllib.parse.SplitResult) -> None:
    commit = revision(text)
    if commit is not None and not _COMMIT.fullmatch(commit):
        raise _mutable(text, f"{commit!r} is a branch or tag, which may move")
    host = (url.hostname or "").rstrip(".")
    if commit is None and any(f".{host}".endswith(f".{hub}") for hub in HUBS):
        page = next((part for part in url.path.split("/") if part in PAGES), None)
        raise _mutable(text, f"{page}/ is for people" if page else "it names no commit")


def _mutable(text: str, why: str) -> HostError:
    return HostError(f"{text}: {why}; use …/resolve/ and the commit's 40 hex digits")


def _unusable(text: str, way_out: str) -> HostError:
    return HostError(f"{text}: is no source of a checkpoint; {way_out}", exit_code=EXIT_UNABLE)
