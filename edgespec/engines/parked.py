"""Saved KV states of other conversations, in memory, so that switching between them needs no new prefill.

They complement the sequences of an engine, which are few because each takes memory for a whole context. A state that
was saved and loaded gives the same bits as a fresh model.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from edgespec.engines.sequence import CachedSequence, CachedText
from edgespec.errors import EdgespecError
from edgespec.platform.memory import return_freed_memory
from edgespec.types import TokenIds

logger = logging.getLogger("edgespec")
MOST_STATES, MOST_BYTES = 4, 256 << 20
LEAST_TOKENS = 32  # reading fewer again is faster than copying a state
_COST = 8  # tokens whose states can be copied in the time of reading one


@dataclass(frozen=True, slots=True)
class Parked:
    """Tokens [n] and the engine's state after them."""

    text: CachedText
    state: bytes


class ParkedStates:
    """At most `most_states` states of `most_bytes` in all; the oldest one is removed first."""

    def __init__(self, most_states: int = MOST_STATES, most_bytes: int = MOST_BYTES) -> None:
        self._most_states, self._most_bytes = most_states, most_bytes
        self._states: list[Parked] = []  # the latest one last

    @property
    def num_bytes(self) -> int:
        return sum(len(parked.state) for parked in self._states)

    def clear(self) -> None:
        self._states.clear()

    def make_way(self, live: CachedSequence, wanted_ids: TokenIds) -> None:
        """Before `wanted_ids` [n] are read: save the state that they replace, and load one that they continue.

        Each only where it saves more time than the copy takes. Where it fails, tokens are read again instead.
        """
        facts = live.engine.facts
        can_rollback = facts.can_rollback
        held = live.reusable_length(wanted_ids)
        found, most = None, held
        for parked in self._states:
            shared, size = parked.text.shared_length(wanted_ids, facts.prompt_block), parked.text.token_ids.size
            if shared > most and (shared == size or (can_rollback and shared >= facts.loaded_reach(size))):
                found, most = parked, shared
            del parked  # or the last one would outlive what `park` drops
        self.park_before(live, held)
        if found is not None and pays(most - held, found.text.token_ids.size):
            self._states = [parked for parked in self._states if parked is not found]
            try:
                live.adopt(found.state, found.text)
            except (EdgespecError, MemoryError) as exc:
                logger.debug("a parked state cannot be used: %s", exc)

    def park_before(self, live: CachedSequence, held: int) -> None:
        """Before all but the first `held` tokens of `live` are dropped: save its state if that saves time."""
        if pays(live.length - held, live.length):
            self.park(live)

    def park(self, live: CachedSequence) -> None:
        """Save the state of `live`, unless it is too large or cannot be saved."""
        live.reconcile()
        if live.length < LEAST_TOKENS:
            return
        needed = live.length * live.engine.facts.kv_bytes_per_token
        if needed > self._most_bytes:
            return
        text = live.text._replace(token_ids=live.token_ids.copy())
        self._states = [parked for parked in self._states if not text.begins_with(parked.text)]
        self._drop_beyond(self._most_states, self._most_bytes - needed)  # first: while it is saved it takes twice
        try:
            state = live.engine.save_state(live.sequence)
        except (EdgespecError, MemoryError) as exc:
            logger.debug("a state cannot be parked: %s", exc)
            return
        self._states.append(Parked(text, state))
        self._drop_beyond(self._most_states, self._most_bytes)
        return_freed_memory()

    def _drop_beyond(self, most_states: int, most_bytes: int) -> None:
        while self._states and (len(self._states) > most_states or self.num_bytes > most_bytes):
            del self._states[0]


def pays(num_saved: int, num_copied: int) -> bool:
    """Whether copying the state of `num_copied` tokens takes less time than reading `num_saved` of them again."""
    return num_saved >= LEAST_TOKENS and num_saved * _COST >= num_copied
