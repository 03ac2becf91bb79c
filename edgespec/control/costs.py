"""What the passes and drafts of a loaded model cost here: kept from earlier runs, guessed, and learnt from answers.

Nothing is measured apart from answers. All sequences of the target share what is learnt, and it is kept between runs.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from pathlib import Path

from edgespec.config.values import DrafterName
from edgespec.control.cost import CostCurve, DraftCost, guessed_plain_s
from edgespec.control.prices import RunCosts
from edgespec.drafters.base import Drafter
from edgespec.drafters.spec import SPECS
from edgespec.engines.base import Engine
from edgespec.engines.sequence import CachedSequence
from edgespec.formats.manifest import ModelPair
from edgespec.platform import disk_cache
from edgespec.platform.disk_cache import FileVersion, Seconds, file_key, key_of
from edgespec.platform.machine import processor

METHOD = 7  # part of the cache key: raise it when what is kept changes
_LIBRARIES = {"llamacpp": "llama-cpp-python", "onnx": "onnxruntime"}


class ModelCosts:
    """`files`: the versions of each role's files that were loaded. Raises OSError where one is gone already."""

    def __init__(self, pair: ModelPair, target: CachedSequence, drafters: dict[DrafterName, Drafter]) -> None:
        """`drafters`: those of the first sequence of `target`, opened and closed meanwhile; they own the models."""
        self.files = {role: tuple(map(file_key, pair.paths(role))) for role in pair.files}
        self._target, self._drafters = target, drafters

    @cached_property
    def curve(self) -> CostCurve:
        """What the target's passes cost on this machine, as far as known; refined by every pass."""
        facts = self._target.engine.facts
        low = facts.pinned_class[0] if facts.pinned_class else 1
        kept = disk_cache.get("learnt costs", self._target_key)
        guess = CostCurve.guessed(guessed_plain_s(facts.weight_bytes), low, facts.row_cost)
        return CostCurve.from_json(kept, low) or guess

    @cached_property
    def drafts(self) -> dict[str, DraftCost]:
        """What the tokens of each drafter with a model cost, as far as known."""
        costs = {name: self._known_draft(name, engine) for name, engine in self._engines()}
        if self.curve.is_scaled:
            for cost in costs.values():
                cost.scale(self.curve.at(1))
        return costs

    @cached_property
    def run(self) -> RunCosts:
        """What all answers pay and earn, by `curve` and `drafts`."""
        facts = self._target.engine.facts
        return RunCosts(self.curve, self.drafts, facts.threads, splits=facts.splits_passes)

    def _known_draft(self, name: str, engine: Engine) -> DraftCost:
        kept = disk_cache.get("draft costs", self._draft_key(name, engine), tuple[Seconds, Seconds])
        if kept is not None:
            return DraftCost(*kept)
        target = self._target.engine.facts
        cost = DraftCost.guessed(engine.facts.weight_bytes / max(target.weight_bytes, 1))
        if target.device.startswith("rpc"):  # a pass of it waits for the network, which a draft does not
            cost.scale(guessed_plain_s(target.weight_bytes))
        return cost

    def store(self, draft: DrafterName | None) -> None:
        """For the next run; `draft`: the drafter that the pair's draft became."""
        if kept := self.curve.to_json():
            disk_cache.put("learnt costs", self._target_key, kept)
        if draft is not None and (engine := self._drafters[draft].engine) is not None:
            cost = self.drafts[draft]
            if cost.is_observed and not cost.is_relative:
                disk_cache.put("draft costs", self._draft_key(draft, engine), [cost.token_s, cost.read_s])

    @property
    def _target_key(self) -> str:
        return cost_key(self._target.engine, self.files["target"])

    def _draft_key(self, name: str, engine: Engine) -> str:
        return cost_key(engine, self.files[SPECS[name].roles[-1]])  # type: ignore[index]

    def _engines(self) -> list[tuple[str, Engine]]:
        """The drafters with a model of their own."""
        found = ((name, drafter.engine) for name, drafter in self._drafters.items())
        return [(name, engine) for name, engine in found if engine is not None]


def cost_key(engine: Engine, files: Iterable[Path | FileVersion]) -> str:
    """A key of everything that the time of a pass depends on: files, library, machine, device, threads, cache."""
    facts = engine.facts
    return key_of(
        METHOD,
        [file_key(file) for file in files],
        (facts.name, _library_version(facts.name), processor()),
        (facts.device, facts.threads, facts.kv_bytes_per_token, facts.pinned_class),
        *((facts.placement,) if facts.placement else ()),
    )


def _library_version(engine_name: str) -> str:
    from importlib.metadata import PackageNotFoundError, version  # 5 ms that only a first load needs

    try:
        return version(_LIBRARIES[engine_name])
    except (KeyError, PackageNotFoundError):
        return ""
