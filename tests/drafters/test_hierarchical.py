"""The hierarchical drafter: what it drafts is the medium's own text, whatever the small model says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import edgespec
from edgespec import GenerateOptions, Sampling
from edgespec.drafters.base import DraftRequest
from edgespec.drafters.hierarchical import HierarchicalDrafter
from edgespec.drafters.model import ModelDrafter
from edgespec.errors import Cancelled, CapabilityError, ModelNotFound, VocabularyMismatch
from edgespec.sampling.sampler import Sampler
from edgespec.types import Batch, Draft, Logits, Verdict
from lossless import DEMO, VOCABULARY
from table_engine import TableEngine

SAMPLED = Sampling(temperature=0.8, top_k=5, top_p=0.9, min_p=0.05, seed=9)


class Watched(TableEngine):
    """Counts its passes and remembers how wide they were."""

    widths: list[int]

    def forward(self, batch: Batch) -> Logits:
        self.widths.append(batch.width)
        return super().forward(batch)


def pair_of(target: TableEngine, inner: int = 3, context_length: int = 400) -> HierarchicalDrafter:
    """A small and a medium model related to `target`; the small one drafts `inner` tokens for each of its passes."""
    engines = [target.related(sigma, seed) for sigma, seed in ((1.5, 1), (0.7, 2))]
    for engine in engines:
        engine.facts = replace(engine.facts, context_length=context_length)
    return HierarchicalDrafter(ModelDrafter(engines[0]), engines[1], inner)


@pytest.fixture
def target() -> TableEngine:
    return TableEngine.random(VOCABULARY, seed=1, context_length=400)


def assert_same(found: Draft, wanted: Draft) -> None:
    assert found.token_ids.tolist() == wanted.token_ids.tolist()
    assert found.evidence == wanted.evidence
    assert (found.distributions is None) == (wanted.distributions is None)
    for ours, theirs in zip(found.distributions or (), wanted.distributions or (), strict=True):
        assert ours.token_ids.tolist() == theirs.token_ids.tolist()
        assert ours.probs.tolist() == theirs.probs.tolist()


@pytest.mark.parametrize("compares", [False, True])
@pytest.mark.parametrize("inner", [0, 1, 5])
@pytest.mark.parametrize("settings", [
    Sampling(temperature=0.0),
    SAMPLED,
    Sampling(temperature=1.2, repeat_penalty=1.3, frequency_penalty=0.2, penalty_window=8, seed=4),
])  # fmt: skip
def test_it_drafts_what_the_medium_alone_would(
    target: TableEngine, settings: Sampling, inner: int, compares: bool
) -> None:
    """Tokens, evidence and distributions, so whatever holds of a draft model's drafts holds of these."""
    drafter = pair_of(target, inner)
    alone = ModelDrafter(target.related(0.7, 2))
    rng = np.random.default_rng(0)
    text = rng.integers(0, VOCABULARY, 20).astype(np.int32)
    sampler = Sampler(settings, VOCABULARY)
    for most in (1, 2, 3, 7, 20, 20, 1, 20):
        request = DraftRequest(text, most, sampler, needs_distributions=compares)
        wanted = alone.draft(request)
        assert wanted.num_tokens == most
        assert_same(drafter.draft(request), wanted)
        kept = int(rng.integers(0, most + 1))  # some of the draft stands, then another token, and a few more
        drafter.observe(wanted, Verdict(tuple(range(kept)), 0))
        text = np.concatenate((text, wanted.token_ids[:kept], rng.integers(0, VOCABULARY, 1 + most % 6))).astype(
            np.int32
        )


