"""What several tests of losslessness share: a drafter, one run of the loop, prompts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from demo import ROOT
from edgespec import Sampling
from edgespec.control.base import FixedLength
from edgespec.drafters.base import Drafter
from edgespec.drafters.model import ModelDrafter
from edgespec.drafters.ngram import NgramDrafter
from edgespec.engines.sequence import CachedSequence
from edgespec.generation.decode import autoregressive, speculative
from edgespec.generation.run_state import Run
from edgespec.reports import TokenEvent
from edgespec.sampling import Sampler
from edgespec.sampling.acceptance import RULES
from edgespec.sampling.stopping import StopRules
from edgespec.types import Draft
from laws import chi_square_score
from table_engine import TableEngine

VOCABULARY = 10
DEMO = ROOT / "models" / "demo" / "manifest.toml"
GREEDY = Sampling(temperature=0.0)
PLAIN = Sampling(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
PENALISED_GREEDY = Sampling(temperature=0.0, repeat_penalty=1.5, presence_penalty=0.5, logit_bias={3: -2})
SAMPLINGS = (
    GREEDY,
    PLAIN,
    Sampling(temperature=0.8, top_k=5, top_p=0.9, min_p=0.05, seed=9),
    Sampling(temperature=1.2, repeat_penalty=1.3, frequency_penalty=0.2, penalty_window=8, logit_bias={3: -2}, seed=4),
)
PROMPTS = (
    "Find me a cheap Italian restaurant in San Jose for tonight.",
    "Write a Python function `clamp(value, low, high)`: Limit a value to a range.",
    "Tom has 12 apples and gives away a third of them. How many are left?",
)


def make_drafter(name: str, target: TableEngine) -> Drafter:
    return NgramDrafter(min_ngram=1) if name == "ngram" else ModelDrafter(target.related(sigma=1.0))


def run_once(
    target: CachedSequence,
    drafter: Drafter | None,
    rule: str,
    length: int,
    sampling: Sampling,
    num_tokens: int,
    *,
    logprobs: bool = True,
) -> list[TokenEvent]:
    sampler = Sampler(sampling, target.engine.vocabulary.size)
    run = Run(target, np.array([0, 1], np.int32), sampler, StopRules(frozenset(), (), num_tokens), logprobs)
    if drafter is None:
        return list(autoregressive(run))
    return list(speculative(run, FixedLength(drafter, length), RULES[rule]))


def score_of_pairs(target: TableEngine, drafter: Drafter, rule: str) -> tuple[float, list[TokenEvent]]:
    """The law of pairs of tokens in texts of a table of order 1, as a standard normal score; and all their tokens."""
    cached, size, found = CachedSequence(target), target.vocabulary.size, list[TokenEvent]()
    counts = np.zeros((size, size))
    for seed in range(6):
        events = run_once(cached, drafter, rule, 3, replace(PLAIN, seed=seed), 4000, logprobs=False)
        ids = [1, *(event.token_id for event in events)]
        found += events
        np.add.at(counts, (ids[:-1], ids[1:]), 1)
    expected = np.zeros_like(counts)
    for before in range(size):
        weights = np.exp(target.row([before]).astype(np.float64))
        expected[before] = counts[before].sum() * weights / weights.sum()
    return chi_square_score(counts, expected, size * (size - 1)), found


def side_branches(draft: Draft) -> int:
    return sum(node not in draft.parents for node in range(draft.num_tokens)) - 1
