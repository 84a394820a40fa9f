"""Debian's archive: where it is, read from an apt source list; and packages from it."""

from __future__ import annotations

from pathlib import Path

from hostlib.download import sha256_file

from lab.downloads import run
from lab.errors import LabError

KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
DEBIAN_SUITES = ("stable", "testing", "unstable", "sid", "bullseye", "bookworm", "trixie", "forky")


def debian_mirror(sources_text: str) -> str:
    """The address of the Debian archive in an apt source list, in one-line or deb822 format.

    Security and update suites, source entries and other vendors' suites are passed over.

    Raises:
        LabError: the text names no Debian archive.
    """
    for kind, address, suite in [*_one_line(sources_text), *_deb822(sources_text)]:
        if kind == "deb" and suite in DEBIAN_SUITES and address.startswith(("http", "file:")):
            return address.rstrip("/")
    raise LabError(
        "apt source list: it names no Debian archive; add the line that this machine uses for "
        "Debian's main suite"
    )


def fetch_package(part: dict[str, str], work: Path, apt_source: str) -> Path:
    """Download a package of Debian's through a private apt state and unpack it; the folder.

    Args:
        part: its "suite", "section", "package", "version" and "sha256".
        work: an empty folder for the state.
        apt_source: address of the Debian archive that this machine reaches.

    Raises:
        LabError: it cannot be had, or its digest is not the pinned one.
    """
    root = work / "apt"
    for name in ("state/lists/partial", "cache/archives/partial", "debs"):
        (root / name).mkdir(parents=True)
    (root / "status").touch()
    (root / "sources.list").write_text(
        f"deb [arch=amd64 signed-by={KEYRING}] {apt_source} {part['suite']} {part['section']}\n"
    )
    options = [
        f"-oDir::Etc::SourceList={root}/sources.list",
        "-oDir::Etc::SourceParts=-",
        "-oDir::Etc::Preferences=/dev/null",
        "-oDir::Etc::PreferencesParts=-",
        f"-oDir::State={root}/state",
        f"-oDir::State::Status={root}/status",
        f"-oDir::Cache={root}/cache",
        "-oAPT::Architecture=amd64",
        "-oAPT::Sandbox::User=root",  # the private folders are not apt's own user's
        "-oAcquire::Languages=none",
        "-oAcquire::Check-Valid-Until=false",
        "-oAcquire::Retries=3",
        "-oDPkg::Lock::Timeout=120",
        "-qq",
    ]
    place = f"Debian package {part['package']}"
    run(place, ["apt-get", *options, "--error-on=any", "update"])
    wanted = f"{part['package']}={part['version']}"
    run(place, ["apt-get", *options, "download", wanted], cwd=root / "debs")
    (package,) = (root / "debs").glob("*.deb")
    digest = sha256_file(package)
    if digest != part["sha256"]:
        raise LabError(
            f"{package.name}: sha256 differs from the pinned one; nothing was built",
            f"expected {part['sha256']}",
            f"got      {digest}",
        )
    tree = work / "debian"
    run(package.name, ["dpkg-deb", "--extract", str(package), str(tree)])
    return tree


def _one_line(text: str) -> list[tuple[str, str, str]]:
    """(type, address, suite) of each one-line entry, as in sources.list(5)."""
    found = []
    for line in text.splitlines():
        words = line.partition("#")[0].split()
        if len(words) > 2 and words[0] in ("deb", "deb-src"):
            if words[1].startswith("["):
                end = next((i for i, word in enumerate(words) if word.endswith("]")), len(words))
                words[1 : end + 1] = []
            if len(words) > 3:  # a component follows: else it is a flat repository
                found.append((words[0], words[1], words[2]))
    return found


def _deb822(text: str) -> list[tuple[str, str, str]]:
    """(type, address, suite) of each combination in each enabled stanza, as in sources.list(5)."""
    found = []
    stanza: dict[str, list[str]] = {}
    field = ""
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    for line in [*lines, ""]:
        if not line.strip():
            if stanza.get("enabled", ["yes"])[0].lower() not in ("no", "false", "0", "off"):
                found += [
                    (kind, address, suite)
                    for kind in stanza.get("types", [])
                    for address in stanza.get("uris", [])
                    for suite in stanza.get("suites", [])
                ]
            stanza, field = {}, ""
        elif line[0] in " \t":
            stanza.setdefault(field, []).extend(line.split())
        elif ":" in line:
            name, _, value = line.partition(":")
            field = name.strip().lower()
            stanza[field] = value.split()
    return found
