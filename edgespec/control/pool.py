"""The drafters of a loaded model, their controllers, and the costs and confidences that these measured and learnt.

What is learnt from every generation is used by later ones and kept on disk.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from edgespec.config.options import GenerateOptions, LoadOptions
from edgespec.config.values import DrafterName, DraftLength
from edgespec.control.auto import AutoController
from edgespec.control.base import Controller, FixedLength
from edgespec.control.constants import HEAD_SHARE
from edgespec.control.cost import CostCurve, DraftCost, guessed_plain_s
from edgespec.control.prices import RunCosts
from edgespec.control.threads import ThreadControl
from edgespec.drafters.base import Drafter
from edgespec.drafters.predicted import FORCED, PREDICTION, ForcedDrafter, PredictedDrafter
from edgespec.drafters.spec import AUTOMATIC, FALLBACK, SPECS, check_makeable, learnt_texts, made
from edgespec.drafters.suffix import SuffixDrafter
from edgespec.engines.base import Engine
from edgespec.engines.sequence import CachedSequence
from edgespec.formats.manifest import ModelPair
from edgespec.platform import disk_cache
from edgespec.platform.disk_cache import FileVersion, Seconds, file_key, key_of
from edgespec.platform.machine import processor
from edgespec.types import TokenIds

if TYPE_CHECKING:
    from edgespec.corpus.texts import CommonTexts, LearntTexts


METHOD = 9  # part of the cache key: raise it when what is kept changes
_LIBRARIES = {"llamacpp": "llama-cpp-python", "onnx": "onnxruntime"}


def cost_key(engine: Engine, files: Iterable[FileVersion]) -> str:
    """A key of everything that the time of a pass depends on: files, library, machine, device, threads, cache."""
    from importlib.metadata import PackageNotFoundError, version  # 5 ms that only a first load needs

    facts, library = engine.facts, ""
    with suppress(KeyError, PackageNotFoundError):
        library = version(_LIBRARIES[facts.name])
    return key_of(
        METHOD,
        list(files),
        (facts.name, library, processor()),
        (facts.device, facts.threads, facts.kv_bytes_per_token, facts.pinned_class),
        *((facts.placement,) if facts.placement else ()),
    )


class DrafterPool:
    """Owns the drafters of a model, and a controller for each drafter (or `auto`) that was asked for."""

    def __init__(
        self,
        options: LoadOptions,
        pair: ModelPair,
        target: CachedSequence,
        drafters: dict[DrafterName, Drafter],
        first: DrafterPool | None = None,
    ) -> None:
        """`first`: the pool of the target's first sequence, which owns what this one shares with it."""
        self.drafters = drafters
        self._first, self._options, self._pair, self._target = first, options, pair, target
        self._automatic: dict[DrafterName, AutoController] = {}
        self._dropped: tuple[DrafterName, ...] = ()  # closed to free their memory
        heads = {"": options.heads} if options.heads else {kind: file.path for kind, file in pair.heads.items()}
        self._heads = {kind: file_key(path) for kind, path in heads.items()}
        # The versions that were loaded, by role; raises OSError where one is gone already.
        self._files = {role: tuple(map(file_key, pair.paths(role))) for role in pair.files} if first is None else {}
        self.threads = self._thread_control() if first is None else None
        self._learnt: LearntTexts | None = None if first is None else first._learnt
        if first is None and options.learn:
            # Opened now: a generation may end after its model, and with it the vocabulary, was closed.
            self._learnt = learnt_texts(target.engine.vocabulary)

    def another(self, target: CachedSequence) -> DrafterPool:
        """The pool of another sequence of the target. It has those drafters that serve several sequences."""
        found = {name: drafter.another(target.sequence) for name, drafter in self.drafters.items()}
        drafters = {name: drafter for name, drafter in found.items() if drafter is not None}
        return DrafterPool(self._options, self._pair, target, drafters, self)

    @cached_property
    def costs(self) -> RunCosts:
        """What passes and drafts cost here: kept from earlier runs or guessed, and learnt from answers alone."""
        if self._first is not None:
            return self._first.costs
        facts, paid = self._target.engine.facts, [each for each in self.drafters.items() if not each[1].is_free]
        low = facts.pinned_class[0] if facts.pinned_class else 1
        curve = CostCurve.from_json(disk_cache.get("learnt costs", self._target_key), low)
        return RunCosts(
            curve or CostCurve(guessed_plain_s(facts.weight_bytes), low, facts.row_cost),
            {name: self._known_draft(name, drafter) for name, drafter in paid},
            facts.threads,
            splits=facts.splits_passes,
        )

    def _known_draft(self, name: DrafterName, drafter: Drafter) -> DraftCost:
        kept = disk_cache.get("draft costs", self._learnt_key(name), tuple[Seconds, Seconds])
        if kept is not None:
            token_s, read_s = kept
            return DraftCost(token_s, read_s, is_once=drafter.costs_once)
        target, engine = self._target.engine.facts, drafter.engine
        share = HEAD_SHARE if engine is None else engine.facts.weight_bytes / max(target.weight_bytes, 1)
        cost = DraftCost.guessed(share, is_once=drafter.costs_once)
        if target.device.startswith("rpc"):  # a pass of it waits for the network, which a draft does not
            cost.scale(guessed_plain_s(target.weight_bytes))
            cost.is_relative = False
        return cost

    @property
    def _target_key(self) -> str:
        return cost_key(self._target.engine, self._files["target"])

    def _thread_control(self) -> ThreadControl | None:
        """Chooses the number of threads; None where the user did, or where the engine cannot change it."""
        engine, threads = self._target.engine, self._target.engine.facts.threads
        if self._options.threads is not None or threads == 1 or not engine.set_threads(threads):
            return None
        return ThreadControl(engine.thread_steps(), self.use_threads)

    def use_threads(self, threads: int) -> None:
        """Set the threads of target and drafters from their next passes on."""
        self._target.engine.set_threads(threads)
        for drafter in self.drafters.values():
            drafter.set_threads(threads)
        self.costs.use_threads(threads)

    def has(self, options: GenerateOptions) -> bool:
        """Whether this sequence has the drafter that `options` ask for."""
        name, _ = self._asked(options)
        return name in ("none", "auto") or self._can_have(name)

    def controller(self, options: GenerateOptions) -> Controller | None:
        """The controller of one generation; None for plain decoding.

        Raises CapabilityError for a drafter that this pair does not have.
        """
        name, length = self._asked(options)
        controller = self._chosen(name, length)
        asked = () if controller is None else self.drafters if name == "auto" else (name,)
        self._target.keep_features(any(self.drafters[each].wants_features for each in asked))
        return controller

    def check(self, options: GenerateOptions) -> None:
        """Raises CapabilityError where `controller` would for a missing drafter; changes nothing."""
        name, length = self._asked(options)
        drafts = name not in ("none", "auto") and length != 0 and self._target.engine.facts.can_speculate
        if drafts and name not in self.drafters:
            check_makeable(name, self.drafters, self._pair.name)

    def _asked(self, options: GenerateOptions) -> tuple[DrafterName, DraftLength]:
        """Drafter and draft length of a generation; a drafter closed to free memory is replaced by one without any."""
        name = options.drafter or self._options.drafter
        length: DraftLength = self._options.draft_length if options.draft_length is None else options.draft_length
        return FALLBACK if name in self._dropped else name, length

    def drop_models(self) -> tuple[DrafterName, ...]:
        """Close the drafters that own an engine, to free its memory; their names. The caller must hold the turn."""
        names = tuple(name for name in self.drafters if SPECS[name].owns == "engine" or SPECS[name].borrows_model)
        for controller in self._automatic.values():
            controller.drop(names)
        self._dropped += names
        for name in names:
            self.drafters.pop(name).close()
        return names

    def _chosen(self, name: DrafterName, length: DraftLength) -> Controller | None:
        if name == "none" or length == 0 or not self._target.engine.facts.can_speculate:
            return None
        if length == "auto":
            return self._automatic_one(name)
        if name == "auto":
            name = self.draft_name or FALLBACK
        return FixedLength(self.drafter(name), length)

    def _automatic_one(self, name: DrafterName) -> AutoController:
        """The automatic controller of a drafter or of `auto`; all generations share what it learns."""
        found, first = self._automatic.get(name), self._first
        shared = None if first is None else first._automatic_one(name)
        if found is None or (shared is not None and found.bank is not shared.bank):
            names = self.names if name == "auto" else [name]
            drafters: dict[str, Drafter] = {FORCED: ForcedDrafter(), PREDICTION: PredictedDrafter()}
            if shared is not None:
                names = [each for each in names if each in shared.drafters and self._can_have(each)]
            drafters |= {each: self.drafter(each) for each in names}
            found = AutoController(drafters, self.costs, self._options.max_slowdown, first=shared)
            if shared is None:
                found.restore(disk_cache.get("learnt", self._learnt_key(name)))
            self._automatic[name] = found
        return found

    @property
    def names(self) -> list[DrafterName]:
        """The drafters that `auto` chooses from: all of this pair that may gain beside others."""
        return [name for name in AUTOMATIC if self._can_have(name)]

    def _can_have(self, name: DrafterName) -> bool:
        """Whether the drafter was opened, or can be made of what was."""
        return name in self.drafters or SPECS[name].can_be_made(self.drafters)

    def drafter(self, name: DrafterName) -> Drafter:
        """The drafter of that name. Raises CapabilityError for one that this pair does not have."""
        if name not in self.drafters:
            found = None if self._first is None else self._first.drafter(name).another(self._target.sequence)
            vocabulary, pair = self._target.engine.vocabulary, self._pair.name
            self.drafters[name] = found or made(name, self._options, vocabulary, self.drafters, pair)
        return self.drafters[name]

    @property
    def draft_name(self) -> DrafterName | None:
        """The drafter that the pair's draft became."""
        return next((name for name, spec in SPECS.items() if spec.is_pairs_draft and name in self.drafters), None)

    def empty(self) -> None:
        """Clear all texts; learnt costs and confidences are kept."""
        for drafter in self.drafters.values():
            drafter.begin(np.empty(0, np.int32))
            drafter.reset_engine()

    def learn(self, answer_ids: TokenIds) -> None:
        """An answer [n] is complete: keep it for later ones where the options say so."""
        if self._learnt is not None and answer_ids.size:
            suffix = self.drafters.get("suffix")
            if isinstance(suffix, SuffixDrafter):
                suffix.learn(answer_ids)
            self._learnt.add(answer_ids)

    def texts_to_encode(self) -> CommonTexts | None:
        """The common texts, where lookups miss them and nobody was asked to encode them."""
        suffix = self.drafters.get("suffix")
        texts = suffix.common if isinstance(suffix, SuffixDrafter) else None
        return texts if texts is not None and texts.begin() else None

    def keep(self) -> None:
        """Store costs and confidences for the next run. Raises OSError."""
        controllers, self._automatic = self._automatic, {}
        if not controllers:
            return
        curve, drafts = self.costs.usual
        if kept := curve.to_json():
            disk_cache.put("learnt costs", self._target_key, kept)
        for name in self.drafters.keys() & drafts.keys():
            if (cost := drafts[name]).num_seen:
                disk_cache.put("draft costs", self._learnt_key(name), [cost.token_s, cost.read_s])
        for name, controller in controllers.items():
            disk_cache.put("learnt", self._learnt_key(name), controller.to_json())

    def _learnt_key(self, name: DrafterName) -> str:
        files = [cost_key(self._target.engine, versions) for versions in self._files.values()]
        heads = [version for kind, version in self._heads.items() if kind in ("", name)]
        return key_of(name, files, heads, self._options.exit_layer)
