"""Draft heads in the plan: the file, and what is kept for each text."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import edgespec
from demo import DEMO
from edgespec import GenerateOptions
from edgespec.config.options import LoadOptions
from edgespec.drafters.heads import EagleDrafter
from edgespec.loading.requirements import resolve_pair
from edgespec.memory.plan import heads_bytes, planned

EAGLE = DEMO / "heads" / "eagle.npz"
SIZE = EAGLE.stat().st_size


def test_opening_heads_takes_more_than_keeping_them() -> None:
    kept, opening = heads_bytes([EAGLE], 2048, 1)
    assert opening == 9 * SIZE > kept > 0
    pair = resolve_pair(LoadOptions("demo", engine="onnx", heads=EAGLE, drafter="eagle"))
    plan = planned(LoadOptions("demo", engine="onnx", heads=EAGLE, drafter="eagle"), pair)
    assert replace(plan, heads_opening=1 << 40).own_bytes > 1 << 40


def test_a_file_that_cannot_be_read_takes_its_size(tmp_path: Path) -> None:
    damaged = tmp_path / "heads.npz"
    damaged.write_bytes(EAGLE.read_bytes()[:1000])
    assert heads_bytes([damaged], 2048, 1) == (1000, 0)
    assert heads_bytes([tmp_path / "none.npz", Path("a\0b")], 2048, 1) == (0, 0)


def test_a_long_answer_takes_what_was_planned() -> None:
    options = LoadOptions("demo", engine="onnx", heads=EAGLE, drafter="eagle", context_length=1400, threads=1)
    with edgespec.load(options) as model:
        ids = (model.encode("A table for two in San Jose, please. ") * 400)[:1300]
        stats = model.generate(ids, options=GenerateOptions(max_tokens=60, draft_length=4, ignore_eos=True)).stats
        assert stats.drafted_tokens
        (drafter,) = (each for each in model.drafters.drafters.values() if isinstance(each, EagleDrafter))
        used = drafter.bytes_used
    assert used <= planned(options, resolve_pair(options)).heads
