"""Where the demo family lies, and what tests that run it agree on."""

from __future__ import annotations

import signal
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LAB = ROOT / "scripts" / "lab"
DEMO = ROOT / "models" / "demo"
TEST_THREADS = 1  # several would wait for each other on a busy machine


def heed_interrupts() -> None:
    """For `preexec_fn`: a shell that runs the tests in the background makes what they start deaf to SIGINT."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
