"""Runs in the engine's venv: build the engine's kernel extension through the engine's own loader.

Arguments: module, function, file for the answer, entry points. The answer is JSON: where the
built extension and the loader lie, and which entry points the extension lacks.
"""

import importlib
import json
import sys
from pathlib import Path


def main() -> None:
    module, function, answer, *entry_points = sys.argv[1:]
    loader = importlib.import_module(module)
    extension = getattr(loader, function)()
    found = {
        "extension": getattr(extension, "__file__", None),
        "loader": getattr(loader, "__file__", None),
        "missing": [name for name in entry_points if not callable(getattr(extension, name, None))],
    }
    Path(answer).write_text(json.dumps(found), encoding="utf-8")


main()
