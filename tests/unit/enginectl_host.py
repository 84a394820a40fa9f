"""A host as a switch sees it: real engines, real launches and real signals, one port.

Only systemd is replaced, by a small program of its name; what depends on systemd itself is tried
in the lab.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from enginectl import systemd

from tests.unit.enginectl_support import content, free_port, good_log, lay_down

WAIT_S = 30.0

# systemd as far as a switch knows it: one unit with the programs before and after its start, begun
# anew whenever it ends, until it is told to stop.
SYSTEMCTL = r"""#!/usr/bin/python3 -IS
import fcntl, json, os, pathlib, resource, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_DFL)  # units inherit nothing from the one who asks
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
home, program = pathlib.Path(os.environ["STANDIN"]), os.environ["PROGRAM"]
file = home / "engine.json"
GONE = {"active": "inactive", "sub": "dead", "pid": 0, "invocation": "", "runner": 0}
def known():
    found = json.loads(file.read_text()) if file.exists() else GONE
    return found if alive(found["runner"]) else {**GONE, "invocation": found["invocation"]}
def save(**values):
    (home / "engine.tmp").write_text(json.dumps({**GONE, "runner": os.getpid(), **values}))
    (home / "engine.tmp").replace(file)
def alive(pid):
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
def spawn(invocation, verb, **more):
    environment = {"PATH": os.environ["PATH"], "STANDIN": str(home), "PROGRAM": program,
                   "INVOCATION_ID": invocation, **more}
    return subprocess.Popen([program, verb, "--root", str(home)], env=environment,
                            stdin=subprocess.DEVNULL, stdout=(home / "journal").open("a"),
                            stderr=subprocess.STDOUT, start_new_session=True)
def end(process):
    process.terminate()
    try:
        process.wait(3)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
def leave(*_):
    raise KeyboardInterrupt
def run():
    signal.signal(signal.SIGTERM, leave)
    children = []
    try:
        serve(children)
    except KeyboardInterrupt:
        for child in reversed(children):
            end(child)
def serve(children):
    while True:
        invocation = os.urandom(16).hex()
        children[:] = []
        save(active="activating", sub="start-pre", invocation=invocation)
        children.append(spawn(invocation, "before-start"))
        if children[0].wait() == 0:
            main = spawn(invocation, "launch")
            children[:] = [main]
            now = {"invocation": invocation, "pid": main.pid}
            save(active="activating", sub="start-post", **now)
            post = spawn(invocation, "after-start", MAINPID=str(main.pid))
            children.append(post)
            if post.wait() == 0:
                save(active="active", sub="running", **now)
                main.wait()
            end(main)
        save(active="activating", sub="auto-restart", invocation=invocation)
        time.sleep(0.5)
def stop():
    runner = known()["runner"]
    if runner:
        os.kill(runner, signal.SIGTERM)
    while alive(runner):
        time.sleep(0.02)
def start():
    if not known()["runner"]:
        subprocess.Popen([sys.argv[0], "run"], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                         stderr=subprocess.DEVNULL, start_new_session=True)
        while not known()["runner"]:
            time.sleep(0.02)
def show(unit):
    if unit == "fable-switch.service":
        pid = home / "switch.pid"
        on = pid.exists() and alive(int(pid.read_text() or 0))
        invocation = f"{int(pid.read_text()):032x}" if on else ""
        print(f"LoadState=loaded\nActiveState={'active' if on else 'inactive'}\nInvocationID="
              f"{invocation}\n")
        return
    now = known()
    print(f"LoadState=loaded\nActiveState={now['active']}\nSubState={now['sub']}\nNRestarts=0\n"
          f"MainPID={now['pid']}\nInvocationID={now['invocation']}\nControlGroup=\n"
          f"UnitFileState=enabled\nFragmentPath={home}/unit\n")
words = sys.argv[1:]
if words[0] == "run":
    run()
elif words[0] == "show":
    for unit in words[3:]:
        show(unit)
elif words[0] == "--no-block" and os.fork():
    pass
else:
    words = [word for word in words if word != "--no-block"]
    if len(words) < len(sys.argv) - 1:
        os.setsid()
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(null, descriptor)
    with (home / "jobs").open("w") as jobs:
        fcntl.flock(jobs, fcntl.LOCK_EX)
        if words[0] in ("stop", "restart"):
            stop()
        if words[0] in ("start", "restart"):
            start()
