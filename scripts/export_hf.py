"""Turn a Hugging Face model into a pair folder: `edgespec export` for a checkout that is not installed."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from edgespec.cli.main import cli

if __name__ == "__main__":
    cli.main(["export", *sys.argv[1:]])
