"""What a person can do with a lab that stands, in a few lines; printed after a deploy."""

from __future__ import annotations

import json
import runpy
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

from lab import places
from lab.places import Lab

ANSWER_DEADLINE_S = 60.0


GROUP_DATA = Path(__file__).resolve().parent.parent / "group_data" / "all.py"


def first_model() -> str:
    """The name under which the model answers, from the settings."""
    return str(runpy.run_path(str(GROUP_DATA))["serving"]["names"][0])


def text(lab: Lab, model: str) -> str:
    """The summary: addresses, key, a line to try, how to stop."""
    gateway = f"http://127.0.0.1:{lab.ports['gateway']}"
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": "Hello"}]})
    command = f"{places.prefix(lab.name)}script"
    return "\n".join(
        [
            "",
            f"engine   http://127.0.0.1:{lab.ports['engine']}  (a stand-in; the port has no keys)",
            f"gateway  {gateway}  (key in {lab.gateway_key})",
            "try      "
            f"curl {gateway}/v1/chat/completions "
            f'-H "Authorization: Bearer $(cat {lab.gateway_key})" '
            f"-H 'Content-Type: application/json' -d '{body}'",
            f"ssh      ssh -F {lab.ssh_config} v100  # or dgx",
            f"verify   {command}/verify",
            f"stop     {command}/lab down",
        ]
    )


def answers(lab: Lab, model: str) -> bool:
    """Whether the line of the summary really works: one chat through the gateway."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{lab.ports['gateway']}/v1/chat/completions",
        data=json.dumps(
            {"model": model, "max_tokens": 8, "messages": [{"role": "user", "content": "Hello"}]}
        ).encode(),
        headers={
            "Authorization": f"Bearer {Path(lab.gateway_key).read_text().strip()}",
            "Content-Type": "application/json",
        },
    )
    deadline = time.monotonic() + ANSWER_DEADLINE_S
    failure = "no answer"
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(request, timeout=ANSWER_DEADLINE_S) as response:
                return bool(json.load(response)["choices"])
        except (OSError, urllib.error.URLError, ValueError, KeyError) as error:
            failure = str(error)
            time.sleep(0.5)
    print(f"script/deploy: a chat through the gateway fails: {failure}", file=sys.stderr)
    return False