"""

RUN = r"""
import json, os, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from enginectl import exits, switch
from enginectl.paths import Places
from hostlib.errors import run_main
places = Places(Path(sys.argv[2]))
(places.root / "switch.pid").write_text(str(os.getpid()))
def main():
    record = switch.run(places, sys.argv[3], "a reason", "someone", retry="--retry" in sys.argv,
                        back="--back" in sys.argv)
    print(json.dumps(record.as_dict()))
    return exits.EXIT_OF_OUTCOME[record.outcome]
sys.exit(run_main("enginectl", main))
"""


SETTLE = r"""
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from enginectl import settle
from enginectl.paths import Places
from hostlib.errors import run_main
def main():
    print(settle.settle_beside_a_switch(Places(Path(sys.argv[2])), by="timer"))
    return 0
sys.exit(run_main("enginectl", main))
"""


def wait_until(true: Callable[[], bool], what: str) -> None:
    """Wait for something that must come true.

    Raises:
        AssertionError: it has not in WAIT_S.
    """
    deadline = time.monotonic() + WAIT_S
    while not true():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


class Host:
    """A root folder with an installed program, a stand-in for systemd, and one port."""

    def __init__(self, root: Path, program: Path) -> None:
        self.root = root
        self.program = program
        self.port = free_port()
        self.lines = root / "lines"
        self.lines.write_text("\n".join(good_log()))
        tools = root / "tools"
        tools.mkdir()
        (tools / "systemctl").write_text(SYSTEMCTL)
        (tools / "systemctl").chmod(0o755)
        self.environment = {
            "PATH": f"{tools}:/usr/bin:/bin",
            "STANDIN": str(root),
            "PROGRAM": str(program),
        }

    def release(self, mark: str, **changes: Any) -> str:
        env = {"LINES": str(self.lines), "MARK": mark, **changes.pop("env", {})}
        return lay_down(
            self.root, content(self.root / "parts" / mark, self.port, env=env, **changes)
        )

    def begin(self, name: str, *options: str) -> subprocess.Popen[str]:
        library = str(self.program.parent.parent)
        return subprocess.Popen(
            [sys.executable, "-c", RUN, library, str(self.root), name, *options],
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def switch(self, name: str, *options: str) -> tuple[int, dict[str, Any], str]:
        """Exit code, record (empty if refused) and what was said."""
        process = self.begin(name, *options)
        out, err = process.communicate(timeout=WAIT_S)
        assert "Traceback" not in err, err
        return process.returncode, json.loads(out) if out else {}, err

    @property
    def settle_command(self) -> list[str]:
        return [sys.executable, "-c", SETTLE, str(self.program.parent.parent), str(self.root)]

    def settle(self) -> tuple[int, str]:
        """Exit code and what was said."""
        done = subprocess.run(
            self.settle_command,
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert "Traceback" not in done.stderr, done.stderr
        return done.returncode, done.stdout + done.stderr

    def answers(self, mark: str) -> bool:
        """Whether the release of this mark runs and was found to answer."""
        show = self.systemctl("show", "--property", "", "fable-engine.service")
        return "ActiveState=active\n" in show and self.running_or_none() == mark

    def systemctl(self, *words: str) -> str:
        return subprocess.run(
            ["systemctl", *words],
            env=self.environment,
            capture_output=True,
            text=True,
            check=True,
        ).stdout

    @property
    def pid(self) -> int:
        return systemd.parse_properties(self.systemctl("show", "--property", "", "x")).main_pid

    @property
    def running(self) -> str:
        """The mark of the release whose engine runs, read from the process itself."""
        variables = Path(f"/proc/{self.pid}/environ").read_bytes().split(b"\0")
        return next(word[5:].decode() for word in variables if word.startswith(b"MARK="))

    def running_or_none(self) -> str | None:
        """As `running`; None while no process of an engine is there."""
        try:
            return self.running
        except (OSError, StopIteration):
            return None

    @property
    def state(self) -> dict[str, Any]:
        file = self.root / "var/lib/fable-engine/state.json"
        found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
        return found

    @property
    def history(self) -> list[dict[str, Any]]:
        """The lines of ended switches."""
        return [event for event in self.events if event["event"] == "switch ended"]

    @property
    def events(self) -> list[dict[str, Any]]:
        file = self.root / "var/lib/fable-engine/history.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()]

    @property
    def trial(self) -> Path:
        return self.root / "run/fable-engine/trial"


def state_of(committed: str, previous: str | None = None, **changes: Any) -> dict[str, Any]:
    """A state file's content."""
    state: dict[str, Any] = {
        "committed": committed,
        "previous": previous,
        "rejected": {},
        "failed_boots": 0,
    }
    return {"format": 1, **state, **changes}
