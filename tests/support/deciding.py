"""What a round's decision costs with lookups alone: `PYTHONPATH=. python tests/support/deciding.py`.

The production controller on recorded texts in the simulated world, in processor time. Not a test: a time says as much
of the machine as of the code.
"""

from __future__ import annotations

from time import thread_time

import numpy as np

from edgespec.control.auto import AutoController
from edgespec.control.base import Proposal
from edgespec.control.cost import CostCurve
from edgespec.control.prices import RunCosts
from edgespec.drafters.base import DraftRequest
from edgespec.drafters.predicted import FORCED, PREDICTION, ForcedDrafter, PredictedDrafter
from edgespec.drafters.suffix import SuffixDrafter
from edgespec.engines.sequence import Passes
from edgespec.reports import RoundRecord
from edgespec.types import Draft, Verdict
from simulation import KERNELS, Machine, World, recorded, simulate

DECIDING_S: list[float] = []
DRAFTING_S: list[float] = []
LEARNING_S: list[float] = []


class Timed(AutoController):
    """Keeps how long each decision and each lesson took."""

    def proposing(self, request: DraftRequest) -> Passes[Proposal]:
        started_s = thread_time()
        proposal = yield from super().proposing(request)
        DECIDING_S.append(thread_time() - started_s)
        return proposal

    def observe(self, proposal: Proposal, verdict: Verdict, record: RoundRecord) -> None:
        started_s = thread_time()
        super().observe(proposal, verdict, record)
        LEARNING_S.append(thread_time() - started_s)


class TimedLookup(SuffixDrafter):
    """Keeps how long each lookup took; it is part of the decision."""

    def draft(self, request: DraftRequest) -> Draft:
        started_s = thread_time()
        draft = super().draft(request)
        DRAFTING_S.append(thread_time() - started_s)
        return draft


if __name__ == "__main__":
    for _ in range(5):
        world = World(Machine(KERNELS, plain_s=0.007, noise=0.05))
        drafters = {FORCED: ForcedDrafter(), PREDICTION: PredictedDrafter(), "suffix": TimedLookup()}
        auto = Timed(drafters, RunCosts(CostCurve.guessed(0.007, row=0.05), {}), 0.1, world.clock)
        for by_temperature in recorded().values():
            for text in by_temperature[0.0]:
                simulate(auto, text, world.machine, world.clock)
        for name, seconds in (("deciding", DECIDING_S), ("of it lookups", DRAFTING_S), ("learning", LEARNING_S)):
            print(f"{name}: {1e6 * np.mean(seconds):.0f} us of {len(seconds)} rounds", end="; ")
            seconds.clear()
        print()
