"""Shared by drafters that read the target's hidden states: scores of a reduced head, and chains and trees of them.

Tokens outside the draft vocabulary are never proposed; the target can still sample them.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from copy import copy
from functools import cache
from typing import Self

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import ThreadpoolController

from edgespec.drafters.base import Drafter, DraftRequest
from edgespec.drafters.growth import CHAIN_PRIOR, DrawnChain, Growth, MakeCandidates, grown
from edgespec.errors import EngineError, ModelFileError
from edgespec.formats.head_file import PROJECT, HeadFile
from edgespec.types import EMPTY_DRAFT, Draft, Logits, TokenIds

_LEAST_SQUARE = np.float32(1e-6)
Array = NDArray[np.float32]
NEVER = np.float32(-1e30)  # a logit; finite, so that no bias makes it NaN
FIRST_ROOM = 256  # rows of tokens of the text
_LIMITING = threading.Lock()


@cache
def _controller() -> ThreadpoolController:
    return ThreadpoolController()  # finds the libraries that are loaded: milliseconds, so once


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """BLAS uses one thread within the block, unless a draft in another thread ends before it.

    Its threads wait for more work by spinning, for longer than a draft takes, and would take cores from the target's
    next pass. Their number is the whole process's: two threads that each set and restore it would restore what they saw
    of one another. So one at a time does, and what another drafts meanwhile goes by its limit, for milliseconds.
    """
    if not _LIMITING.acquire(blocking=False):
        yield
        return
    try:
        with _controller().limit(limits=1, user_api="blas"):
            yield
    finally:
        _LIMITING.release()


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


class StateDrafter(Drafter):
    """`heads` for a target whose vocabulary has `vocabulary_size` tokens; one of `end_ids` ends a draft.

    `given_layers`: those whose inputs precede the last state in the features of a request, the heads' own among them.

    Raises ModelFileError where the rows of the heads' vocabulary are all zero, or too large to be scaled.
    """

    wants_features = True
    prior = CHAIN_PRIOR

    def __init__(
        self,
        heads: HeadFile,
        vocabulary_size: int,
        end_ids: frozenset[int],
        given_layers: tuple[int, ...],
        rows: NDArray[np.floating],
    ) -> None:
        """`rows` [m, hidden size]: the heads' vocabulary in the type that is kept, none where it is not read."""
        manifest = heads.manifest
        self._columns = columns_of(heads, given_layers)
        self._num_inputs = len(manifest.layers)
        self._is_projected = PROJECT in heads.arrays
        self._end_ids = end_ids
        # The rows of the head are the input embeddings too, scaled to unit size; a token without one is zero.
        with np.errstate(over="ignore"):
            size = float(np.sqrt(np.mean(np.square(heads.vocabulary))))
        if not 0 < size < np.inf:
            raise ModelFileError(
                f"the {self.name} heads' vocabulary has rows of mean size {size:g}: train them again "
                "(scripts/train/heads.py), or leave them out"
            )
        self._size = np.float32(1.0 / size)
        self._rows, self._scored = rows, ScoredTokens(heads, vocabulary_size, rows)

    def draft(self, request: DraftRequest) -> Draft:
        """A tree or a chain, made on one core.

        Raises EngineError when the heads' scores are not finite: finite weights may have products that overflow.
        """
        if request.max_tokens < 1 or request.features is None or not len(request.features):
            return EMPTY_DRAFT
        self._scored.read(request.token_ids)
        with one_blas_thread(), np.errstate(over="ignore", invalid="ignore"):
            return self.drafted(request, request.features)

    def begin(self, prompt_ids: TokenIds) -> None:
        self._scored.begin()

    def another(self, sequence: int) -> Self:
        """It has the same weights, which stay this one's to free."""
        found = copy(self)
        found._scored = self._scored.another()
        return found

    @abstractmethod
    def drafted(self, request: DraftRequest, features: Array) -> Draft:
        """A draft of at least one token from the states `features` [m, feature size]."""

    def read(self, features: Array) -> Array:
        """The target's states [n, all given ones] as the heads read them [n, hidden size].

        Inputs of layers grow with the depth and are scaled to unit size; the last state has been through a norm.
        """
        if self._columns is not None:
            features = features[:, self._columns]
        if not self._is_projected:
            return features
        if self._num_inputs:
            states = features.reshape(len(features), self._num_inputs + 1, -1).copy()
            inputs = states[:, :-1]
            inputs /= np.sqrt(np.mean(np.square(inputs), axis=2, keepdims=True) + _LEAST_SQUARE)
            features = states.reshape(features.shape)
        return self.projected(features)

    @abstractmethod
    def projected(self, features: Array) -> Array:
        """States [n, hidden size] of scaled `features` [n, those of all layers read]."""

    def embed(self, token_ids: TokenIds) -> Array:
        """Input rows [n, hidden size] of `token_ids` [n]."""
        slots = self._scored.slots_of(token_ids)
        rows: Array = self._rows[slots].astype(np.float32) * self._size
        rows[slots < 0] = 0.0
        return rows

    def row(self, scores: Array) -> Logits:
        """Scores [m] as a row [the heads' vocabulary] of logits, which the next call overwrites. Raises as `draft`."""
        if not np.isfinite(scores).all():
            raise EngineError(
                f"the {self.name} heads gave scores that are not finite: they are damaged, or overflow with this "
                "target. Train them again (scripts/train/heads.py), or use another drafter"
            )
        return self._scored.row(scores)

    def chain(self, request: DraftRequest, most: int, scores_after: Callable[[int | None], Array]) -> Draft:
        """At most `most` tokens, sampled with the target's settings and, unless the rule compares, its noise.

        `scores_after(token_id)`: scores [m] of what follows the last drafted token, None at first.
        """
        chain = DrawnChain(request, most, self._end_ids)
        while chain.is_open:
            chain.add(self.row(scores_after(chain.token_ids[-1] if chain.token_ids else None)))
        return chain.as_draft()

    def tree(
        self,
        request: DraftRequest,
        make: MakeCandidates,
        root_scores: Array,
        scores_of: Callable[[Growth], Iterable[Array]],
        deepest: int | None = None,
    ) -> Draft:
        """As `grown`: `root_scores` [m] of what follows the text, `scores_of(growth)` [n, m] of its nodes."""

        def rows_of(growth: Growth) -> Iterable[Logits]:
            return map(self.row, scores_of(growth))

        return grown(request, make, self._end_ids, self.row(root_scores), rows_of, deepest)

    @property
    def bytes_used(self) -> int:
        return self._scored.num_bytes + self._rows.nbytes


def columns_of(heads: HeadFile, given_layers: tuple[int, ...]) -> NDArray[np.intp] | None:
    """Places of the states that `heads` read among those of all `given_layers` and the last; None: they read all."""
    manifest = heads.manifest
    if given_layers == manifest.layers:
        return None
    width = manifest.feature_size // (len(manifest.layers) + 1)
    blocks = [*(given_layers.index(layer) for layer in manifest.layers), len(given_layers)]
    return np.concatenate([np.arange(block * width, (block + 1) * width) for block in blocks])


def silu(x: Array) -> Array:
    """x / (1 + exp(-x)), without an overflow."""
    found: Array = x * (0.5 + 0.5 * np.tanh(0.5 * x))
    return found
