"""What the passes and drafts of a loaded model cost here: guessed, known from earlier runs, or measured when asked for.

All sequences of the target share it: each of their passes refines it.
"""

from __future__ import annotations

from functools import cached_property

from edgespec.config.values import DrafterName
from edgespec.control import constants as c
from edgespec.control.cost import CostCurve
from edgespec.control.draft_cost import DraftCost, guessed_draft_cost
from edgespec.control.measure import (
    cost_key,
    draft_cost,
    exit_cost,
    known_curve,
    known_draft_cost,
    store_curve,
    store_draft_cost,
    store_file_curve,
    target_curve,
)
from edgespec.control.prior import PriorCurve
from edgespec.control.threads import ThreadControl
from edgespec.drafters.base import Drafter
from edgespec.drafters.spec import SPECS
from edgespec.engines.sequence import CachedSequence
from edgespec.formats.manifest import ModelPair
from edgespec.platform.disk_cache import FileVersion, file_key


class ModelCosts:
    """`files`: the versions of each role's files that were loaded. Raises OSError where one is gone already."""

    def __init__(self, pair: ModelPair, target: CachedSequence, drafters: dict[DrafterName, Drafter]) -> None:
        """`drafters`: those of the first sequence of `target`, opened and closed meanwhile; they own the models."""
        self.files = {role: tuple(map(file_key, pair.paths(role))) for role in pair.files}
        self._target, self._drafters = target, drafters
        self.is_measured = False

    @cached_property
    def curve(self) -> CostCurve:
        """What the target's passes cost on this machine, as far as known; refined by every pass."""
        return known_curve(self._target.engine, self.files["target"])

    @cached_property
    def drafts(self) -> dict[str, DraftCost]:
        """What the tokens of each drafter with a model, or with layers of the target, cost, as far as known."""
        target = self._target.engine
        costs: dict[str, DraftCost] = {
            name: known_draft_cost(engine, self._draft_files(name), target)
            for name, drafter in self._drafters.items()
            if (engine := drafter.reset_engine()) is not None
        }
        costs |= {name: guessed_draft_cost(c.EXIT_SHARE) for name in self._parts_of_target() if name not in costs}
        if self.curve.is_scaled:
            for cost in costs.values():
                cost.scale(self.curve.at(1))
        return costs

    def measure(self, threads: ThreadControl | None) -> None:
        """Measure what was not measured before, with all of the `threads`. Empties the caches."""
        if isinstance(self.curve, PriorCurve):
            self._target.rollback(0)
            if threads is not None:
                threads.reset()
            self.curve = target_curve(self._target.engine, self.files["target"])
        self.drafts = {
            name: draft_cost(engine, self._draft_files(name))
            for name, drafter in self._drafters.items()
            if (engine := drafter.reset_engine()) is not None
        }
        for name in self._parts_of_target():
            if name not in self.drafts:
                self._target.rollback(0)
                self.drafts[name] = exit_cost(self._target.engine)
        self.is_measured = True

    def store(self, draft: DrafterName | None) -> None:
        """For the next run; `draft`: the drafter that the pair's draft became."""
        files = self.files["target"]
        store_curve(cost_key(self._target.engine, files), self.curve)
        store_file_curve(files, self.curve)
        if draft is not None and (engine := self._drafters[draft].engine) is not None:
            cost = self.drafts[draft]
            if cost.is_observed and not cost.is_relative:
                store_draft_cost(cost_key(engine, self.files["draft"]), cost)

    def _parts_of_target(self) -> list[DrafterName]:
        """The opened drafters that run layers of the target."""
        return [name for name in self._drafters if SPECS[name].owns == "layers of the target"]

    def _draft_files(self, name: DrafterName) -> tuple[FileVersion, ...]:
        """The files of the model that a drafter runs."""
        return self.files[SPECS[name].roles[-1]]
