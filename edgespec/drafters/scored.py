"""Which tokens of a heads file are scored: the frequent ones always, the others once they occur in the text.

A draft pays for every row of the target's head that it reads. Rare words of an answer mostly come from the prompt or
from the answer so far: in SmolLM2's answers to Spec-Bench 8,192 frequent tokens are 90% of all, and 97% with those that
occurred before; 16,384 are 95% (FR-Spec, arXiv 2502.14856, keeps frequent ones only).
"""

from __future__ import annotations

from copy import copy

import numpy as np
from numpy.typing import NDArray

from edgespec.formats.head_file import HeadFile
from edgespec.types import Logits, TokenIds

Array = NDArray[np.float32]
NEVER = np.float32(-1e30)  # a logit; finite, so that no bias makes it NaN
FIRST_ROOM = 256  # rows of tokens of the text


class ScoredTokens:
    """The scored tokens of one text, and the row of logits that they fill.

    `rows`: the vocabulary of `heads` in the type that is kept.
    """

    def __init__(self, heads: HeadFile, vocabulary_size: int, rows: NDArray[np.floating]) -> None:
        manifest = heads.manifest
        self._rows, self._scale = rows, np.float32(manifest.scale)
        self._token_ids, self._frequent = heads.token_ids, heads.frequent
        self._slots = np.full(vocabulary_size, -1, np.int32)
        self._slots[heads.token_ids] = np.arange(heads.token_ids.size)
        self._always = heads.token_ids if heads.frequent is None else heads.token_ids[heads.frequent]
        self._is_known = np.zeros(heads.token_ids.size, np.bool_)  # scored already
        room = 0 if heads.frequent is None else FIRST_ROOM
        self._met_rows = np.zeros((room, manifest.hidden_size), np.float32)
        self._row = np.zeros(manifest.vocabulary_size, np.float32)  # without the target's padding
        self.begin()

    def another(self) -> ScoredTokens:
        """The same for another text; the rows of the head are shared."""
        found = copy(self)
        found._is_known, found._row = self._is_known.copy(), np.zeros_like(self._row)
        found._met_rows = np.zeros((min(len(self._met_rows), FIRST_ROOM), self._met_rows.shape[1]), np.float32)
        found.begin()
        return found

    def begin(self) -> None:
        """A new text."""
        self._num_read = self._num_met = 0
        self._is_known[:] = self._frequent is None
        if self._frequent is not None:
            self._is_known[self._frequent] = True
        self._ids = self._always
        self._row[:] = NEVER

    def read(self, token_ids: TokenIds) -> None:
        """Score the tokens of the text `token_ids` [n] from now on; it is the last one, continued, or another one."""
        if self._frequent is None:
            return
        if token_ids.size < self._num_read:
            self.begin()
        slots = self._slots[token_ids[self._num_read :]]
        self._num_read = token_ids.size
        # Not np.unique, whose first call imports numpy.ma: 65 ms of a first answer.
        new = np.array(sorted(set(slots[(slots >= 0) & ~self._is_known[slots]].tolist())), np.intp)
        if not new.size:
            return
        self._is_known[new] = True
        count = self._num_met + new.size
        if count > len(self._met_rows):
            grown = np.zeros((2 * count, self._met_rows.shape[1]), np.float32)
            grown[: self._num_met] = self._met_rows[: self._num_met]
            self._met_rows = grown
        self._met_rows[self._num_met : count] = self._rows[new].astype(np.float32) * self._scale
        self._num_met = count
        self._ids = np.concatenate((self._ids, self._token_ids[new]))

    def slots_of(self, token_ids: TokenIds) -> NDArray[np.int32]:
        """Rows of the file's vocabulary of `token_ids` [n]; -1 for tokens that it lacks."""
        return self._slots[token_ids]

    def complete(self, states: Array, scores: Array) -> Array:
        """`scores` [n, frequent ones] of `states` [n, width], and after them those of the text's other tokens."""
        if not self._num_met:
            return scores
        return np.concatenate((scores, states @ self._met_rows[: self._num_met].T), axis=1)

    def row(self, scores: Array) -> Logits:
        """Scores [m] as a row [the heads' vocabulary] of logits, which the next call overwrites."""
        self._row[self._ids] = scores
        return self._row

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for array in (self._slots, self._is_known, self._met_rows, self._row, self._ids))
