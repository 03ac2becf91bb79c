"""Free drafters before the draft model: what is copied, what is predicted, and a text that depends on neither."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import edgespec
from edgespec import GenerateOptions, Sampling
from edgespec.drafters.base import Drafter, DraftRequest
from edgespec.drafters.hybrid import HybridDrafter
from edgespec.drafters.model import ModelDrafter
from edgespec.drafters.ngram import NgramDrafter
from edgespec.drafters.suffix import SuffixDrafter
from edgespec.engines.sequence import CachedSequence
from edgespec.engines.table import TableEngine
from edgespec.errors import CapabilityError
from edgespec.noise import Stream
from edgespec.sampling import Sampler
from edgespec.types import Draft, Evidence, TokenIds, Verdict
from laws import ALPHA_1E6, chi_square_score
from lossless import PLAIN, PROMPTS, VOCABULARY, run_once

SAMPLER = Sampler(Sampling(temperature=0.0), VOCABULARY)


class Told(Drafter):
    """A free drafter that proposes what it is told to."""

    name, is_free, evidence_kind = "told", True, "bucket"

    def __init__(self, *token_ids: int, bucket: float = 1.0) -> None:
        self.token_ids, self.bucket = list(token_ids), bucket

    def begin(self, prompt_ids: TokenIds) -> None:
        pass

    def draft(self, request: DraftRequest) -> Draft:
        ids = self.token_ids[: request.max_tokens]
        return Draft.chain(ids, evidence=[(self.bucket,)] * len(ids))


class Counting(HybridDrafter):
    """Counts the accepted tokens that were copied."""

    copied = 0

    def observe(self, draft: Draft, verdict: Verdict) -> None:
        super().observe(draft, verdict)
        self.copied += sum(one[0] == 1.0 for one in (draft.evidence or ())[: len(verdict.accepted_nodes)])


def make_hybrid(target: TableEngine, least_confidence: float = 0.3) -> Counting:
    free = [SuffixDrafter(), NgramDrafter(min_ngram=1)]
    return Counting(free, ModelDrafter(target.related(sigma=1.0)), least_confidence)


def test_copied_tokens_come_first_and_the_model_reads_them() -> None:
    engine = TableEngine.random(VOCABULARY, seed=4)
    hybrid = HybridDrafter([Told(7, 3)], ModelDrafter(engine), least_confidence=0.5)
    context = np.array([1, 2, 5], np.int32)
    found = hybrid.draft(DraftRequest(context, 4, SAMPLER))
    text = [*context.tolist(), 7, 3]
    for token_id in found.token_ids[2:].tolist():
        assert token_id == engine.row(text).argmax()
        text.append(token_id)
    assert text[3:] == found.token_ids.tolist()
    assert [one[0] for one in found.evidence or ()] == [1.0, 1.0, 0.0, 0.0]
    assert {len(one) for one in found.evidence or ()} == {5}
    again = hybrid.draft(DraftRequest(np.array([1, 2, 5, 9], np.int32), 3, SAMPLER))  # what was copied was refused
    assert again.token_ids[-1] == engine.row([*[1, 2, 5, 9], *again.token_ids[:-1].tolist()]).argmax()


def test_a_copy_that_fails_is_left_to_the_model_and_one_that_stands_is_taken_again() -> None:
    engine = TableEngine.random(VOCABULARY, seed=4)
    told = Told(7, bucket=3.0)
    hybrid = HybridDrafter([told], ModelDrafter(engine), least_confidence=0.7)
    context = [1]
    hybrid.begin(np.array(context, np.int32))

    def copied(next_id: int) -> bool:
        """Whether the next draft begins with a copy; the text then goes on with `next_id`."""
        found = hybrid.draft(DraftRequest(np.array(context, np.int32), 2, SAMPLER))
        context.append(next_id)
        return found.evidence is not None and found.evidence[0][0] == 1.0

    assert [copied(7) for _ in range(9)] == [False] * 3 + [True] * 6  # learns from drafts that were not used
    while copied(8):
        pass
    assert not any(copied(8) for _ in range(5))
    told.bucket = 4.0  # another kind of match is another matter
    assert not copied(7)
    assert [copied(7) for _ in range(9)][-1]


def test_the_drafter_that_expects_more_is_taken() -> None:
    model = ModelDrafter(TableEngine.random(VOCABULARY, seed=4))
    hybrid = HybridDrafter([Told(1), Told(2, 2, 2), Told()], model, least_confidence=0.5)
    found = hybrid.draft(DraftRequest(np.array([5], np.int32), 3, SAMPLER))
    assert found.token_ids.tolist() == [2, 2, 2]


def test_every_token_is_asked_about_in_order_and_the_draft_ends_where_it_is_told_to() -> None:
    for stop in range(1, 7):
        asked: list[tuple[int, Evidence]] = []

        def worth(count: int, evidence: Evidence, asked: list = asked, stop: int = stop) -> bool:
            asked.append((count, evidence))
            return count < stop

        model = ModelDrafter(TableEngine.random(VOCABULARY, seed=4))
        hybrid = HybridDrafter([Told(1, 2, 3)], model, least_confidence=0.5)
        found = hybrid.draft(DraftRequest(np.array([5], np.int32), 8, SAMPLER, should_continue=worth))
        assert found.num_tokens == stop
        assert [count for count, _ in asked] == list(range(1, stop + 1))
        assert [evidence for _, evidence in asked] == list(found.evidence or ())


def test_copied_tokens_were_certain_to_a_rule_that_compares() -> None:
    hybrid = HybridDrafter([Told(1, 2)], ModelDrafter(TableEngine.random(VOCABULARY, seed=4)), least_confidence=0.5)
    warm = Sampler(PLAIN, VOCABULARY)
    found = hybrid.draft(DraftRequest(np.array([5], np.int32), 4, warm, needs_distributions=True))
    assert found.distributions is not None
    assert [len(one.token_ids) for one in found.distributions] == [1, 1, VOCABULARY, VOCABULARY]
    assert [one.prob_of(i) for one, i in zip(found.distributions, (1, 2), strict=False)] == [1, 1]


def test_draws_behind_copied_tokens_are_told_apart_from_those_of_other_rounds() -> None:
    """A later round may draft the same position as an earlier token of its own, and must draw afresh there."""
    engine, warm = TableEngine.random(VOCABULARY, seed=4), Sampler(PLAIN, VOCABULARY)
    for position in range(3, 60):
        context = np.full(position, 5, np.int32)
        hybrid = HybridDrafter([Told(1, 2)], ModelDrafter(engine), least_confidence=0.5)
        found = hybrid.draft(DraftRequest(context, 4, warm, needs_distributions=True))
        assert found.distributions is not None
        for node in (2, 3):
            drawn = warm.race(found.distributions[node], position + node, Stream.DRAFT, node)[0]
            assert drawn == found.token_ids[node]


@pytest.mark.parametrize("settings", [
    Sampling(temperature=0.0),
    PLAIN,
    Sampling(temperature=0.8, top_k=5, top_p=0.9, min_p=0.05, seed=9),
    Sampling(temperature=1.2, repeat_penalty=1.3, frequency_penalty=0.2, penalty_window=8, logit_bias={3: -2}, seed=4),
])  # fmt: skip
def test_coupled_text_is_plain_text(settings: Sampling) -> None:
    target = TableEngine.random(VOCABULARY, seed=1, context_length=400)
    cached = CachedSequence(target)
    plain = run_once(cached, None, "coupled", 0, settings, 300)
    for length in (1, 2, 5, 12, 40):
        found = run_once(cached, make_hybrid(target), "coupled", length, settings, 300)
        assert [(event.token_id, event.logprob) for event in found] == [(e.token_id, e.logprob) for e in plain]


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_joint_law_is_the_targets(rule: str) -> None:
    target = TableEngine.random(VOCABULARY, order=1, seed=3, spread=1.0, context_length=4100)
    cached, drafter, counts = CachedSequence(target), make_hybrid(target, 0.1), np.zeros((VOCABULARY, VOCABULARY))
    for seed in range(6):
        settings = dataclasses.replace(PLAIN, seed=seed)
        events = run_once(cached, drafter, rule, 3, settings, 4000, logprobs=False)
        ids = [1, *(event.token_id for event in events)]
        np.add.at(counts, (ids[:-1], ids[1:]), 1)
    expected = np.zeros_like(counts)
    for before in range(VOCABULARY):
        weights = np.exp(target.row([before]).astype(np.float64))
        expected[before] = counts[before].sum() * weights / weights.sum()
    assert drafter.copied > 500
    assert chi_square_score(counts, expected, VOCABULARY * (VOCABULARY - 1)) < ALPHA_1E6


@pytest.fixture(scope="module", params=["llamacpp", "onnx"])
def demo(request: pytest.FixtureRequest) -> Iterator[edgespec.Model]:
    with edgespec.load("demo", engine=request.param, drafter="hybrid", reproducible=True) as model:
        yield model


@pytest.mark.parametrize("temperature", [0.0, 0.8, 1.2])
def test_demo_text_does_not_depend_on_the_hybrid(demo: edgespec.Model, temperature: float) -> None:
    for seed, prompt in enumerate((*PROMPTS[:2], "Repeat without changes: red, green, blue, red, green, blue, red.")):
        ids = demo.encode_chat([{"role": "user", "content": prompt}])
        sampling = Sampling(temperature=temperature, seed=seed)
        plain = demo.generate(ids, sampling, GenerateOptions(max_tokens=64, drafter="none", ignore_eos=True))
        for length in (1, 4, 9, "auto"):
            options = GenerateOptions(max_tokens=64, draft_length=length, ignore_eos=True)
            found = demo.generate(ids, sampling, options)
            assert found.token_ids == plain.token_ids and found.logprobs == plain.logprobs
            assert found.drafter == "hybrid" and (length == "auto" or found.stats.accepted_tokens)


def test_the_model_is_shared_with_the_drafter_of_that_name(demo: edgespec.Model) -> None:
    ids = demo.encode_chat([{"role": "user", "content": PROMPTS[0]}])
    before = demo.drafter_bytes
    for name in ("model", "hybrid", "model"):
        options = GenerateOptions(max_tokens=24, drafter=name, draft_length=4, ignore_eos=True)
        assert demo.generate(ids, Sampling(temperature=0.0), options).stats.accepted_tokens
    assert demo.drafter_bytes < before + 2**20
    demo.forget()
    assert demo.generate(ids, Sampling(temperature=0.0), options).stats.reused_tokens == 0


def test_auto_has_the_parts_and_not_the_hybrid(demo: edgespec.Model) -> None:
    ids = demo.encode_chat([{"role": "user", "content": PROMPTS[1]}])
    for name in ("hybrid", "auto"):
        options = GenerateOptions(max_tokens=48, drafter=name, draft_length="auto", ignore_eos=True)
        demo.generate(ids, Sampling(temperature=0.0), options)
    automatic = demo._pool.controller(GenerateOptions(drafter="auto", draft_length="auto"))
    assert {"model", "suffix", "ngram"} <= set(automatic.drafters)  # type: ignore[union-attr]
    assert "hybrid" not in automatic.drafters  # type: ignore[union-attr]


def test_a_pair_without_a_draft_has_no_hybrid(tiny_path: Path) -> None:
    with pytest.raises(CapabilityError, match="drafter 'hybrid' needs a draft model"):
        edgespec.load(str(tiny_path), drafter="hybrid")
    with edgespec.load(str(tiny_path)) as alone, pytest.raises(CapabilityError, match="drafter 'hybrid' needs"):
        alone.stream("a", options=GenerateOptions(drafter="hybrid", draft_length=3))