def test_the_medium_is_asked_once_for_several_tokens(target: TableEngine) -> None:
    """With a small model that is the medium itself every token agrees, so each pass brings all it scored."""
    medium = target.related(0.7, 2)
    medium.__class__ = Watched
    assert isinstance(medium, Watched)
    medium.widths = []
    small = ModelDrafter(target.related(0.7, 2))
    drafter = HierarchicalDrafter(small, medium, ahead=5)
    text = np.array([0, 1, 2], np.int32)
    sampler = Sampler(SAMPLED, VOCABULARY)
    draft = drafter.draft(DraftRequest(text, 12, sampler))
    assert draft.num_tokens == 12
    assert medium.widths == [3 + 5, 1 + 5]
    # all stood and one more came: the medium lacks its own last token and that one
    text = np.concatenate((text, draft.token_ids, [7])).astype(np.int32)
    assert drafter.num_uncached(text) == 2
    medium.widths.clear()
    drafter.draft(DraftRequest(text, 4, sampler))
    assert medium.widths == [2 + 3]  # of 4 tokens the medium draws the last one itself


def test_it_stops_where_the_next_token_does_not_pay(target: TableEngine) -> None:
    """Asked after every token in order; what a pass has scored already is drafted all the same."""
    drafter = HierarchicalDrafter(ModelDrafter(target.related(0.7, 2)), target.related(0.7, 2), ahead=3)
    asked: list[int] = []

    def should_continue(count: int, evidence: tuple[float, ...]) -> bool:
        assert len(evidence) == 3
        asked.append(count)
        return count < 2 or count == 4

    text = np.array([0, 1, 2], np.int32)
    request = DraftRequest(text, 30, Sampler(SAMPLED, VOCABULARY), should_continue=should_continue)
    assert drafter.draft(request).num_tokens == 8  # 4 in the first pass, its last one paid; 4 in the second
    assert asked == list(range(1, 9))


@pytest.mark.parametrize("whose", ["small", "medium"])
def test_a_cancelled_draft_leaves_both_caches_whole(target: TableEngine, whose: str) -> None:
    drafter, untouched = pair_of(target), pair_of(target)
    request = DraftRequest(np.array([0, 1, 2, 3], np.int32), 9, Sampler(SAMPLED, VOCABULARY))
    untouched.draft(request)
    drafter.draft(request)
    (drafter._small if whose == "small" else drafter)._engine.cancel()
    longer = request._replace(token_ids=np.array([0, 1, 2, 3, 4, 5], np.int32))
    with pytest.raises(Cancelled):
        drafter.draft(longer)
    drafter.clear_cancel()
    assert_same(drafter.draft(longer), untouched.draft(longer))
    drafter.cancel()
    with pytest.raises(Cancelled):
        drafter.draft(longer)
    drafter.clear_cancel()
    assert_same(drafter.draft(longer), untouched.draft(longer))


# -- on the demo family


def test_auto_takes_a_medium_that_was_named() -> None:
    medium = DEMO.parent / "demo-medium-q8_0.gguf"
    with edgespec.load("demo", medium=medium) as model:
        parts = {name: drafter.bytes_used for name, drafter in model.drafters.drafters.items()}
        assert parts["hierarchical"] > parts["model"] > 0
        plain = model.generate("def f(", Sampling(seed=1), GenerateOptions(max_tokens=64, drafter="none"))
        assert model.generate("def f(", Sampling(seed=1), GenerateOptions(max_tokens=64)).token_ids == plain.token_ids


def test_what_is_missing_is_named(tiny_path: Path, tmp_path: Path) -> None:
    target = DEMO.parent / "demo-target-q8_0.gguf"
    draft = DEMO.parent / "demo-draft-q8_0.gguf"
    with pytest.raises(CapabilityError, match=r"needs a draft model .* give draft="):
        edgespec.load(str(target), drafter="hierarchical")
    with pytest.raises(CapabilityError, match=r"needs a medium model .* give medium="):
        edgespec.load(str(target), draft=draft, drafter="hierarchical")
    with pytest.raises(ModelNotFound, match="no medium "):
        edgespec.load(str(target), draft=draft, medium=tmp_path / "none.gguf", drafter="hierarchical")
    with pytest.raises(VocabularyMismatch):
        edgespec.load(str(target), draft=draft, medium=tiny_path, drafter="hierarchical")
