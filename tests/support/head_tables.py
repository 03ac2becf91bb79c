"""Tables that heads draft for, and requests for drafts from their states."""

from __future__ import annotations

import numpy as np

from edgespec import Sampling
from edgespec.drafters.base import DraftRequest
from edgespec.engines.sequence import CachedSequence
from edgespec.sampling.sampler import Sampler
from table_engine import TableEngine

KINDS = ("medusa", "eagle")
VOCABULARY = 10


def table(
    seed: int = 1, order: int = 1, context_length: int = 400, engine: type[TableEngine] = TableEngine
) -> TableEngine:
    return engine.random(VOCABULARY, order=order, seed=seed, context_length=context_length)


def with_features(target: TableEngine) -> CachedSequence:
    cached = CachedSequence(target)
    cached.keep_features(True)
    return cached


def request(text: np.ndarray, states: np.ndarray, most: int = 4, temperature: float = 0.0) -> DraftRequest:
    sampler = Sampler(Sampling(temperature=temperature, seed=1), 299)
    return DraftRequest(text, most, sampler, features=states)
