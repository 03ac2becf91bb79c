"""Joint laws of sampled text by chi-square: (two tokens before, token) in texts of the table engine, of every drafter
under every lossless rule, against the table's own probabilities.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from edgespec import Sampling
from edgespec.control.base import FixedLength
from edgespec.corpus.index import SuffixIndex, joined
from edgespec.drafters.base import Drafter
from edgespec.drafters.heads import DFlashDrafter, Eagle3Drafter
from edgespec.drafters.hierarchical import HierarchicalDrafter
from edgespec.drafters.lookahead import LookaheadDrafter
from edgespec.drafters.model import EarlyExitDrafter, ModelDrafter
from edgespec.drafters.ngram import NgramDrafter
from edgespec.drafters.suffix import SuffixDrafter
from edgespec.drafters.tree import TreeDrafter
from edgespec.engines.sequence import CachedSequence
from edgespec.generation.decode import speculative
from edgespec.generation.run_state import Run
from edgespec.sampling.acceptance import RULES
from edgespec.sampling.sampler import Sampler
from edgespec.sampling.stopping import StopRules
from edgespec.types import TokenIds
from table_engine import TableEngine
from tiny_heads import LAYERS, OpenBlock, OpenHead, drafter_of, table_heads

VOCABULARY = 5
ALPHA_1E6 = 4.75  # standard normal score
PLAIN = Sampling(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
TEXT_LENGTH = 4000


def model(target: TableEngine, sigma: float = 1.0) -> ModelDrafter:
    return ModelDrafter(target.related(sigma))


def hierarchical(target: TableEngine) -> HierarchicalDrafter:
    return HierarchicalDrafter(model(target, sigma=1.5), target.related(0.7, seed=2))


def heads(kind: str, target: TableEngine) -> Drafter:
    """Heads that know the target as far as a head of one token can."""
    return drafter_of(table_heads(kind, averaged(target)), target.vocabulary.size)


def opened(head: type[OpenHead | OpenBlock], target: TableEngine) -> Any:
    target.state_layers = LAYERS
    return head(200, vocabulary=target.vocabulary.size)


def texts_like(target: TableEngine) -> list[TokenIds]:
    """What the target might have written before, and as much that it never would."""
    rng, ids = np.random.default_rng(0), [0, 1]
    for _ in range(400):
        row = target.row(ids).astype(np.float64)
        weights = np.exp(row - row.max())
        ids.append(int(rng.choice(weights.size, p=weights / weights.sum())))
    never = rng.integers(0, target.vocabulary.size, 400)
    return [np.array(each, np.int32) for each in (ids[:200], ids[200:], never)]


def remembering(target: TableEngine) -> SuffixDrafter:
    first, second, never = texts_like(target)
    drafter = SuffixDrafter(corpora=[SuffixIndex.of(joined([first, never]))])
    drafter.learn(second)
    return drafter


MAKERS: dict[str, Callable[[TableEngine], Drafter]] = {
    "model": model,
    "tree": lambda target: TreeDrafter(model(target)),
    "close tree": lambda target: TreeDrafter(model(target, sigma=0.3)),
    "hierarchical": hierarchical,
    "early-exit": lambda target: EarlyExitDrafter(target.related(1.0)),
    "medusa": lambda target: heads("medusa", target),
    "eagle": lambda target: heads("eagle", target),
    "eagle3": lambda target: Eagle3Drafter(opened(OpenHead, target), max_features=512),
    "dflash": lambda target: DFlashDrafter(opened(OpenBlock, target), max_features=512),
    "ngram": lambda target: NgramDrafter(min_ngram=1),
    "suffix": lambda target: SuffixDrafter(),
    "corpus": lambda target: SuffixDrafter(corpora=[SuffixIndex.of(joined(texts_like(target)))]),
    "kept answers": remembering,
    "lookahead": lambda target: LookaheadDrafter(ngram=3),
}


def averaged(target: TableEngine) -> TableEngine:
    """A table of order 1 that knows what the target, of order 2, does on average of the token further back."""
    ids = range(target.vocabulary.size)
    rows = np.stack([[target.row((first, last)) for first in ids] for last in ids])
    return TableEngine(rows.mean(axis=1), order=1)


def sequence_for(drafter: Drafter, target: TableEngine) -> CachedSequence:
    """The target's sequence with what the drafter reads of it."""
    cached = CachedSequence(target)
    cached.keep_features(drafter.wants_features)
    return cached


def law_score(rule: str, drafter_name: str, num_tokens: int, draft_length: int = 6) -> float:
    """How far the counts are from the law, as a standard normal score (Wilson-Hilferty)."""
    target = TableEngine.random(VOCABULARY, order=2, seed=3, spread=1.0, context_length=TEXT_LENGTH + 2)
    drafter = MAKERS[drafter_name](target)
    cached = sequence_for(drafter, target)
    counts = np.zeros((VOCABULARY,) * 3)
    num_accepted = 0
    for seed in range(math.ceil(num_tokens / TEXT_LENGTH)):
        sampler, stop = Sampler(replace(PLAIN, seed=seed), VOCABULARY), StopRules(frozenset(), (), TEXT_LENGTH)
        run = Run(cached, np.array([0, 1], np.int32), sampler, stop, logprobs=False)
        events = speculative(run, FixedLength(drafter, draft_length), RULES[rule])
        ids = [0, 1, *(event.token_id for event in events)]
        num_accepted += run.stats.accepted_tokens
        np.add.at(counts, (ids[:-2], ids[1:-1], ids[2:]), 1)
    assert num_accepted > num_tokens / 20, "so few drafts stood that nothing was tested"
    expected = np.zeros_like(counts)
    for before in itertools.product(range(VOCABULARY), repeat=2):
        row = target.row(before).astype(np.float64)
        expected[before] = counts[before].sum() * np.exp(row - row.max()) / np.exp(row - row.max()).sum()
    tested = expected.min(axis=2) >= 5  # contexts too rare for the chi-square law are left out
    assert tested.sum() > VOCABULARY
    return chi_square_score(counts[tested], expected[tested], int(tested.sum()) * (VOCABULARY - 1))


def chi_square_score(counts: np.ndarray, expected: np.ndarray, freedom: int) -> float:
    """Wilson-Hilferty: the statistic as a standard normal score."""
    statistic = float(((counts - expected) ** 2 / expected).sum())
    root = math.cbrt(statistic / freedom)
    return (root - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))
