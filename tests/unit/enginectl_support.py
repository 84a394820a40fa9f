"""What the tests of engine control share: an installed layout, releases, a good boot's log.

The log is written from the formats of the real engine, not from the code that reads it.
"""

from __future__ import annotations

import hashlib
import json
import os
import pwd
import shutil
import socket
import sys
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
USER = pwd.getpwuid(os.getuid()).pw_name
INVOCATION = "0123456789abcdef0123456789abcdef"

# Serves as an engine does: health, models, chat. Prints the lines of a boot first, from the file
# in LINES. DIE, DIES_WITHOUT and HANG are faults of its boot; it goes on for LINGER seconds after
# SIGTERM, and METRICS is its page.
ENGINE = r"""
import http.server, json, os, pathlib, signal, sys, threading, time
port, names = int(sys.argv[1]), sys.argv[2].split(",")
def out(text):
    print(text, flush=True)
linger = float(os.environ.get("LINGER", "0"))
signal.signal(signal.SIGTERM, lambda *_: threading.Timer(linger, os._exit, [0]).start())
class Handler(http.server.BaseHTTPRequestHandler):
    def answer(self, value):
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def do_GET(self):
        if self.path == "/metrics":
            body = pathlib.Path(os.environ.get("METRICS", os.devnull)).read_bytes()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
        elif self.path == "/v1/models":
            self.answer({"data": [{"id": name} for name in names]})
        elif self.path == "/environment":
            self.answer(dict(os.environ))
        else:
            self.answer({})
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.answer({"choices": [{"message": {"content": "one two"}}],
                     "usage": {"completion_tokens": int(os.environ.get("TOKENS", "2"))}})
    def log_message(self, *_):
        pass
if "DIE" in os.environ or not os.path.exists(os.environ.get("DIES_WITHOUT", "/")):
    out("dying")
    os._exit(0)
if "HANG" in os.environ:
    out("hanging")
    time.sleep(600)
out(pathlib.Path(os.environ["LINES"]).read_text() if "LINES" in os.environ else "booted")
print("on stderr", file=sys.stderr, flush=True)
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


# Stands in for cuda-proof: notes what it was asked and by whom, and answers as the toolkit says.
PROOF = r"""#!/usr/bin/python3 -I
import json, os, pathlib, sys, time
toolkit = pathlib.Path(sys.argv[-1])
asked = {"argv": sys.argv[1:], "environment": json.load(sys.stdin), "uid": os.getuid(),
         "gid": os.getgid(), "pid": os.getpid()}
(toolkit / "asked.tmp").write_text(json.dumps(asked))
(toolkit / "asked.tmp").replace(toolkit / "asked.json")
answer = {"code": 0, "lines": ["ok   a check"], "report": {"ok": True, "failures": []}}
if (toolkit / "answer.json").exists():
    answer = json.loads((toolkit / "answer.json").read_text())
print(*answer["lines"], sep="\n", file=sys.stderr, flush=True)
time.sleep(answer.get("seconds", 0))
print(json.dumps(answer["report"]))
sys.exit(answer["code"])
"""


def install(folder: Path) -> Path:
    """Copy the programs as they lie on a host; returns the launcher's path."""
    for source in ("engine/bin", "engine/enginectl", "hostlib/hostlib"):
        shutil.copytree(
            REPOSITORY / "files" / source,
            folder / Path(source).name,
            ignore=shutil.ignore_patterns("__pycache__"),
        )
    proof = folder / "bin" / "cuda-proof"
    proof.write_text(PROOF)
    proof.chmod(0o755)
    return folder / "bin" / "enginectl"


