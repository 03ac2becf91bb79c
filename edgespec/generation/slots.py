"""The places of a model where generations can run at once: a sequence of the target and drafters for it each.

A place keeps its text when a generation ends. The next one takes the place whose text it continues furthest, or copies
a prefix from a place in use.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from edgespec.config import GenerateOptions
from edgespec.control.pool import DrafterPool
from edgespec.engines.parked import LEAST_TOKENS, pays
from edgespec.engines.sequence import CachedSequence
from edgespec.generation.executor import Executor
from edgespec.generation.request import Request

MOST_IDLE_TOKENS = 1024  # tokens of idle texts that may stay in cells shared by all sequences


@dataclass(eq=False, slots=True)
class Slot:
    """One place. `latest_use`: when its last generation ended, as a number that grows."""

    sequence: CachedSequence
    pool: DrafterPool
    is_taken: bool = False
    latest_use: int = 0


class Slots:
    """All places of a model, as many as its target has sequences."""

    def __init__(self, executor: Executor) -> None:
        self._parked = executor.parked
        self._all = [Slot(sequence, pool) for sequence, pool in executor.places()]

    @property
    def have_features(self) -> bool:
        """Whether any sequence reads hidden states."""
        return any(slot.sequence.keeps_features for slot in self._all)

    def alone_again(self) -> None:
        """A batch has ended: single generations read prompts in wide passes and ask for hidden states themselves."""
        for slot in self._all:
            slot.sequence.most_rows = sys.maxsize
        engine = self._all[0].sequence.engine
        if self.have_features:
            engine.give_hidden_states(False)
        if any(slot.sequence.layers for slot in self._all):
            engine.give_layer_inputs(())

    def has_one_for(self, options: GenerateOptions) -> bool:
        """Whether a free place has what `options` ask for."""
        return bool(self._free(options))

    def _free(self, options: GenerateOptions) -> list[Slot]:
        """A drafter that serves one sequence only exists in the first place, which also says why one is missing."""
        able = [slot for slot in self._all if slot.pool.has(options)] or self._all[:1]
        return [slot for slot in able if not slot.is_taken]

    def _clear_idle(self, found: Slot) -> None:
        """Where sequences share their cells, a pass looks at those of all, so idle texts are parked instead."""
        if found.sequence.engine.facts.own_cells:
            return
        idle = sorted(
            (s for s in self._all if s is not found and not s.is_taken), key=lambda slot: slot.latest_use, reverse=True
        )
        kept = 0
        for slot in idle:
            kept += slot.sequence.length
            if kept > MOST_IDLE_TOKENS:
                self._parked.park(slot.sequence)
                slot.sequence.rollback(0)

    def take(self, request: Request) -> Slot:
        """A free place: one whose text is not lost, of these that which the prompt continues furthest, then the oldest.

        A beginning that many prompts share is copied from another place instead. A model that cannot roll back cannot
        copy, so there only the length counts.
        """
        prompt_ids = request.prompt_ids

        def kept(slot: Slot) -> int:
            return slot.sequence.reusable_length(prompt_ids)

        def loses_little(slot: Slot) -> bool:
            return not pays(slot.sequence.length - kept(slot), slot.sequence.length)

        copies = self._all[0].sequence.engine.facts.can_rollback
        free = self._free(request.options)
        found = max(free, key=lambda slot: (copies and loses_little(slot), kept(slot), -slot.latest_use))
        own = kept(found)
        source = max(self._all, key=kept)
        shared = kept(source)
        if shared >= own + LEAST_TOKENS and copies:
            self._parked.park_before(found.sequence, own)
            found.sequence.adopt_prefix(source.sequence, shared)
        self._clear_idle(found)
        found.is_taken = True  # last: where a copy fails, the place is as free as before
        return found
