"""Stand-in for vLLM's API server: the production line `python -m` of this module runs unchanged."""

from __future__ import annotations

import sys

from engine_standin.main import main

if __name__ == "__main__":
    sys.exit(main())
