"""scripts/lab/fuzz.py and check_reproducible.py: a few dozen of their cases pass."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import edgespec
from bench_table import table_model
from demo import LAB

SMALL = {"files": 8, "requests": 30, "structures": 24}


@pytest.mark.skipif(os.name != "posix", reason="forks, limits and signals of POSIX")
@pytest.mark.parametrize("kind", SMALL)
def test_some_cases_come_out_well(kind: str) -> None:
    command = [sys.executable, str(LAB / "fuzz.py"), "--kind", kind, "--cases", str(SMALL[kind])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{kind}: {SMALL[kind]} cases" in done.stdout
    assert "signal 0  traceback 0  hang 0  garbage 0" in done.stdout


# -- threads ask one model at once: no crash, no wrong text, right figures (longer: check_reproducible.py)


SCRIPT = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "lab" / "check_reproducible.py"))
Check, close_while_running = SCRIPT["Check"], SCRIPT["close_while_running"]


def test_table_engines_under_load(tmp_path: Path) -> None:
    with table_model(tmp_path, drafter="model", draft_length=4) as model:
        check = Check(model, ("abc", "cab" * 20, "a"), (4, 24, 60))
        assert check.run(6, count=150), check.wrong[:3]
    assert check.counts["whole"] > 20 and check.compared.total() > 1000


@pytest.mark.parametrize("engine", ["llamacpp", "onnx"])
def test_real_engines_under_load(engine: Any) -> None:
    options: dict[str, Any] = {"engine": engine, "threads": 1, "reproducible": True, "draft_length": 4}
    with edgespec.load("demo", drafter="model", **options) as model:
        check = Check(model, lengths=(4, 24))
        assert check.run(5, count=40), check.wrong[:3]
    assert check.counts["whole"] > 3
    close_while_running(lambda: edgespec.load("demo", drafter="model", **options))
