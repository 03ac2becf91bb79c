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
from edgespec.control.measure import cost_key, draft_cost, remember_curve, remember_draft_cost, target_curve
from edgespec.drafters.base import Drafter
from edgespec.drafters.ngram import NgramDrafter
from edgespec.drafters.suffix import SuffixDrafter
from edgespec.engines.base import Engine
from edgespec.engines.measurements import key_of, recall, remember
from edgespec.engines.sequence import CachedSequence
from edgespec.errors import CapabilityError
from edgespec.manifest import HEAD_KINDS, ModelPair

FREE_DRAFTERS: dict[DrafterName, Callable[[], Drafter]] = {"ngram": NgramDrafter, "suffix": SuffixDrafter}


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
        controller = self._chosen(name, length)
        asked = () if controller is None else self.drafters if name == "auto" else (name,)
        self._target.keep_features(any(self.drafters[each].wants_features for each in asked))
        layers = [self.drafters[each].wants_layers for each in asked]
        self._target.keep_layer_inputs(next(filter(None, layers), ()))
        return controller

    def _chosen(self, name: DrafterName, length: DraftLength) -> Controller | None:
        if name == "none" or length == 0 or not self._target.engine.facts.can_rollback:
            return None
        if length == "auto":
            return self._automatic_one(name)
        if name == "auto":
            name = next((each for each in ("model", "eagle3") if each in self.drafters), "ngram")
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
        if name not in self.drafters:
            what, flag = ("heads", "--heads (heads=...)") if name in HEAD_KINDS else (
                "an EAGLE-3 head" if name == "eagle3" else "a draft model", "-md/--model-draft (draft=...)"
            )  # fmt: skip
            raise CapabilityError(
                f"drafter {name!r} needs {what} and {self._pair.name!r} was loaded without: give {flag}, or use "
                "--drafter ngram"
            )
        return self.drafters[name]

    @cached_property
    def cost_curve(self) -> CostCurve:
        """What the target's passes cost on this machine, measured at the first load and refined by every pass."""
        self._target.rollback(0)
        return target_curve(self._target.engine, self._pair.paths("target"))

    @cached_property
    def draft_costs(self) -> dict[str, DraftCost]:
        """What the tokens of each drafter with an engine of its own cost on this machine."""
        return {
            name: draft_cost(engine, self._pair.paths("draft"))
            for name, drafter in self.drafters.items()
            if (engine := drafter.emptied()) is not None
        }

    @property
    def draft_engine(self) -> Engine | None:
        """The draft model's engine with its cache emptied, for measuring; None without a draft model."""
        return self.drafters["model"].emptied() if "model" in self.drafters else None

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
            if self.draft_engine is not None:
                remember_draft_cost(cost_key(self.draft_engine, self._pair.paths("draft")), self.draft_costs["model"])
        for name, controller in controllers.items():
            remember("learnt", self._learnt_key(name), controller.state())

    def _learnt_key(self, name: DrafterName) -> str:
        return key_of(name, [cost_key(self._target.engine, self._pair.paths(role)) for role in self._pair.files])
