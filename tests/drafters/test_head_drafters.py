"""Drafters over heads that show their cache: what they read and draft, and the law of what comes out."""

from __future__ import annotations

import hashlib
import math

import numpy as np
import pytest

from edgespec.config.options import Sampling
from edgespec.control.auto import AutoController
from edgespec.control.cost import DraftCost
from edgespec.control.prices import RunCosts
from edgespec.drafters.base import DraftRequest
from edgespec.drafters.heads import DFlashDrafter, Eagle3Drafter, HeadDrafter
from edgespec.engines.head import States
from edgespec.engines.sequence import CachedSequence
from edgespec.errors import Cancelled
from edgespec.sampling.sampler import Sampler
from edgespec.types import Draft, TokenIds
from lossless import run_once
from simulation import known_curve
from table_engine import TableEngine
from tiny_heads import LAYERS, OpenBlock, OpenHead

VOCABULARY = 10
Reads = tuple[type[HeadDrafter], type[OpenHead | OpenBlock]]
FORMS: list[Reads] = [(Eagle3Drafter, OpenHead), (DFlashDrafter, OpenBlock)]
both = pytest.mark.parametrize(("drafts", "opens"), FORMS, ids=["pairs", "blocks"])


def features_of(token_ids: TokenIds) -> States:
    """One row per token, which tells all tokens up to it apart."""
    rows = np.zeros((token_ids.size, len(LAYERS) * VOCABULARY), np.float32)
    for row in range(token_ids.size):
        digest = hashlib.sha256(token_ids[: row + 1].tobytes()).digest()
        rows[row, 0] = int.from_bytes(digest[:2], "little") / 65536
    return rows


def ask(drafter: HeadDrafter, text: TokenIds, told: int, most: int) -> Draft:
    """Draft behind `text` with the features of its last `told` tokens but the pending one."""
    sampler = Sampler(Sampling(temperature=0.0), VOCABULARY)
    features = features_of(text[:-1])[-told:] if told else np.zeros((0, 2 * VOCABULARY), np.float32)
    return drafter.draft(DraftRequest(text, most, sampler, features=features))


