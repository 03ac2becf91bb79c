"""Heads with a llama.cpp context of their own, which caches pairs of a state and the token behind it."""

from __future__ import annotations

from typing import Any

import numpy as np

from edgespec.engines.head import FeatureHead, HeadFacts, States
from edgespec.engines.llamacpp.extensions import extension
from edgespec.engines.llamacpp.head_context import ContextRequest, HeadContext, widest_step
from edgespec.engines.llamacpp.library import library
from edgespec.engines.llamacpp.rows import PairRows
from edgespec.errors import BatchError, ContextFull
from edgespec.types import Logits, TokenIds


class PairHead(HeadContext, FeatureHead):
    """`last_only`: whether the library computes logits of the last row of a pass alone."""

    last_only = False

    def __init__(
        self, request: ContextRequest, facts: HeadFacts, vocabulary_size: int, owned_model: Any = None
    ) -> None:
        super().__init__(request, facts, vocabulary_size, owned_model)
        self._step = widest_step(vocabulary_size)
        self._rows = PairRows(self._step)
        # Masked: states of the rows with logits. Otherwise a pass without any would still copy its states.
        extension("set_states")(self._context, True, not self.last_only)

    def decode(self, token_ids: TokenIds, states: States) -> tuple[Logits, States]:
        self._require_open()
        self._check_pairs(token_ids, states)
        self._trim()
        count = int(token_ids.size)
        for start in range(0, count, self._step):
            stop = min(start + self._step, count)
            part = np.ascontiguousarray(states[start:stop], np.float32)
            self._rows.fill(
                self.end + start, token_ids[start:stop], part, outputs=stop == count, last_only=self.last_only
            )
            self._run(library().llama_decode, self._rows.struct, stop - start)
        self.end += count
        last = (count - 1) % self._step
        row = 0 if self.last_only else last
        logits = np.ctypeslib.as_array(library().llama_get_logits(self._context), (row + 1, self._vocabulary_size))
        return logits[row], self._states(last + 1)[last]

    def _check_pairs(self, token_ids: TokenIds, states: States) -> None:
        if token_ids.size == 0 or states.shape != (token_ids.size, self.facts.width):
            raise BatchError(
                f"one state of width {self.facts.width} per token and at least one token are needed, got "
                f"{token_ids.size} tokens and states {states.shape}"
            )
        self._check_tokens(int(token_ids.min()), int(token_ids.max()))
        room = self.facts.context_length - (self.end - self.start)
        if token_ids.size > room:
            raise ContextFull(f"the head's context of {self.facts.context_length} has room for {room} more pairs")

    def _is_sound(self) -> bool:
        """Whether the results of one pair of arbitrary numbers are numbers."""
        states = self.encode(np.ones((1, self.facts.feature_width), np.float32))
        logits, state = self.decode(np.zeros(1, np.int32), states)
        return bool(np.isfinite(state).all() and np.isfinite(logits.max()))

    def _states(self, count: int) -> States:
        return np.ctypeslib.as_array(extension("get_states")(self._context), (count, self.facts.width))
