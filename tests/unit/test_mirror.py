"""The lab's CUDA mirror: where Debian's archive is, and archives that repeat to the byte."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab import debian, mirror
from lab.errors import LabError

ONE_LINE = """\
# deb http://commented.example/debian bookworm main
deb-src http://source.example/debian trixie main
deb [arch=amd64 signed-by=/usr/share/keyrings/x.gpg] http://mirror.example/debian/ bookworm main
deb http://mirror.example/debian-security bookworm-security main
"""
DEB822 = """\
Types: deb
URIs: http://security.example/debian-security
Suites: bookworm-security
Components: main

Enabled: no
Types: deb
URIs: http://off.example/debian
Suites: bookworm
Components: main

# a comment
Types: deb deb-src
URIs:
 http://mirror.example/debian
Suites: bookworm
# a comment amid a stanza
 bookworm-updates
Components: main
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg
"""


@pytest.mark.parametrize(("text", "suffix"), [(ONE_LINE, "list"), (DEB822, "sources")])
def test_the_archive_is_found_as_apt_finds_it(tmp_path: Path, text: str, suffix: str) -> None:
    parts = tmp_path / "parts"
    parts.mkdir()
    (parts / f"x.{suffix}").write_text(text)
    listed = subprocess.run(
        ["apt-get", "-oDir::Etc::SourceList=/dev/null", f"-oDir::Etc::SourceParts={parts}",
         f"-oDir::State={tmp_path}", "update", "--print-uris"],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    wanted = re.findall(r"^'(\S+)/dists/bookworm/InRelease'", listed, re.MULTILINE)
    assert [debian.debian_mirror(text)] == wanted


WORDS = st.from_regex(r"[abc][abcxyz0-3.\-/:]{0,19}", fullmatch=True)


@given(host=WORDS, suite=st.sampled_from(debian.DEBIAN_SUITES), more=st.lists(WORDS, max_size=3))
def test_both_formats_say_the_same(host: str, suite: str, more: list[str]) -> None:
    address = f"http://{host}"
    suites = [*(f"{word}-security" for word in more), suite]
    one_line = "".join(f"deb [trusted=yes] {address} {item} main\n" for item in suites)
    deb822 = f"Types: deb\nURIs: {address}\nSuites: {' '.join(suites)}\nComponents: main\n"
    assert debian.debian_mirror(one_line) == debian.debian_mirror(deb822) == address.rstrip("/")


@given(st.text())
def test_any_other_text_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(LabError, match="names no Debian archive"):
        debian.debian_mirror(text)


@pytest.mark.parametrize("text", ["deb http://x.example/ubuntu noble main\n", "deb file:/x ./\n"])
def test_another_vendors_archive_is_not_taken(text: str) -> None:
    with pytest.raises(LabError):
        debian.debian_mirror(text)


def test_the_same_files_give_the_same_archive(tmp_path: Path) -> None:
    digests = []
    for run in ("first", "second"):
        tree = tmp_path / run
        (tree / "bin").mkdir(parents=True)
        (tree / "bin/tool").write_text("tool")
        (tree / "bin/tool").chmod(0o755 if run == "first" else 0o700)
        (tree / "bin/link").symlink_to("tool")
        os.utime(tree / "bin/tool", (len(run), len(run)))
        _, entry = mirror._pack(tree, "part", "1.0", tmp_path / f"{run}-mirror")
        described = entry["linux-x86_64"]
        archive = tmp_path / f"{run}-mirror" / described["relative_path"]
        assert described["size"] == str(archive.stat().st_size)
        assert described["sha256"] == hashlib.sha256(archive.read_bytes()).hexdigest()
        digests.append(described["sha256"])
    assert digests[0] == digests[1]
    listing = subprocess.run(
        ["tar", "-tvf", archive], capture_output=True, text=True, check=True
    ).stdout
    assert listing.splitlines()[-1].startswith("-rwxr-xr-x root/root")
    assert "part-linux-x86_64-1.0-archive/bin/link -> tool" in listing
