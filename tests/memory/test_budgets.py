"""Real budgets and a real control group: a child fills its context within them, or says in one line why not."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

if sys.platform != "linux":
    pytest.skip("reads /proc and makes control groups", allow_module_level=True)

from measure_memory import MIB, needs, under_budget


@pytest.mark.parametrize("engine", ["llamacpp", "onnx"])
def test_a_budget_is_kept_or_refused(engine: str, tmp_path: Path) -> None:
    options = {"model": "demo", "engine": engine, "threads": 1}
    least, most = needs(options)
    outcomes = [
        under_budget("budget", limit, options, str(tmp_path)) for limit in (least - MIB, least, (least + most) // 2)
    ]
    assert [outcome for outcome, _ in outcomes] == ["refused", "ran", "ran"], outcomes


def test_a_control_group_is_kept_or_the_load_refused(tmp_path: Path) -> None:
    options = {"model": "demo", "engine": "llamacpp", "threads": 1}
    least, most = needs(options)
    # Enough for Python with room to spare, and for no model.
    outcomes = [
        under_budget("group", limit, options, str(tmp_path)) for limit in (least - 8 * MIB, least + MIB, 2 * most)
    ]
    if outcomes[0][0] == "no group":
        pytest.skip(f"no control group can be made here: {outcomes[0][1]}")
    assert [outcome for outcome, _ in outcomes] == ["refused", "ran", "ran"], outcomes
