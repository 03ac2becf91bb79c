"""Where the demo family lies, and what tests that run it agree on."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
LAB = ROOT / "scripts" / "lab"
DEMO = ROOT / "models" / "demo"
TEST_THREADS = 1  # several would wait for each other on a busy machine


def heed_interrupts() -> None:
    """For `preexec_fn`: a shell that runs the tests in the background makes what they start deaf to SIGINT."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def change_json(path: Path, **changes: Any) -> None:
    """Set keys of a JSON object in a file; None removes one."""
    found = json.loads(path.read_text(encoding="utf-8")) | changes
    path.write_text(json.dumps({key: value for key, value in found.items() if value is not None}), encoding="utf-8")


def changed_copy(folder: Path, source: Path = DEMO / "hf" / "draft", **config: Any) -> Path:
    """A model in `folder` that is `source` with other settings in its config.json."""
    shutil.copytree(source, folder)
    change_json(folder / "config.json", **config)
    return folder
