"""One line of advice where an answer went badly, from causes that are simulated, once per model."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

import edgespec
from bench_table import table_model
from edgespec.generation.advisor import Conditions
from edgespec.reports import Stats

CALM, PAGING = Conditions(disk_reads=100, stalled=0.0), Conditions(disk_reads=90_000, stalled=0.0)


def write(root: Path, **files: object) -> None:
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")


def test_missing_memory_is_read_from_the_system(tmp_path: Path) -> None:
    assert Conditions.now(tmp_path / "empty") == Conditions()
    write(
        tmp_path,
        proc__pressure__memory="some avg10=37.50 avg60=1.00 avg300=0.10 total=5\nfull avg10=1.00 avg60=0.00",
        proc__self__stat="42 (a (b) c) S 1 1 1 0 -1 4194560 9 0 77 0 0 0 0",
    )
    assert Conditions.now(tmp_path) == Conditions(77, 0.375)
    write(tmp_path, proc__pressure__memory="some", proc__self__stat="x")
    assert Conditions.now(tmp_path) == Conditions()


def answered(model: edgespec.Model, **options: object) -> Stats:
    chosen = edgespec.GenerateOptions(max_tokens=200, ignore_eos=True, **options)  # type: ignore[arg-type]
    return model.generate(np.arange(5) % 12, options=chosen).stats  # type: ignore[arg-type]


def watched(model: edgespec.Model, *read: Conditions) -> edgespec.Model:
    """Every answer of `model` is judged, and the machine's conditions are those given, one after the other."""
    advisor, left = model._executor.advisor, list(read)
    advisor.least_s, advisor._before = 0.0, CALM
    advisor._read = lambda: left.pop(0) if left else CALM
    return model


def test_a_fixed_length_that_does_not_pay_is_said_in_one_answer(tmp_path: Path) -> None:
    """The draft knows nothing of the target, and every row of a pass costs as much as a pass."""
    load = {"draft_length": 4, "drafter": "model", "threads": 1}
    with watched(table_model(tmp_path, spread=9.0, sigma=30.0, **load)) as model:
        stats = answered(model)
        assert stats.acceptance_rate < 0.25
        assert [note for note in stats.notes if note.endswith("--draft-length auto")]
        assert not answered(model).notes


def test_each_is_said_once_per_model_on_a_machine(tmp_path: Path) -> None:
    said = []
    for version in (1, 1, 2):
        with watched(table_model(tmp_path, drafter="none", threads=2), PAGING) as model:
            os.utime(tmp_path / "table.gguf", ns=(version, version))
            said.append(" ".join(answered(model).notes))
    assert "read from the disk" in said[0] and not said[1]
    assert said[2] == said[0]  # another file


def test_short_answers_are_not_judged(tmp_path: Path) -> None:
    with watched(table_model(tmp_path, drafter="none", threads=2), PAGING) as model:
        model._executor.advisor.least_s = 60.0
        assert not answered(model).notes


@pytest.mark.parametrize(("conditions", "says"), [(PAGING, "--memory auto"), (Conditions(100, stalled=0.9), "")])
def test_memory_that_is_short_is_told_with_what_to_do(tmp_path: Path, conditions: Conditions, says: str) -> None:
    """Not where other programs wait for it."""
    with watched(table_model(tmp_path, drafter="none", threads=2), conditions) as model:
        notes = answered(model).notes
    assert len(notes) == bool(says) and all(says in note and "\n" not in note for note in notes)
