"""Shared by drafters that read the target's hidden states: scores of a reduced head, and chains and trees of them.

Tokens outside the draft vocabulary are never proposed; the target can still sample them.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable
from copy import copy
from typing import Self

import numpy as np
from numpy.typing import NDArray

from edgespec.drafters.base import Drafter, DraftRequest
from edgespec.drafters.blas import one_blas_thread
from edgespec.drafters.growth import CHAIN_PRIOR, ROOT, DrawnChain, Growth, MakeCandidates
from edgespec.drafters.scored import Array, ScoredTokens
from edgespec.errors import EngineError, ModelFileError
from edgespec.formats.head_file import HeadFile
from edgespec.formats.head_manifest import PROJECT
from edgespec.types import EMPTY_DRAFT, Draft, Logits, TokenIds

_LEAST_SQUARE = np.float32(1e-6)
MAX_ROW_COST = 0.1  # tokens; second choices rarely pay for more expensive rows, so no tree is grown
_MOST_CHILDREN, _LOOKED_AT = 8, 8


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
                f"the {self.name} heads' vocabulary has rows of mean size {size:g}: train them again (edgespec "
                "train-heads), or leave them out"
            )
        self._size = np.float32(1.0 / size)
        self._rows, self._scored = rows, ScoredTokens(heads, vocabulary_size, rows)

    def draft(self, request: DraftRequest) -> Draft:
        """A tree or a chain, made on one core.

        Threads of a BLAS wait for more work by spinning, for longer than a draft takes, and would take cores from the
        target's next pass. Raises EngineError when the heads' scores are not finite: finite weights may have products
        that overflow.
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
                "target. Train them again (edgespec train-heads), or use another drafter"
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

    def grows(self, request: DraftRequest) -> bool:
        """Whether to draft a tree rather than a chain: where the rule and the target take one, and rows are cheap.

        A fixed draft length sets no cost of a row: it means a tree of that many nodes, or a chain of that many tokens
        where trees are not possible. The automatic length sets the measured cost.
        """
        return request.max_branches > 0 and request.row_cost < MAX_ROW_COST

    def tree(
        self,
        request: DraftRequest,
        make: MakeCandidates,
        root_scores: Array,
        scores_of: Callable[[Growth], Iterable[Array]],
        deepest: int | None = None,
    ) -> Draft:
        """A tree of at most `request.max_tokens` nodes that pay for their rows, with no path longer than `deepest`.

        `root_scores` [m] of what follows the text, `scores_of(growth)` [n, m] of what follows each node it waits for.
        """
        most, branches = request.max_tokens, request.max_branches
        growth = Growth(make, most, branches, _MOST_CHILDREN, request.row_cost, _LOOKED_AT, deepest)
        growth.open(ROOT, self.row(root_scores))
        while growth.grow(self._end_ids):
            for node, scores in zip(growth.waiting, scores_of(growth), strict=True):
                growth.open(node, self.row(scores))
        return growth.draft()

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
