"""How long deciding a round takes (draft model, three lookups): `PYTHONPATH=. python tests/support/deciding.py`.

The production controller on recorded texts in the simulated world, so that nothing else runs meanwhile. What drafters
themselves take is left out; how far a draft goes on, which the controller is asked after each token, is counted. So
are the few clock readings of this file. Not a test: a time says as much of the machine as of the code.
"""

from __future__ import annotations

from time import perf_counter

import numpy as np

from edgespec.control.auto import AutoController
from edgespec.control.base import Proposal
from edgespec.control.cost import DraftCost
from edgespec.drafters.base import Drafter, DraftRequest
from edgespec.drafters.cache import CacheDrafter
from edgespec.drafters.ngram import NgramDrafter
from edgespec.drafters.suffix import SuffixDrafter
from edgespec.engines.sequence import Passes
from edgespec.reports import RoundRecord
from edgespec.types import Draft, Evidence, Verdict
from simulation import DRAFT_SHARE, ORT_INT8, READ_SHARE, VOCABULARY, Machine, World, recorded, simulate


class Timed(AutoController):
    """Keeps how long each decision and each lesson took, in seconds."""

    deciding_s: list[float]
    learning_s: list[float]
    drafting_s = 0.0  # of the round in progress

    def proposing(self, request: DraftRequest) -> Passes[Proposal]:
        self.drafting_s, started_s = 0.0, perf_counter()
        proposal = yield from super().proposing(request)
        self.deciding_s.append(perf_counter() - started_s - self.drafting_s)
        return proposal

    def observe(self, proposal: Proposal, verdict: Verdict, record: RoundRecord) -> None:
        started_s = perf_counter()
        super().observe(proposal, verdict, record)
        self.learning_s.append(perf_counter() - started_s)

    def leave_out_work_of(self, drafter: Drafter) -> None:
        """Its time is no part of deciding."""
        draft = drafter.draft

        def timed(request: DraftRequest) -> Draft:
            ask, started_s, asking_s = request.should_continue, perf_counter(), 0.0

            def timed_ask(count: int, evidence: Evidence) -> bool:
                nonlocal asking_s
                asked_s = perf_counter()
                answer = ask is not None and ask(count, evidence)
                asking_s += perf_counter() - asked_s
                return answer

            found = draft(request if ask is None else request._replace(should_continue=timed_ask))
            self.drafting_s += perf_counter() - started_s - asking_s
            return found

        drafter.draft = timed  # type: ignore[method-assign]


def run() -> tuple[list[float], list[float]]:
    """Microseconds of each decision and of each lesson, over all recorded greedy texts."""
    world = World(Machine(ORT_INT8))
    drafters = [NgramDrafter(), SuffixDrafter(), CacheDrafter(VOCABULARY), world.model()]
    plain_s = world.machine.plain_s
    costs = {"model": DraftCost(DRAFT_SHARE * plain_s, READ_SHARE * plain_s)}
    auto = Timed.of({drafter.name: drafter for drafter in drafters}, world.machine.curve(), costs, 0.02, world.clock)
    auto.deciding_s, auto.learning_s = [], []
    for drafter in drafters:
        auto.leave_out_work_of(drafter)
    for by_temperature in recorded().values():
        for text in by_temperature[0.0]:
            simulate(auto, text, world.machine, world.clock)
    return [1e6 * seconds for seconds in auto.deciding_s], [1e6 * seconds for seconds in auto.learning_s]


if __name__ == "__main__":
    for _ in range(5):
        for name, times in zip(("deciding", "learning"), run(), strict=True):
            low, middle, high = np.percentile(times, [10, 50, 90])
            print(f"{name}: median {middle:.0f} us ({low:.0f} to {high:.0f} in 8 of 10 rounds), {len(times)} rounds")
