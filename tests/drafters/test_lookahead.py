"""Lookahead: its window, its pool, and that the text stays the target's own."""

from __future__ import annotations

import itertools

import numpy as np

from edgespec.control.base import FixedLength
from edgespec.drafters.base import DraftRequest
from edgespec.drafters.lookahead import LookaheadDrafter, NgramPool
from edgespec.engines.sequence import CachedSequence
from edgespec.sampling.acceptance import coupled
from edgespec.sampling.sampler import Sampler
from edgespec.types import Draft, TokenIds, Verdict
from lossless import GREEDY, VOCABULARY, run_of, speculative
from table_engine import TableEngine


def request(token_ids: TokenIds, most: int = 32, branches: int = 15) -> DraftRequest:
    return DraftRequest(token_ids, most, Sampler(GREEDY, VOCABULARY), max_branches=branches)


def test_it_drafts_within_its_limits() -> None:
    text = np.random.default_rng(0).integers(0, VOCABULARY, 60).astype(np.int32)
    for most, branches in itertools.product((1, 2, 3, 5, 8, 13, 32, 64), (0, 1, 2, 5, 15)):
        drafter = LookaheadDrafter()
        drafter.begin(text)
        draft = drafter.draft(request(text, most, branches))
        assert 0 < draft.num_tokens <= most
        leaves = sum(node not in draft.parents for node in range(draft.num_tokens))
        assert leaves <= branches + 1
        assert draft.wants_rows == (branches > 0 and most >= 6)
        assert len(set(zip(draft.parents.tolist(), draft.token_ids.tolist(), strict=True))) == draft.num_tokens


def test_what_the_target_chose_behind_the_window_makes_ngrams() -> None:
    drafter = LookaheadDrafter(ngram=3, window=2)
    text = np.array([0, 1, 2, 3, 4], np.int32)
    draft = drafter.draft(request(text, 8))
    choices = tuple(range(5, 5 + draft.num_tokens + 1))
    columns = [nodes for _, nodes in drafter._columns]
    drafter.observe(draft, Verdict((), 9, choices))
    for nodes in columns:
        first, *rest = draft.token_ids[nodes].tolist()
        assert (*rest, choices[nodes[-1] + 1]) in drafter._pool.tails(first)
    # the new guesses stand one position further: the next window holds them where the text has moved on by one token
    again = drafter.draft(request(np.append(text, np.int32(9)), 8))
    last = [again.token_ids[nodes[-1]] for _, nodes in drafter._columns]
    assert last == [choices[nodes[-1] + 1] for nodes in columns]


def passes_for_new_text(branches: int) -> int:
    """Passes for the first 20 tokens of texts in which every token depends on the one before it alone."""

    class Limited(LookaheadDrafter):
        def draft(self, request: DraftRequest) -> Draft:
            return super().draft(request._replace(max_branches=branches))

    passes = 0
    for seed in range(5):
        target = TableEngine.random(300, order=1, seed=seed, context_length=100)
        prompt = np.random.default_rng(seed).integers(0, 300, 20).astype(np.int32)
        run = run_of(CachedSequence(target), GREEDY, 75, prompt)
        events = speculative(run, FixedLength(Limited(), 48), coupled)
        assert len(list(itertools.islice(events, 20))) == 20
        passes += run.stats.rounds
    return passes


def test_the_window_finds_what_the_text_has_not_shown_yet() -> None:
    """Its columns meet the paths that the text takes later."""
    assert passes_for_new_text(31) < 0.9 * passes_for_new_text(0)


def test_the_pool_keeps_the_latest_and_no_more() -> None:
    pool = NgramPool(most_kept=50)
    rng = np.random.default_rng(0)
    added: list[tuple[int, tuple[int, ...]]] = []
    for _ in range(2000):
        entry = int(rng.integers(9)), tuple(rng.integers(0, 3, 3).tolist())
        pool.add(*entry)
        added = [*(each for each in added if each != entry), entry]
        assert pool.size <= 50
        found = {token_id: pool.tails(token_id) for token_id in range(9)}
        latest = {token_id: [tail for first, tail in reversed(added) if first == token_id] for token_id in range(9)}
        assert all(tails == latest[token_id][: len(tails)] for token_id, tails in found.items())
        assert all(tail in found[first] for first, tail in added[-25:])


def test_memory_is_bounded_over_a_long_prompt() -> None:
    drafter = LookaheadDrafter(most_kept=1000)
    text = np.random.default_rng(0).integers(0, 10**5, 10**5).astype(np.int32)
    drafter.begin(text)
    drafter.draft(request(text))
    assert 0 < drafter.bytes_used <= 1000 * 800


def test_without_its_rows_the_window_waits() -> None:
    """A controller may cut the window off; the drafter then learns from the text alone."""
    drafter = LookaheadDrafter()
    text = np.array([0, 1, 2, 3, 4], np.int32)
    draft = drafter.draft(request(text))
    size = drafter._pool.size
    drafter.observe(draft, Verdict((), 9))
    assert drafter._pool.size == size
    drafter.draft(request(text))
    drafter.observe(draft.first(1), Verdict((), 9, (1, 2)))
    assert drafter._pool.size == size
