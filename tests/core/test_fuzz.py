"""scripts/lab/fuzz.py: a few dozen of its cases pass, and what goes wrong in a case is told as that."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from demo import LAB

pytestmark = pytest.mark.skipif(os.name != "posix", reason="forks, limits and signals of POSIX")
SMALL = {"files": 8, "requests": 30, "structures": 24}


@pytest.mark.parametrize("kind", SMALL)
def test_some_cases_come_out_well(kind: str) -> None:
    command = [sys.executable, str(LAB / "fuzz.py"), "--kind", kind, "--cases", str(SMALL[kind])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{kind}: {SMALL[kind]} cases" in done.stdout
    assert "signal 0  traceback 0  hang 0  garbage 0" in done.stdout


@pytest.mark.parametrize(
    ("run", "verdict", "said"),
    [
        (lambda: {}["x"], "traceback", "KeyError"),
        (lambda: sys.exit(3), "traceback", "SystemExit"),
        (lambda: os.kill(os.getpid(), signal.SIGTERM), "signal", "SIGTERM"),
        (lambda: os._exit(134), "signal", "exit 134"),
        (lambda: time.sleep(60), "hang", "SIGKILL"),
    ],
)
def test_what_goes_wrong_in_a_case_ends_no_other(
    tmp_path: Path, run: Callable[[], None], verdict: str, said: str
) -> None:
    from fuzz import _verdicts
    from fuzz_cases import Case

    cases = [(n, Case("fine", lambda folder: None)) for n in range(2)]
    cases.insert(1, (7, Case("odd", lambda folder: run())))
    found = list(_verdicts(cases, 3, tmp_path, 5.0))
    assert [(number, judged[0]) for number, _, judged in found] == [(0, "ok"), (7, verdict), (1, "ok")]
    assert said in found[1][2][1]
