"""Classes of pass widths: proved on real text and KV bits, chosen without cost to a lone token, watched in use."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from edgespec import Sampling
from edgespec.control.base import FixedLength
from edgespec.drafters.ngram import NgramDrafter
from edgespec.engines import widths
from edgespec.engines.llamacpp.engine import LlamaCppEngine
from edgespec.engines.sequence import CachedSequence
from edgespec.errors import CapabilityError
from edgespec.generation.run_state import Run
from edgespec.sampling.acceptance import RULES
from edgespec.sampling.sampler import Sampler
from edgespec.sampling.stopping import StopRules
from edgespec.types import Batch, Logits
from lossless import autoregressive, speculative
from table_engine import TableEngine

GREEDY = Sampling(temperature=0.0)


class LyingTable(TableEngine):
    """A table whose lone rows round otherwise, for tokens below `trained` only: the rest of a vocabulary is padding.

    `lies`: which widths; `in_cache`: the difference shows in the saved state alone and in no row of logits.
    """

    lies: tuple[int, ...] = (1,)
    trained = 26
    in_cache = False
    is_honest = False

    def __init__(self, *given: object, **named: object) -> None:
        super().__init__(*given, **named)  # type: ignore[arg-type]
        self.marks: dict[int, int] = {}  # by position in the cache, what the kernel that wrote it left there

    def forward(self, batch: Batch) -> Logits:
        base = self.length()
        logits = super().forward(batch).copy()
        lies = batch.width in self.lies and not self.is_honest
        trained = batch.token_ids < self.trained
        self.marks.update((base + row, int(lies and self.in_cache and trained[row])) for row in range(batch.width))
        if lies and not self.in_cache:
            logits[trained[batch.outputs]] = np.nextafter(logits[trained[batch.outputs]], np.float32(np.inf))
        return logits

    def save_state(self, sequence: int = 0) -> bytes:
        return super().save_state(sequence) + bytes(self.marks[place] for place in range(self.length()))


def table(**settings: object) -> LyingTable:
    engine = LyingTable.random(512, order=1, seed=3, context_length=512)
    for name, value in settings.items():
        setattr(engine, name, value)
    engine.facts = dataclasses.replace(engine.facts, pinned_class=None)
    return engine


def test_a_lone_row_that_differs_on_real_tokens_only_is_kept_apart() -> None:
    """Random ids of a padded vocabulary seldom meet a trained token: such a probe joined these widths."""
    assert widths.find_class(table(), 63, 4) == (2, 63)


def test_a_difference_that_shows_only_in_the_cache_is_seen() -> None:
    assert widths.find_class(table(in_cache=True), 63, 4) == (2, 63)
    assert widths.find_class(table(in_cache=True, lies=(3,)), 63, 4) == (1, 2)


def test_without_a_class_of_several_widths_there_is_none() -> None:
    assert widths.find_class(table(lies=(2, 4)), 63, 4) is None
    assert widths.find_class(table(lies=(1, 3)), 63, 4) == (4, 63)


def test_every_pass_of_a_width_is_exactly_that_wide(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, seen = table(is_honest=True), []
    inner = TableEngine.forward
    monkeypatch.setattr(TableEngine, "forward", lambda self, batch: seen.append(batch.width) or inner(self, batch))
    ids = widths.sample_text(engine, 64)
    for start in (0, 31):
        engine.rollback(min(start, engine.length()))
        for width in (1, 5, 33):
            seen.clear()
            bits = widths.passes_of(engine, ids, start, width)
            assert set(seen) == {width}
            assert set(range(start, 64)) <= bits.rows.keys()
    assert engine.length() == 64


def test_a_class_that_only_more_rows_refute_is_split(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few rows of each width are looked at; before a lone row joins a class many more are compared."""
    engine = table(is_honest=True)
    monkeypatch.setattr(widths, "confirm", lambda _engine, width, _pair: width != 1)
    facts = widths.pinned_facts(engine, "split", widest=63, advice="")
    assert facts.pinned_class == (2, 63)