@both
@pytest.mark.parametrize("seed", range(12))
def test_the_head_reads_what_the_text_says_and_nothing_else(drafts, opens, seed: int) -> None:
    """Texts grow, are cut and change; windows of what is told come and go; the head's own window is small or large."""
    rng = np.random.default_rng(seed)
    context = int(rng.choice([16, 40, 1000]))
    head = opens(context)
    drafter = drafts(head, max_features=64)
    text = rng.integers(0, VOCABULARY, 12).astype(np.int32)
    for _ in range(60):
        change = rng.integers(10)
        if change == 0:
            kept = text[: rng.integers(2, text.size + 1)]
            text = np.concatenate((kept, rng.integers(0, VOCABULARY, 3))).astype(np.int32)
        elif change == 1:
            text = rng.integers(0, VOCABULARY, int(rng.integers(2, 60))).astype(np.int32)
        elif change < 9:
            text = np.append(text, rng.integers(0, VOCABULARY, int(rng.integers(1, 7)))).astype(np.int32)
        told = min(int(rng.choice([1, 5, 30, 64])), text.size - 1)
        most = int(rng.integers(1, 9))
        if rng.integers(8) == 0:
            drafter.cancel()
            with pytest.raises(Cancelled):
                ask(drafter, text, told, most)
        assert drafter.num_uncached(text) <= 64
        assert ask(drafter, text, told, most).num_tokens == min(most, head.most_drafted or context // 4)
        end = text.size - 1
        assert head.start < end <= head.end and len(head.pairs) == head.end - head.start <= context
        numbers = features_of(text[:-1])[head.start : end, 0]
        read = head.pairs[: end - head.start]
        assert [number for _, number in read] == [float(each) for each in numbers]
        if opens is OpenHead:
            assert [token_id for token_id, _ in read] == text[head.start + 1 : end + 1].tolist()
        else:
            assert head.end == end  # nothing of the block stays
        assert drafter.num_uncached(text) == 1


@both
def test_the_window_is_as_wide_as_what_is_told_and_as_the_head(drafts, opens) -> None:
    text = np.arange(300, dtype=np.int32) % VOCABULARY
    for told, context, start in ((299, 1000, 0), (40, 1000, 259), (299, 100, 249), (60, 100, 239)):
        head = opens(context)
        drafter = drafts(head, max_features=512)
        assert ask(drafter, text, told, 4).num_tokens == 4
        assert head.start == start
        for size in range(301, 500):
            ask(drafter, np.arange(size, dtype=np.int32) % VOCABULARY, 1, 4)
            assert head.end - head.start >= min(size - 1 - start, context // 2)


@both
def test_without_features_nothing_is_drafted(drafts, opens) -> None:
    drafter = drafts(opens(64), max_features=8)
    text = np.arange(5, dtype=np.int32)
    assert ask(drafter, text, 0, 4).num_tokens == 0
    sampler = Sampler(Sampling(temperature=0.0), VOCABULARY)
    assert drafter.draft(DraftRequest(text, 4, sampler)).num_tokens == 0
    assert ask(Eagle3Drafter(OpenHead(3), max_features=8), text, 4, 4).num_tokens == 0


@both
def test_a_draft_ends_behind_an_end_token_and_where_it_is_told_to(drafts, opens) -> None:
    text = np.arange(5, dtype=np.int32)
    drafter = drafts(opens(64), max_features=8)
    sampler = Sampler(Sampling(temperature=0.0), VOCABULARY)
    request = DraftRequest(text, 9, sampler, features=features_of(text[:-1]))
    whole = drafter.draft(request)
    assert (
        whole.num_tokens == (5 if opens is OpenBlock else 9)
        and whole.evidence is not None
        and whole.distributions is None
    )
    heard: list[int] = []

    def two(num_drafted: int, evidence: tuple[float, ...]) -> bool:
        heard.append(num_drafted)
        assert len(evidence) == 3
        return num_drafted < 2

    told = drafter.draft(DraftRequest(text, 9, sampler, should_continue=two, features=request.features))
    assert heard == [1, 2] and told.token_ids.tolist() == whole.token_ids[:2].tolist()
    third = int(whole.token_ids[2])
    ending = drafts(opens(64, frozenset({third})), max_features=8)
    ends_at = 1 + whole.token_ids.tolist().index(third)
    assert ending.draft(request).token_ids.tolist() == whole.token_ids[:ends_at].tolist()


def test_the_heads_own_confidence_joins_the_evidence() -> None:
    text, head = np.arange(5, dtype=np.int32), OpenBlock(64)
    head.confidences = np.array([0.9, 0.5, 0.1, 1.0, 0.0], np.float32)
    found = ask(DFlashDrafter(head, max_features=8), text, 4, 5).evidence
    assert found is not None and [len(each) for each in found] == [4] * 5
    sure, even, unsure, *extremes = (each[3] for each in found)
    assert sure == pytest.approx(math.log(9) / 2, abs=1e-5) and even == pytest.approx(0.0) and unsure < -1
    assert np.isfinite(extremes).all()


def test_a_block_of_a_head_that_knows_the_target_is_always_right() -> None:
    """A whole block of the greedy chain is accepted, and costs one pass of the head."""
    target = TableEngine.random(VOCABULARY, order=1, seed=12, context_length=400)
    head = OpenBlock(400)
    head.table, head.share_of_state = np.stack([target.row((token,)) for token in range(VOCABULARY)]), 0.0
    cached, drafter = CachedSequence(target), DFlashDrafter(head, max_features=512)
    target.state_layers = LAYERS
    cached.keep_features(True)
    found = run_once(cached, drafter, "coupled", 9, Sampling(temperature=0.0, seed=7), 241, logprobs=False)
    assert len({event.token_id for event in found[-20:]}) > 3, "it must matter which token is the last one"
    assert sum(event.drafter is not None for event in found) == 200
    assert head.num_blocks == 40


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
def test_pairs_of_a_head_that_knows_the_target_are_always_right(rule: str) -> None:
    target = TableEngine.random(VOCABULARY, order=1, seed=1, context_length=400)
    head = OpenHead(100)
    head.table, head.share_of_state = np.stack([target.row((token,)) for token in range(VOCABULARY)]), 0.0
    cached, drafter = CachedSequence(target), Eagle3Drafter(head, max_features=512)
    sampling = Sampling(temperature=1.2, top_k=0, top_p=1.0, min_p=0.0, seed=7)
    target.state_layers = LAYERS
    cached.keep_features(True)
    found = run_once(cached, drafter, rule, 3, sampling, 201, logprobs=False)
    assert sum(event.drafter is not None for event in found) == 150


# -- what a draft costs


def test_a_draft_of_any_length_costs_the_same() -> None:
    """Learnt from long drafts it is asked of short ones too, which a cost per token would underrate."""
    cost = DraftCost(is_once=True)
    for length in (15, 7, 1, 12) * 10:
        cost.observe(length, 1, 0.004)
    assert cost.of(1, 0) == cost.of(15, 0) == pytest.approx(0.004, rel=0.02) and cost.of(0, 0) == 0
    assert (cost.next_s, cost.once_s) == (0.0, cost.token_s)
    assert cost.among(2).of(5, 0) == cost.among(2).of(1, 0) < cost.of(1, 0)
    each = DraftCost(0.004)
    assert (each.next_s, each.once_s, each.of(3, 0)) == (0.004, 0.0, pytest.approx(0.012))


def test_the_controller_prices_a_block_once() -> None:
    drafters = {"dflash": DFlashDrafter(OpenBlock(64), max_features=64)}
    controller = AutoController(drafters, RunCosts(known_curve({1: 0.01, 16: 0.02}), {}))
    assert controller.costs.drafts["dflash"].is_once
    controller.costs.use_threads(2)
    assert controller.costs.draft("dflash").is_once


@both
def test_after_a_failure_the_head_reads_the_text_again(drafts, opens, monkeypatch: pytest.MonkeyPatch) -> None:
    head = opens(64)
    drafter, text = drafts(head, max_features=64), np.arange(20, dtype=np.int32) % VOCABULARY
    ask(drafter, text[:14], 13, 4)
    name = "decode" if opens is OpenHead else "inject"
    read = getattr(head, name)

    def struck(*given: object) -> None:
        read(*given)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(head, name, struck)
        ask(drafter, text[::-1][:16], 15, 4)  # its tokens stand where those of the first text stood
    assert ask(drafter, text[:16], 15, 4).num_tokens == 4
    known = features_of(text[:15])[head.start :, 0]
    assert [number for _, number in head.pairs[: known.size]] == [float(each) for each in known]
