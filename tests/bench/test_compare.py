"""scripts/lab/compare.py: its journal and the ratios that it reports."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from peers.report import Cell, Journal, markdown, rows_of

CELL = Cell("model", 0.0, 1, "some")


def add(journal: Journal, name: str, prompt: str, tokens: Sequence[int], each_s: float, kind: str = "a") -> None:
    answer = {"token_ids": list(tokens), "times_s": [1 + each_s * count for count in range(1, len(tokens) + 1)]}
    about: dict[str, Any] = {"peak_bytes": 10**9, "load": 0.5}
    journal.add(
        "answer", cell=["model", 0.0, 1, "some"], name=name, prompts=prompt, kind=kind, answers=[answer], **about
    )


def filled(path: Path) -> Journal:
    """Two prompts, 1 s each to be read; the others' plain decoding takes 1 s a token, its second time 1.2."""
    journal = Journal(path)
    for prompt, kind in (("p", "a"), ("q", "b")):
        add(journal, "edgespec plain", prompt, [1, 2, 3, 4], 0.5, kind)
        add(journal, "edgespec default", prompt, [1, 2, 3, 4], 0.25 if prompt == "p" else 0.5, kind)
        add(journal, "slow plain", prompt, [1, 2, 3], 3.0, kind)
        add(journal, "fast plain", prompt, [1, 2, 9], 1.0, kind)
        add(journal, "fast plain again", prompt, [1, 2, 9], 1.2, kind)
    return journal


def test_ratios_are_over_the_fastest_plain_decoding_of_the_others(tmp_path: Path) -> None:
    base, rows = rows_of(CELL, filled(tmp_path / "journal"))
    found = {row.name: row for row in rows}
    assert base == "fast plain"
    mean_base = 1 + 3 * 1.1  # of both times, to the third token: the shorter answer's last
    assert found["edgespec default"].over_base == pytest.approx([mean_base / 1.75, mean_base / 2.5])
    assert found["edgespec default"].by_kind == {"a": [pytest.approx(mean_base / 1.75)], "b": [pytest.approx(1.72)]}
    assert found["edgespec default"].over_own == pytest.approx([3 / 2, 1])
    assert (found["edgespec default"].same_text, found["edgespec default"].compared) == (2, 2)
    assert found["fast plain"].over_base == [1, 1]
    assert found["fast plain again"].over_base == pytest.approx([4 / 4.6] * 2)
    assert found["slow plain"].over_base == pytest.approx([mean_base / 10] * 2)


def test_a_killed_run_goes_on_and_a_failure_is_forgotten_once_it_works(tmp_path: Path) -> None:
    journal = filled(tmp_path / "journal")
    journal.add("failed", cell=["model", 0.0, 1, "some"], name="slow lookup", reason="no file")
    journal.add("failed", cell=["model", 0.0, 1, "some"], name="fast lookup", reason="no memory")
    journal.add("tuned", key="model|1|fast lookup", settings={"setting": "lookup", "ngram": 3}, trials=[])
    with (tmp_path / "journal").open("a", encoding="utf-8") as handle:
        handle.write('{"what": "answer", "cell": ["mo')
    again = Journal(tmp_path / "journal")
    assert again.entries == journal.entries and again.tuned == journal.tuned
    assert again.failed == {(CELL, "slow lookup"): "no file"}
    add(again, "fast lookup", "p", [1, 2, 9], 2.0)
    again.add("command", text="python compare.py")
    report = markdown(Journal(tmp_path / "journal"))
    assert "| fast lookup | 1 | 0.61 | 0.61 | 0.57 | 0.4 | 1 of 1 | 1000 | ngram 3 |" in report
    assert "not in the table: slow lookup: no file" in report and "python compare.py" in report