def free_port() -> int:
    """A port that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def content(folder: Path, port: int = 8601, **changes: Any) -> dict[str, Any]:
    """The object of a release.json whose engine is ENGINE; all its paths lie in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    program = folder / "engine.py"
    program.write_text(ENGINE)
    value: dict[str, Any] = {
        "format": 1,
        "engine": "skinny",
        "user": USER,
        "working_directory": str(folder),
        "argv": [
            sys.executable,
            str(program),
            str(port),
            "qwen38-27b,fable-27b",
            "--max-num-seqs",
            "2",
            "--gpu-memory-utilization=0.50",
            "--max-model-len",
            "135168",
            "--max-num-batched-tokens",
            "4096",
            "--speculative-config",
            '{"method":"mtp","num_speculative_tokens":7}',
        ],
        "env": {"PATH": "/usr/bin:/bin", "COLOUR": "grün"},
        "listen": {"host": "127.0.0.1", "port": port},
        "served_names": ["qwen38-27b", "fable-27b"],
        "paths": {"venv": str(folder), "toolkit": str(folder), "checkpoint": str(folder)},
        "required_paths": [str(program)],
        "address_wait_seconds": 1,
        "boot_deadline_seconds": 30,
        "cold_boot_deadline_seconds": 60,
        "failed_boots": 3,
        "memory": {
            "verdict": "fits",
            "demand_tokens": 270336,
            "pool_tokens": 351436,
            "reason": "2 sequences of 135168 tokens fit",
        },
        "drain_seconds": 5,
        "gates": {
            "mtp_depth": 7,
            "tensor_parallel": 4,
            "census_modules_per_rank": 128,
            "vocab_rows": 248320,
        },
    }
    value.update(changes)
    return named(value)


def named(value: dict[str, Any]) -> dict[str, Any]:
    """`value` with the name of its content, computed as the format's description says."""
    plain = {key: entry for key, entry in value.items() if key != "name"}
    text = json.dumps(plain, sort_keys=True, separators=(",", ":"))
    return {**value, "name": f"{value['engine']}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"}


def lay_down(root: Path, value: dict[str, Any]) -> str:
    """Write a release below `root` as the deploy does; returns its name."""
    name: str = value["name"]
    folder = root / "var/lib/fable-engine/releases" / name
    folder.mkdir(parents=True)
    (folder / "release.json").write_text(json.dumps(value))
    return name


def commit(root: Path, name: str | None, previous: str | None = None, **changes: Any) -> None:
    """Write the state file below `root`."""
    file = root / "var/lib/fable-engine/state.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    state: dict[str, Any] = {
        "committed": name,
        "previous": previous,
        "rejected": {},
        "failed_boots": 0,
    }
    file.write_text(json.dumps({"format": 1, **state, **changes}))


def prefix(rank: int, place: str = "modelopt.py:512") -> str:
    """What stands before each message of a worker."""
    return f"(Worker_TP{rank} pid={4242 + rank}) INFO 11-30 12:00:00 [{place}] "


def census_line(rank: int, layer: int, module: str) -> str:
    """One module that the FP8 census found eligible."""
    return (
        f"{prefix(rank)}QPN8_CENSUS_LOAD n=1 layer=language_model.model.layers.{layer}.{module} "
        "dtype=torch.float8_e4m3fn K=5120 N=4096 widths=[512, 512, 1536, 1536] "
        "scales=[0.1, 0.2, 0.3, 0.4] split=16 nacc=2 eligible=YES"
    )


def good_log(layers: int = 64, ranks: int = 4, depth: int = 7) -> list[str]:
    """The lines of a boot that passes every gate of the log (2 to 11)."""
    modules = ("linear_attn.in_proj_qkvz", "linear_attn.out_proj")
    return [
        "(APIServer pid=4000) INFO 11-30 11:59:00 [utils.py:261] non-default args: "
        "{'max_num_seqs': 2, 'speculative_config': {'method': 'mtp', "
        f"'num_speculative_tokens': {depth}}}}}",
        "(EngineCore pid=4100) INFO 11-30 11:59:10 [core.py:90] Initializing a V1 LLM engine "
        f"with config: kv_cache_dtype=auto, num_speculative_tokens={depth}",
        f"{prefix(0, 'attention.py:88')}Ignoring the checkpoint's kv_cache quantization "
        "directive (fp8_e4m3)",
        *(
            census_line(rank, layer, module)
            for layer in range(layers)
            for module in modules
            for rank in range(ranks)
        ),
        f"{prefix(0)}SM70 FP8 census: 2 modules a layer",
        "(EngineCore pid=4100) INFO 11-30 12:01:00 [kv.py:10] GPU KV cache size: 351,436 tokens",
        f"{prefix(0)}Skinny route map: M=8 N=4096 K=5120 -> marlin",
        f"{prefix(0)}Skinny route map: M=8 N=62080 K=5120 -> qpn2",
        f"{prefix(1, 'flash.py:7')}FLASH_ATTN_V100 MTP verifier XQA path active (rows=8, "
        "q_per_kv=6, partition_hint=256, mtp5_dual_cta=False).",
        f"{prefix(0)}QPN8_CENSUS_RUN K=5120 N=4096 M=8 route=qpn8 split=16 nacc=2",
    ]
