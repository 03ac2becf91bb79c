"""Heads of a file (`formats.head_file`): what all kinds read and score.

Tokens outside the heads' vocabulary are never proposed; the target can still sample them.
"""

from __future__ import annotations

from copy import copy

import numpy as np
from numpy.typing import NDArray

from edgespec.engines.head import States
from edgespec.errors import EngineError, ModelFileError
from edgespec.formats.head_file import PROJECT, HeadFile
from edgespec.types import Logits, TokenIds

_LEAST_SQUARE = np.float32(1e-6)
NEVER = np.float32(-1e30)  # a logit; finite, so that no bias makes it NaN
FIRST_ROOM = 256  # rows of tokens of the text


class ScoredTokens:
    """The tokens of a text that are scored: frequent ones always, others once they occur; the row of logits they fill.

    A draft pays for every row of the target's head that it reads. Rare words of an answer mostly come from the prompt
    or from the answer so far: in SmolLM2's answers to Spec-Bench 8,192 frequent tokens are 90% of all, and 97% with
    those that occurred before; 16,384 are 95% (FR-Spec, arXiv 2502.14856, keeps frequent ones only).
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
        self._row = np.zeros((1, manifest.vocabulary_size), np.float32)  # without the target's padding
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

    def logits(self, states: States, scores: States) -> Logits:
        """Logits [n, the heads' vocabulary], until the next call, of `states` [n, width], given `scores` [n, frequent].

        Raises EngineError for scores that are not finite: finite weights may have products that overflow.
        """
        if self._num_met:
            # Not by BLAS: its threads spin for more work, and would take cores from the target's next pass.
            with np.errstate(over="ignore", invalid="ignore"):
                met = np.einsum("nd,md->nm", states, self._met_rows[: self._num_met])
            scores = np.concatenate((scores, met), axis=1)
        if not np.isfinite(scores).all():
            raise EngineError(
                "the heads gave scores that are not finite: they are damaged, or overflow with this target. Train them "
                "again (scripts/train/heads.py), or use another drafter"
            )
        rows = self._row if len(scores) == 1 else np.full((len(scores), self._row.size), NEVER)
        rows[:, self._ids] = scores
        return rows

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for array in (self._slots, self._is_known, self._met_rows, self._row, self._ids))


class HeadText:
    """What heads of a file read of the target's states and of tokens, and which tokens they score, for one text.

    `given_layers`: of the target, whose inputs precede the last state in what it gives, the heads' own among them.
    """

    def __init__(self, heads: HeadFile, vocabulary_size: int, given_layers: tuple[int, ...]) -> None:
        """Raises ModelFileError where the rows of the heads' vocabulary are all zero, or too large to be scaled."""
        manifest = heads.manifest
        self._columns, self._num_inputs = columns_of(heads, given_layers), len(manifest.layers)
        self._is_projected, self._embedding = PROJECT in heads.arrays, heads.embedding
        self.feature_width = manifest.feature_size // (len(manifest.layers) + 1) * (len(given_layers) + 1)
        # The rows of the head are the input embeddings too, scaled to unit size; a token without one is zero.
        with np.errstate(over="ignore"):
            size = float(np.sqrt(np.mean(np.square(heads.vocabulary))))
        if not 0 < size < np.inf:
            raise ModelFileError(
                f"the {manifest.kind} heads' vocabulary has rows of mean size {size:g}: train them again "
                "(scripts/train/heads.py), or leave them out"
            )
        self._size = np.float32(1.0 / size)
        is_read = heads.embedding is None or heads.frequent is not None
        self._rows = heads.vocabulary[: None if is_read else 0].astype(np.float16)
        self.scored = ScoredTokens(heads, vocabulary_size, self._rows)

    def another(self) -> HeadText:
        found = copy(self)
        found.scored = self.scored.another()
        return found

    def read(self, features: States) -> States:
        """The target's states [n, all given ones] as the heads read them [n, all of theirs].

        Inputs of layers grow with the depth and are scaled to unit size; the last state has been through a norm.
        """
        if self._columns is not None:
            features = features[:, self._columns]
        if not (self._is_projected and self._num_inputs):
            return features
        states = features.reshape(len(features), self._num_inputs + 1, -1).copy()
        inputs = states[:, :-1]
        inputs /= np.sqrt(np.mean(np.square(inputs), axis=2, keepdims=True) + _LEAST_SQUARE)
        return states.reshape(features.shape)

    def embed(self, token_ids: TokenIds) -> States:
        """Input rows [n, hidden size] of `token_ids` [n]."""
        if self._embedding is not None:
            return self._embedding.rows(token_ids)
        slots = self.scored.slots_of(token_ids)
        rows: States = self._rows[slots].astype(np.float32) * self._size
        rows[slots < 0] = 0.0
        return rows

    @property
    def num_bytes(self) -> int:
        tables = self._rows.nbytes + (0 if self._embedding is None else self._embedding.num_bytes)
        return self.scored.num_bytes + tables


def columns_of(heads: HeadFile, given_layers: tuple[int, ...]) -> NDArray[np.intp] | None:
    """Places of the states that `heads` read among those of all `given_layers` and the last; None: they read all."""
    manifest = heads.manifest
    if given_layers == manifest.layers:
        return None
    width = manifest.feature_size // (len(manifest.layers) + 1)
    blocks = [*(given_layers.index(layer) for layer in manifest.layers), len(given_layers)]
    return np.concatenate([np.arange(block * width, (block + 1) * width) for block in blocks])
