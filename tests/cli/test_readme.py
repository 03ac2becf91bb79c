"""The README's example runs as printed, and its commands exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_python_example_runs_as_printed() -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    done = subprocess.run([sys.executable, "-W", "error", "-c", example], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert re.search(r"\d+% of the draft accepted", done.stdout)


def test_both_commands_stand_at_the_top() -> None:
    top = README[:700]
    assert "python3 scripts/run.py chat" in top
    assert "python3 scripts/run.py test" in top


def test_every_documented_option_exists() -> None:
    table = README.partition("### Options of")[2].partition("Every option can")[0]
    documented = set(re.findall(r"--[a-z][a-z-]+", table))
    command = [sys.executable, "-m", "edgespec", "generate", "--help"]
    known = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert len(documented) >= 25
    assert sorted(option for option in documented if option not in known) == []
