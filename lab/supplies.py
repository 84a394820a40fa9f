"""What the lab's hosts install from: a site with mirror, checkpoint and wheel, and its lock.

The lock has the shape of `stack/artifacts.lock.yaml`; only the bytes behind it are the lab's.
"""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml
from checkpoint import manifest

from lab import checkpoint, debian, image, mirror, wheel
from lab.places import CACHE, SITE_URL

ENGINE_REQUIREMENTS = Path(__file__).parent / "engine" / "requirements.lock"


@dataclass(frozen=True)
class Supplies:
    """The folder that the site serves, and the lock that names its bytes."""

    site: Path
    lock: Path


def build_supplies(base: Path) -> Supplies:
    """Build (or take from the cache) everything that the lab's hosts fetch."""
    apt_source = debian.debian_mirror(image.apt_sources(base))
    toolkit = mirror.build(CACHE, apt_source)
    with image.cache_lock("supplies"):
        family = checkpoint.build_family(CACHE)
        wheels, engine = _wheel()
        lock = {
            "toolkit": {**toolkit.lock(f"{SITE_URL}/toolkit"), "runfiles": [_runfile(toolkit)]},
            "checkpoint": {
                name: {
                    "source": f"{SITE_URL}/checkpoints/{name}",
                    "manifest": str(folder / manifest.MANIFEST),
                }
                for name, folder in asdict(family).items()
            },
            "engine": {
                "wheel": {
                    "distribution": "lab-engine-standin",
                    "url": f"{SITE_URL}/wheels/{engine.name}",
                    "sha256": hashlib.sha256(engine.read_bytes()).hexdigest(),
                },
                "requirements": str(wheels / ENGINE_REQUIREMENTS.name),
            },
        }
        composed = _compose(lock, {
            "toolkit": toolkit.folder, "checkpoints": family.whole.parent, "wheels": wheels,
        })  # fmt: skip
        for kind, used in (
            ("mirror", toolkit.folder), ("checkpoints", family.whole.parent), ("engine", wheels),
            ("site", composed.lock.parent),
        ):  # fmt: skip
            image.prune(kind, used)
        return composed


def _runfile(toolkit: mirror.MirrorInfo) -> dict[str, Any]:
    """What is expected of an adopted tree is its runfile's; the lab serves no such file."""
    return {
        "release": "12.8.1",
        "url": f"{SITE_URL}/runfile",
        "size": 1,
        "sha256": "0" * 64,
        "compiler_version": toolkit.compiler_version,
    }


def _wheel() -> tuple[Path, Path]:
    """The engine stand-in's wheel and its hash lock, in a folder named by both digests.

    Everybody may read it: pyinfra runs as the person, the lab as root.
    """
    staged = Path(tempfile.mkdtemp(prefix="engine-tmp.", dir=CACHE))
    built = wheel.build(staged)
    shutil.copy(ENGINE_REQUIREMENTS, staged)
    parts = [path.read_bytes() for path in sorted(staged.iterdir())]
    folder = CACHE / f"engine-{hashlib.sha256(b''.join(parts)).hexdigest()[:16]}"
    if folder.exists():
        shutil.rmtree(staged)
    else:
        for path in staged.iterdir():
            path.chmod(0o644)
        staged.chmod(0o755)
        staged.rename(folder)
    return folder, folder / built.name


def _compose(lock: dict[str, Any], parts: dict[str, Path]) -> Supplies:
    """A folder named by the lock's digest: links to the parts, and the lock itself."""
    text = "# Written by the lab; the bytes behind these digests are stand-ins.\n"
    text += yaml.safe_dump(lock, sort_keys=False)
    final = CACHE / f"site-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    if not final.exists():
        staged = Path(tempfile.mkdtemp(prefix="site-tmp.", dir=CACHE))
        staged.chmod(0o755)
        served = staged / "served"
        served.mkdir()
        for name, target in parts.items():
            (served / name).symlink_to(target)
        (staged / "artifacts.lock.yaml").write_text(text)
        staged.rename(final)
    return Supplies(site=final / "served", lock=final / "artifacts.lock.yaml")
