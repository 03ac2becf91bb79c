"""Real budgets and a real control group: a child fills its context within them, or says in one line why not."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

if sys.platform != "linux":
    pytest.skip("reads /proc and makes control groups", allow_module_level=True)

from measure_budgets import MIB, measured, needs
from memory_group import NoGroup, memory_group


@pytest.mark.parametrize("engine", ["llamacpp", "onnx"])
def test_a_budget_is_kept_or_refused(engine: str, tmp_path: Path) -> None:
    options = {"model": "demo", "engine": engine, "threads": 1}
    least, most = needs(options)
    outcomes = [
        measured("budget", limit, options, str(tmp_path)) for limit in (least - MIB, least, (least + most) // 2)
    ]
    assert [outcome for outcome, _ in outcomes] == ["refused", "ran", "ran"], outcomes


def test_a_control_group_is_kept_or_the_load_refused(tmp_path: Path) -> None:
    options = {"model": "demo", "engine": "llamacpp", "threads": 1}
    least, most = needs(options)
    try:
        with memory_group(most):
            pass
    except NoGroup as exc:
        pytest.skip(f"no control group can be made here: {exc}")
    # Enough for Python with room to spare, and for no model.
    outcomes = {
        limit: measured("group", limit, options, str(tmp_path)) for limit in (least - 8 * MIB, least + MIB, 2 * most)
    }
    assert [outcome for outcome, _ in outcomes.values()] == ["refused", "ran", "ran"], outcomes