@pytest.mark.parametrize(("lies", "pinned", "most"), [((5, 7), (1, 4), 5), ((1,), (2, 63), 63), ((4, 6), (1, 3), 4)])
def test_the_search_ends_with_the_class_that_is_used(
    lies: tuple[int, ...], pinned: tuple[int, int], most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    measured = widths.passes_of
    monkeypatch.setattr(widths, "passes_of", lambda *given: seen.append(given[3]) or measured(*given))
    monkeypatch.setattr(widths, "confirm", lambda *_: True)
    facts = widths.pinned_facts(table(lies=lies), f"ends {lies}", widest=63, advice="")
    assert facts.pinned_class == pinned
    assert max(width for width in seen if width != 63) == (most if most < 63 else 56)


def test_confirming_finds_a_rare_difference() -> None:
    engine = table(trained=widths.PREFIX + 8)  # 8 of the rows tell the widths apart
    assert not widths.confirm(engine, 1, (1, 63))
    assert widths.confirm(engine, 2, (1, 63))
    assert engine.length() == 0


# -- in use


def run_on(engine: TableEngine, watching: widths.ClassWatch, drafts: bool) -> list[int]:
    run = Run(
        target=CachedSequence(engine),
        prompt_ids=np.arange(8, dtype=np.int32),
        sampler=Sampler(GREEDY, engine.vocabulary.size),
        stop=StopRules(frozenset(), (), 200),
        watch=watching,
    )
    events = speculative(run, FixedLength(NgramDrafter(), 3), RULES["coupled"]) if drafts else autoregressive(run)
    return [event.token_id for event in events]


@pytest.fixture
def pinned() -> Iterator[LyingTable]:
    engine = table(is_honest=True)
    engine.facts = dataclasses.replace(engine.facts, pinned_class=(1, 63), class_key="watched")
    yield engine


@pytest.mark.parametrize("drafts", [False, True])
def test_watching_changes_nothing(pinned: LyingTable, drafts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = run_on(pinned, widths.ClassWatch(), drafts)
    monkeypatch.setattr(widths, "SHARE", 100.0)
    pinned.rollback(0)
    watching = widths.ClassWatch()
    assert run_on(pinned, watching, drafts) == expected
    assert watching.rows_compared >= 50 and pinned.facts.pinned_class is not None


@pytest.mark.parametrize("drafts", [False, True])
def test_a_class_that_lies_is_dropped_remembered_and_told(
    pinned: LyingTable, drafts: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(widths, "SHARE", 100.0)
    pinned.lies, pinned.is_honest, pinned.trained = (5, 6, 7), False, 512
    watching = widths.ClassWatch()
    with caplog.at_level(logging.WARNING, "edgespec"):
        run_on(pinned, watching, drafts)
    assert pinned.facts.pinned_class is None
    assert len([line for line in caplog.messages if "reproducible mode is off" in line]) == 1
    with pytest.raises(CapabilityError, match="when it ran before"):
        widths.pinned_facts(table(is_honest=True), "watched", widest=63, advice="")


def test_watching_scores_few_rows_again() -> None:
    engine = table(is_honest=True)
    engine.facts = dataclasses.replace(engine.facts, pinned_class=(1, 63), class_key="few")
    sequence, watching, widths_seen = CachedSequence(engine), widths.ClassWatch(), list[int]()
    logits = sequence.feed(np.arange(40, dtype=np.int32))[None].copy()
    inner = engine.forward
    engine.forward = lambda batch: widths_seen.append(batch.width) or inner(batch)  # type: ignore[method-assign]
    for _ in range(50_000):
        if watching.is_due(sequence):
            watching.look(sequence, logits)
    assert len(widths_seen) > 5 and sum(widths_seen[:-1]) <= 50_000 * widths.SHARE


def test_a_look_that_is_interrupted_leaves_a_shorter_text(pinned: LyingTable, monkeypatch: pytest.MonkeyPatch) -> None:
    sequence = CachedSequence(pinned)
    logits = sequence.feed(np.arange(40, dtype=np.int32))[None].copy()
    monkeypatch.setattr(pinned, "forward", lambda _batch: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        widths.ClassWatch().look(sequence, logits)
    assert sequence.length == pinned.length() < 40


def test_prompts_are_read_in_passes_of_proved_widths() -> None:
    engine = table(is_honest=True)
    engine.facts = dataclasses.replace(engine.facts, pinned_class=(1, 63), class_key="tried widths")
    sequence, seen = CachedSequence(engine), []
    inner = engine.forward
    engine.forward = lambda batch: seen.append(batch.width) or inner(batch)  # type: ignore[method-assign]
    sequence.feed(np.zeros(63 + 50, np.int32))
    assert seen == [63, 33, 17]
    assert sequence.num_fed == 3


# -- real kernels


def test_keys_in_q8_0_spare_lone_rows_the_padding(target_path: Path) -> None:
    """Over f16, two threads share the cells of a lone row, and add in another order than one thread does."""
    for kind, lowest in (("q8_0", 1), ("f16", 2)):
        with LlamaCppEngine.load(target_path, reproducible=True, threads=2, cache_type_k=kind) as engine:
            assert engine.facts.pinned_class == (lowest, 63)
