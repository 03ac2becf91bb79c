"""No random draw is used twice: noise that decided one round must not appear in a later one.

If the round after a rejection tested or drafted the same position with the same draw, its outcome would depend on the
rejection, and the output distribution would no longer be the target's.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest
from numpy.typing import NDArray

from edgespec.control.base import FixedLength
from edgespec.drafters.base import Drafter
from edgespec.drafters.hierarchical import HierarchicalDrafter
from edgespec.drafters.lookahead import LookaheadDrafter
from edgespec.drafters.model import ModelDrafter
from edgespec.engines.sequence import CachedSequence
from edgespec.generation.decode import speculative
from edgespec.generation.run_state import Run
from edgespec.reports import Stats
from edgespec.sampling.acceptance import RULES
from edgespec.sampling.noise import Noise, Stream
from edgespec.sampling.sampler import Sampler
from edgespec.sampling.stopping import StopRules
from edgespec.types import TokenIds
from lossless import PLAIN, VOCABULARY
from table_engine import TableEngine
from tiny_heads import drafter_of as heads_drafter
from tiny_heads import table_heads


class CountedNoise(Noise):
    """Notes the rounds in which each draw is looked at; `stats` count them."""

    stats = Stats()

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.seen: defaultdict[tuple[Stream, int, int], set[int]] = defaultdict(set)

    def uniform(self, stream: Stream, position: int, index: int = 0) -> float:
        self.seen[stream, position, index].add(self.stats.rounds)
        return super().uniform(stream, position, index)

    def exponential(self, stream: Stream, position: int, token_ids: TokenIds, index: int = 0) -> NDArray[np.float64]:
        self.seen[stream, position, index].add(self.stats.rounds)
        return super().exponential(stream, position, token_ids, index)


def drafter_of(name: str, target: TableEngine) -> Drafter:
    if name in ("medusa", "eagle"):
        known = TableEngine.random(VOCABULARY, order=1, seed=1)
        return heads_drafter(table_heads(name, known), VOCABULARY)
    model = ModelDrafter(target.related(sigma=1.0))
    medium = HierarchicalDrafter(ModelDrafter(target.related(sigma=1.0)), target.related(sigma=0.5))
    return {"model": model, "lookahead": LookaheadDrafter(), "hierarchical": medium}[name]


@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize("name", ["model", "medusa", "eagle", "lookahead", "hierarchical"])
def test_no_random_draw_is_used_twice(name: str, rule: str) -> None:
    target = TableEngine.random(VOCABULARY, seed=1, context_length=400)
    sampler = Sampler(PLAIN, VOCABULARY)
    sampler.noise = noise = CountedNoise(3)
    cached = CachedSequence(target)
    cached.keep_features(name in ("medusa", "eagle"))
    run = Run(cached, np.array([0, 1], np.int32), sampler, StopRules(frozenset(), (), 300), False)
    noise.stats = run.stats
    list(speculative(run, FixedLength(drafter_of(name, target), 8), RULES[rule]))
    own = {draw: rounds for draw, rounds in noise.seen.items() if draw[0] is not Stream.TARGET}
    assert {draw[0] for draw in own} >= {Stream.ACCEPT, Stream.RESIDUAL}
    assert max(map(len, own.values())) == 1


def test_draws_of_one_position_are_different_numbers() -> None:
    noise, ids = Noise(5), np.arange(4, dtype=np.int32)
    drawn = [noise.uniform(Stream.ACCEPT, 7, index) for index in range(1000)]
    assert len(set(drawn)) == 1000
    assert np.mean(drawn) == pytest.approx(0.5, abs=0.04)
    rows = np.array([noise.exponential(Stream.DRAFT, 7, ids, index) for index in range(4000)])
    assert np.abs(np.corrcoef(rows.T) - np.eye(4)).max() < 0.08
    assert abs(np.corrcoef(rows[:-1, 0], rows[1:, 0])[0, 1]) < 0.08
    assert noise.uniform(Stream.ACCEPT, 7) == noise.uniform(Stream.ACCEPT, 7, 0)
