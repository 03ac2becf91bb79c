"""Who decides about drafts in a loaded model: its drafters, their controllers, and what these measured and learnt.

Costs are measured at the first load; what every generation adds to them serves the later ones and is kept on disk.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import numpy as np

from edgespec.config import DrafterName, DraftLength, GenerateOptions, LoadOptions
from edgespec.control.auto import AutoController
from edgespec.control.base import Controller, FixedLength
from edgespec.control.cost import CostCurve, DraftCost
from edgespec.control.measure import cost_key, draft_cost, exit_cost, remember_curve, remember_draft_cost, target_curve
from edgespec.drafters.base import Drafter
from edgespec.drafters.ngram import NgramDrafter
from edgespec.drafters.suffix import SuffixDrafter
from edgespec.engines.base import Engine
from edgespec.engines.measurements import key_of, recall, remember
from edgespec.engines.sequence import CachedSequence
from edgespec.errors import CapabilityError
from edgespec.manifest import ModelPair

FREE_DRAFTERS: dict[DrafterName, Callable[[], Drafter]] = {"ngram": NgramDrafter, "suffix": SuffixDrafter}
_ROLES: dict[DrafterName, str] = {"hierarchical": "medium"}  # whose file a drafter's engine runs, if not the draft's


class Deciders:
    """The drafters of a model, which it owns, and a controller for every choice of them that was asked for."""

    def __init__(
        self, options: LoadOptions, pair: ModelPair, target: CachedSequence, drafters: dict[DrafterName, Drafter]
    ) -> None:
        self.drafters = drafters
        self._options = options
        self._pair = pair
        self._target = target
        self._automatic: dict[DrafterName, AutoController] = {}

    def controller(self, options: GenerateOptions) -> Controller | None:
        """Who decides about the drafts of one generation; None for plain decoding.

        Raises CapabilityError for a drafter that this pair has not got.
        """
        name = options.drafter or self._options.drafter
        length: DraftLength = self._options.draft_length if options.draft_length is None else options.draft_length
        if name == "none" or length == 0 or not self._target.engine.facts.can_rollback:
            return None
        if length == "auto":
            return self._automatic_one(name)
        if name == "auto":
            name = self.draft_name or "ngram"
        return FixedLength(self.drafter(name), length)

    def _automatic_one(self, name: DrafterName) -> AutoController:
        """The controller of one choice of drafters; what it learns serves all later generations."""
        found = self._automatic.get(name)
        if found is None:
            names: list[DrafterName] = [*FREE_DRAFTERS, *self.drafters] if name == "auto" else [name]
            drafters: dict[str, Drafter] = {each: self.drafter(each) for each in names}
            found = AutoController(drafters, self.cost_curve, self.draft_costs, self._options.never_slower)
            found.restore(recall("learnt", self._learnt_key(name)))
            self._automatic[name] = found
        return found

    def drafter(self, name: DrafterName) -> Drafter:
        """Raises CapabilityError for one that this pair has not got."""
        if name in FREE_DRAFTERS:
            return self.drafters.setdefault(name, FREE_DRAFTERS[name]())
        if name == "hierarchical" and name not in self.drafters:
            raise CapabilityError(
                f"drafter 'hierarchical' needs a draft and a medium, and {self._pair.name!r} was loaded without the "
                "medium: load it with --drafter hierarchical, or use --drafter auto"
            )
        if name == "early-exit" and name not in self.drafters:
            raise CapabilityError(
                f"drafter 'early-exit' was not prepared when {self._pair.name!r} was loaded: load it with --drafter "
                "early-exit, or use --drafter auto"
            )
        if name not in self.drafters:
            raise CapabilityError(
                f"drafter {name!r} needs a draft model and {self._pair.name!r} was loaded without one: give "
                "-md/--model-draft (draft=...), or use --drafter ngram"
            )
        return self.drafters[name]

    @cached_property
    def cost_curve(self) -> CostCurve:
        """What the target's passes cost on this machine, measured at the first load and refined by every pass."""
        self._target.rollback(0)
        return target_curve(self._target.engine, self._pair.paths("target"))

    @cached_property
    def draft_costs(self) -> dict[str, DraftCost]:
        """What the tokens of each drafter that owns a model, or a part of the target, cost on this machine."""
        costs: dict[str, DraftCost] = {
            name: draft_cost(engine, self._pair.paths(_ROLES.get(name, "draft")))
            for name, drafter in self.drafters.items()
            if (engine := drafter.emptied()) is not None
        }
        if "early-exit" in self.drafters and "early-exit" not in costs:
            self._target.rollback(0)
            costs["early-exit"] = exit_cost(self._target.engine)
        return costs

    @property
    def draft_engine(self) -> Engine | None:
        """The draft model's engine with its cache emptied, for measuring; None without one that is not the target's."""
        return self.drafters[self.draft_name].emptied() if self.draft_name else None

    @property
    def draft_name(self) -> DrafterName | None:
        """The drafter that the pair's draft became."""
        names: tuple[DrafterName, ...] = ("model", "early-exit")
        return next((name for name in names if name in self.drafters), None)

    def empty(self) -> None:
        """Forget all texts; what was learnt of costs and confidences stays."""
        for drafter in self.drafters.values():
            drafter.begin(np.empty(0, np.int32))
            drafter.emptied()

    def keep(self) -> None:
        """Costs and confidences for the next run; a crash loses no more than they are worth. Raises OSError."""
        controllers, self._automatic = self._automatic, {}
        if controllers:
            remember_curve(cost_key(self._target.engine, self._pair.paths("target")), self.cost_curve)
            if self.draft_name and self.draft_engine is not None:
                key = cost_key(self.draft_engine, self._pair.paths("draft"))
                remember_draft_cost(key, self.draft_costs[self.draft_name])
        for name, controller in controllers.items():
            remember("learnt", self._learnt_key(name), controller.state())

    def _learnt_key(self, name: DrafterName) -> str:
        return key_of(name, [cost_key(self._target.engine, self._pair.paths(role)) for role in self._pair.files])
