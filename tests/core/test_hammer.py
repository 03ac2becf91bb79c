"""Threads hammer one model for seconds: no crash, no wrong text, right figures (a minute: scripts/lab/hammer.py)."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

import edgespec
from bench_table import table_model

SCRIPT = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "lab" / "hammer.py"))
Hammer, close_while_running = SCRIPT["Hammer"], SCRIPT["close_while_running"]


def test_table_engines_under_load(tmp_path: Path) -> None:
    with table_model(tmp_path, drafter="model", draft_length=4) as model:
        hammer = Hammer(model, ("abc", "cab" * 20, "a"), (4, 24, 60))
        assert hammer.run(3.0, 6), hammer.wrong[:3]
    assert hammer.counts["whole"] > 20 and hammer.counts["tokens compared"] > 1000


@pytest.mark.parametrize("engine", ["llamacpp", "onnx"])
def test_real_engines_under_load(engine: Any) -> None:
    if engine == "onnx":
        pytest.importorskip("onnxruntime", reason="the ONNX engine needs onnxruntime")
    options: dict[str, Any] = {"engine": engine, "threads": 1, "reproducible": True, "draft_length": 4}
    with edgespec.load("demo", drafter="model", **options) as model:
        hammer = Hammer(model, lengths=(4, 24))
        assert hammer.run(4.0, 5), hammer.wrong[:3]
    assert hammer.counts["whole"] > 3
    close_while_running(lambda: edgespec.load("demo", drafter="model", **options))
