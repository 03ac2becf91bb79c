"""Joint laws of sampled text by chi-square, short in the suite and long by hand.

    PYTHONPATH=. python tests/laws.py [NUM_TOKENS]

Counts (two tokens before, token) of texts of the table engine against the table's own probabilities, for every drafter
under every lossless rule that takes its drafts. Prints standard normal scores; exit code 1 when one is above 4.75.
"""

from __future__ import annotations

import itertools
import math
import sys
from dataclasses import replace

import numpy as np
from tiny_heads import drafter_of as heads_drafter
from tiny_heads import table_heads

from edgespec import Sampling
from edgespec.control.base import FixedLength
from edgespec.decode import Run, speculative
from edgespec.drafters.base import Drafter
from edgespec.drafters.lookahead import LookaheadDrafter
from edgespec.drafters.model import ModelDrafter
from edgespec.drafters.ngram import NgramDrafter
from edgespec.drafters.tree import TreeDrafter
from edgespec.engines.sequence import CachedSequence
from edgespec.engines.table import TableEngine
from edgespec.sampling import Sampler
from edgespec.stopping import StopRules
from edgespec.verify import RULES

VOCABULARY = 5
ALPHA_1E6 = 4.75  # standard normal score
PLAIN = Sampling(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
TEXT_LENGTH = 4000
CELLS = [
    *itertools.product(
        ("rejection", "coupled"), ("tree", "close tree", "medusa", "eagle", "lookahead", "model", "ngram")
    ),
    *itertools.product(("block",), ("model", "ngram", "medusa", "eagle")),
]


def drafter_of(name: str, target: TableEngine) -> Drafter:
    if name in ("lookahead", "ngram"):
        return LookaheadDrafter(ngram=3) if name == "lookahead" else NgramDrafter(min_ngram=1)
    if name in ("medusa", "eagle"):
        return heads_drafter(table_heads(name, averaged(target)), VOCABULARY)
    model = ModelDrafter(target.related(sigma=0.3 if name == "close tree" else 1.0))
    return model if name == "model" else TreeDrafter(model)


def averaged(target: TableEngine) -> TableEngine:
    """A table of order 1 that knows what the target, of order 2, does on average of the token further back."""
    rows = np.stack([[target.row((first, last)) for first in range(VOCABULARY)] for last in range(VOCABULARY)])
    return TableEngine(rows.mean(axis=1), order=1)


def law_score(rule: str, drafter_name: str, num_tokens: int, draft_length: int = 6) -> float:
    """How far the counts are from the law, as a standard normal score (Wilson-Hilferty)."""
    target = TableEngine.random(VOCABULARY, order=2, seed=3, spread=1.0, context_length=TEXT_LENGTH + 2)
    drafter, cached = drafter_of(drafter_name, target), CachedSequence(target)
    cached.keep_features(drafter.wants_features)
    counts = np.zeros((VOCABULARY,) * 3)
    for seed in range(math.ceil(num_tokens / TEXT_LENGTH)):
        sampler, stop = Sampler(replace(PLAIN, seed=seed), VOCABULARY), StopRules(frozenset(), (), TEXT_LENGTH)
        run = Run(cached, np.array([0, 1], np.int32), sampler, stop, logprobs=False)
        events = speculative(run, FixedLength(drafter, draft_length), RULES[rule])
        ids = [0, 1, *(event.token_id for event in events)]
        np.add.at(counts, (ids[:-2], ids[1:-1], ids[2:]), 1)
    expected = np.zeros_like(counts)
    for before in itertools.product(range(VOCABULARY), repeat=2):
        row = target.row(before).astype(np.float64)
        expected[before] = counts[before].sum() * np.exp(row - row.max()) / np.exp(row - row.max()).sum()
    tested = expected.min(axis=2) >= 5  # contexts too rare for the chi-square law are left out
    assert tested.sum() > VOCABULARY
    freedom = int(tested.sum()) * (VOCABULARY - 1)
    statistic = float(((counts - expected)[tested] ** 2 / expected[tested]).sum())
    return ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))


def main() -> int:
    num_tokens = int(sys.argv[1]) if len(sys.argv) > 1 else 200_000
    worst = 0.0
    for rule, drafter_name in CELLS:
        score = law_score(rule, drafter_name, num_tokens)
        worst = max(worst, score)
        print(f"{rule:9} {drafter_name:10} {score:6.2f} of {num_tokens} tokens", flush=True)
    return int(worst > ALPHA_1E6)


if __name__ == "__main__":
    sys.exit(main())
