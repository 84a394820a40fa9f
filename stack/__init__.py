"""The Python behind deploy.py: runs on the control machine only.

The programs for the hosts in `files/` are importable here, so that a rule which both sides need
(how a release or a toolkit is named) has one home.
"""

import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
FILES = REPOSITORY / "files"
for _package in ("hostlib", "toolkit", "checkpoint", "engine", "gateway", "venv"):
    if str(FILES / _package) not in sys.path:
        sys.path.append(str(FILES / _package))
