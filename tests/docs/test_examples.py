"""The programs in docs/examples run, where what they need is installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from demo import ROOT
from edgespec.installation import is_importable

EXAMPLES = ROOT / "docs" / "examples"
NODE = shutil.which("node")


def run(home: Path, *command: str) -> str:
    """What a program prints; it must end with 0."""
    environment = os.environ | {"EDGESPEC_HOME": str(home), "EDGESPEC_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(NODE is None, reason="node is not installed")
def test_node_drives_the_sidecar(private_home: Path):
    serve = (sys.executable, "-m", "edgespec", "serve", "demo", "--stdio")
    first, *_, stopped, last = run(private_home, str(NODE), str(EXAMPLES / "sidecar.mjs"), *serve).splitlines()
    assert first.startswith("demo, ") and stopped == "stopped: cancelled" and last == "ended with code 0"


@pytest.mark.skipif(not is_importable("openai"), reason="the openai package is not installed")
def test_the_openai_client(private_home: Path):
    *_, speed, last = run(private_home, sys.executable, str(EXAMPLES / "openai_client.py")).splitlines()
    assert speed.endswith("tokens/s") and last == "ended with code 0"
