"""scripts/lab/fuzz.py: it damages files, its verdicts are right, and a few dozen of its cases pass."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from edgespec.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts" / "lab"))

pytestmark = pytest.mark.skipif(os.name != "posix", reason="forks, limits and signals of POSIX")
SMALL = {"files": 8, "requests": 30, "faults": 4, "structures": 48}


@pytest.mark.parametrize("kind", SMALL)
def test_some_cases_come_out_well(kind: str) -> None:
    command = [sys.executable, str(ROOT / "scripts" / "lab" / "fuzz.py"), "--kind", kind, "--cases", str(SMALL[kind])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{kind}: {SMALL[kind]} cases" in done.stdout
    assert "signal 0  traceback 0  hang 0  garbage 0" in done.stdout


def test_damage_is_the_same_for_a_seed_and_is_damage() -> None:
    from fuzz_mutate import damaged_bytes, damaged_json, damaged_text

    data, text = bytes(range(256)) * 20, json.dumps({"a": [1, {"b": "c"}], "d": 2.5})
    toml = 'a = 1\nb = "two"\n[c]\nd = 3\n'
    changed = {"bytes": 0, "json": 0, "toml": 0}
    for seed in range(200):
        rngs = random.Random(seed), random.Random(seed)
        one, other = ([damaged_bytes(r, data), damaged_json(r, text), damaged_text(r, toml)] for r in rngs)
        assert one == other
        for kind, before, after in zip(changed, (data, text, toml), one, strict=True):
            changed[kind] += before != after
    assert all(count > 150 for count in changed.values()), changed
    part = damaged_bytes(random.Random(3), data, 100, 200)
    assert part[:100] == data[:100]


def _raise(error: BaseException) -> None:
    raise error


def _garbage() -> None:
    from fuzz_cases import Garbage

    raise Garbage("x instead of y")


@pytest.mark.parametrize(
    ("run", "verdict", "said"),
    [
        (lambda: None, "ok", ""),
        (lambda: _raise(ConfigError("no such thing")), "refused", "no such thing"),
        (lambda: _raise(ConfigError("")), "traceback", "without a message"),
        (lambda: _raise(KeyError("x")), "traceback", "KeyError"),
        (lambda: _raise(SystemExit(3)), "traceback", "SystemExit"),
        (_garbage, "garbage", "x instead of y"),
        (lambda: os.kill(os.getpid(), signal.SIGTERM), "signal", "SIGTERM"),
        (lambda: os._exit(134), "signal", "exit 134"),
        (lambda: time.sleep(60), "hang", "SIGKILL"),
    ],
)
def test_verdicts(tmp_path: Path, run: Callable[[], None], verdict: str, said: str) -> None:
    from fuzz import _verdicts
    from fuzz_cases import Case

    cases = [(n, Case("fine", lambda folder: None)) for n in range(2)]
    cases.insert(1, (7, Case("odd", lambda folder: run())))
    found = list(_verdicts(cases, 3, tmp_path, 1.0))
    assert [(number, judged[0]) for number, _, judged in found] == [(0, "ok"), (7, verdict), (1, "ok")]
    assert said in found[1][2][1]


def test_allowed_exit_states_of_a_command() -> None:
    from fuzz_cases import Crashed, check_end

    for code, said in ((0, "fine"), (2, "error: no"), (130, "interrupted")):
        check_end(code, said)
    traces = (1, "Traceback (most recent call last):"), (0, "Exception ignored in: x"), (2, "error: a\nerror: b")
    for code, said in (*traces, (134, ""), (-11, ""), (120, "")):
        with pytest.raises(Crashed):
            check_end(code, said)
