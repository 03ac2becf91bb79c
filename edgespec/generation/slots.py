"""The places of a model where generations can run at once: a sequence of the target and drafters for it each.

A place keeps its text when a generation ends. The next one takes the place whose text it continues furthest, or copies
a prefix from a place in use. A generation that is read alone takes the first one, which is also saved and loaded.
"""

from __future__ import annotations

from dataclasses import dataclass

from edgespec.config.options import GenerateOptions
from edgespec.config.values import DrafterName
from edgespec.control.pool import DrafterPool
from edgespec.engines.parked import LEAST_TOKENS, ParkedStates, pays
from edgespec.engines.sequence import CachedSequence
from edgespec.generation.request import Request
from edgespec.types import TokenIds

MOST_IDLE_TOKENS = 1024  # tokens of idle texts that may stay in cells shared by all sequences


@dataclass(eq=False, slots=True)
class Slot:
    """One place. `latest_use`: when its last generation ended, as a number that grows."""

    sequence: CachedSequence
    pool: DrafterPool
    is_taken: bool = False
    latest_use: int = 0


class Slots:
    """All places of a model, as many as its target has sequences; all but the first are made when they are needed."""

    def __init__(self, sequence: CachedSequence, pool: DrafterPool, parked: ParkedStates) -> None:
        self._parked = parked
        self._made = [Slot(sequence, pool)]

    @property
    def all(self) -> list[Slot]:
        """Every place."""
        first = self._made[0]
        while len(self._made) < first.sequence.engine.facts.max_sequences:
            sequence = first.sequence.another(len(self._made))
            self._made.append(Slot(sequence, first.pool.another(sequence)))
        return self._made

    @property
    def have_features(self) -> bool:
        """Whether any sequence reads hidden states."""
        return any(slot.sequence.keeps_features for slot in self._made)

    def clear(self) -> None:
        """Forget all texts."""
        for slot in self._made:
            slot.sequence.rollback(0)
            slot.pool.empty()
            slot.latest_use = 0

    def drop_models(self) -> tuple[DrafterName, ...]:
        """Close the draft models; their drafters. The first pool owns them, so it comes last."""
        return [slot.pool.drop_models() for slot in reversed(self._made)][-1]

    def free(self, options: GenerateOptions) -> list[Slot]:
        """The free places that have what `options` ask for.

        A drafter that serves one sequence only exists in the first place, which also says why one is missing.
        """
        able = [slot for slot in self.all if slot.pool.has(options)] or self._made[:1]
        return [slot for slot in able if not slot.is_taken]

    def take_first(self) -> Slot:
        """The first place, whatever it holds."""
        self._made[0].is_taken = True
        return self._made[0]

    def take(self, request: Request) -> Slot:
        """A free place: one whose text is not lost, of these that which the prompt continues furthest, then the oldest.

        A beginning that many prompts share is copied from another place instead. A model that cannot roll back cannot
        copy, so there only the length counts.
        """
        wanted_ids, copies = request.prompt_ids, self._made[0].sequence.engine.facts.can_rollback

        def preference(slot: Slot) -> tuple[bool, int, int]:
            kept = slot.sequence.reusable_length(wanted_ids)
            loses_little = not pays(slot.sequence.length - kept, slot.sequence.length)
            return copies and loses_little, kept, -slot.latest_use

        found = max(self.free(request.options), key=preference)
        if copies:
            self._copy_prefix(found.sequence, wanted_ids)
        self._clear_idle(found)
        found.is_taken = True  # last: where a copy fails, the place is as free as before
        return found

    def _copy_prefix(self, found: CachedSequence, wanted_ids: TokenIds) -> None:
        own = found.reusable_length(wanted_ids)
        shared, source = max(
            ((slot.sequence.reusable_length(wanted_ids), slot.sequence) for slot in self.all), key=lambda pair: pair[0]
        )
        if shared >= own + LEAST_TOKENS:
            self._parked.park_before(found, own)
            found.adopt_prefix(source, shared)

    def _clear_idle(self, found: Slot) -> None:
        """Where sequences share their cells, a pass looks at those of all, so idle texts are parked instead."""
        if found.sequence.engine.facts.own_cells:
            return
        idle = [slot for slot in self.all if slot is not found and not slot.is_taken]
        kept = 0
        for slot in sorted(idle, key=lambda slot: slot.latest_use, reverse=True):
            kept += slot.sequence.length
            if kept > MOST_IDLE_TOKENS:
                self._parked.park(slot.sequence)
                slot.sequence.rollback(0)
