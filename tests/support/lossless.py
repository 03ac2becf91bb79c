"""What several tests of losslessness share: a drafter, one run of the loop, prompts."""

from __future__ import annotations

import numpy as np

from demo import ROOT
from edgespec import Sampling
from edgespec.acceptance import RULES
from edgespec.control.base import FixedLength
from edgespec.decode import Run, autoregressive, speculative
from edgespec.drafters.base import Drafter
from edgespec.drafters.model import ModelDrafter
from edgespec.drafters.ngram import NgramDrafter
from edgespec.engines.sequence import CachedSequence
from edgespec.engines.table import TableEngine
from edgespec.sampling import Sampler
from edgespec.stopping import StopRules
from edgespec.types import Draft, TokenEvent

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


def side_branches(draft: Draft) -> int:
    return sum(node not in draft.parents for node in range(draft.num_tokens)) - 1
