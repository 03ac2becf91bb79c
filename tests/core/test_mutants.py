"""The mutants of scripts/lab/mutants.py can still be applied; running them takes too long for every change."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
MUTANTS = runpy.run_path(str(ROOT / "scripts" / "lab" / "mutants.py"))["MUTANTS"]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_changes_one_place_of_todays_code(mutant: Any) -> None:
    source = (ROOT / "edgespec" / mutant.file).read_text(encoding="utf-8")
    assert source.count(mutant.original) == 1 and mutant.mutated != mutant.original
    compile(source.replace(mutant.original, mutant.mutated), mutant.file, "exec")
    assert all((ROOT / test.partition("::")[0]).is_file() for test in mutant.tests)
