"""Where engine control keeps its files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Places:
    """Every path, below `root` (`/` on a host, another folder in tests)."""

    root: Path = Path("/")

    @property
    def state(self) -> Path:
        """The one persistent fact: which release is committed. Root's."""
        return self.root / "var/lib/fable-engine/state.json"

    @property
    def history(self) -> Path:
        """One line of JSON a switch, for people. Root's."""
        return self.root / "var/lib/fable-engine/history.jsonl"

    @property
    def state_copy(self) -> Path:
        """The same state once more, for the case that `state` is damaged. Root's."""
        return self.state.with_name("state.copy.json")

    @property
    def releases(self) -> Path:
        """One folder a release. Root's."""
        return self.root / "var/lib/fable-engine/releases"

    def release(self, name: str) -> Path:
        """The rendered release `name`. Root's."""
        return self.releases / name / "release.json"

    @property
    def trial(self) -> Path:
        """The candidate of a running switch. Root's; a reboot erases it."""
        return self.root / "run/fable-engine/trial"

    @property
    def lock(self) -> Path:
        """Held while a switch runs. Root's."""
        return self.root / "run/fable-engine/switch.lock"

    @property
    def state_lock(self) -> Path:
        """Held while `state` is changed. Root's."""
        return self.root / "run/fable-engine/state.lock"

    @property
    def start(self) -> Path:
        """What the latest start of the unit runs. Root's."""
        return self.root / "run/fable-engine/start.json"

    @property
    def verdict(self) -> Path:
        """How the latest start was judged. Root's."""
        return self.root / "run/fable-engine/verdict.json"

    @property
    def hold(self) -> Path:
        """Who drained the engine and why: while it stands, the engine stays down. Root's."""
        return self.root / "run/fable-engine/hold.json"

    @property
    def boots(self) -> Path:
        """Logs of the latest starts. The service user's: root only reads here."""
        return self.root / "var/log/fable-engine/boots"

    def boot_log(self, invocation: str) -> Path:
        """The log of the start with this systemd invocation id."""
        return self.boots / f"{invocation}.log"
