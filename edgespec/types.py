"""Values that engines, drafters and the decoding loop pass to each other: batches, drafts, verdicts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import BatchError

TokenIds = NDArray[np.int32]
Logits = NDArray[np.float32]
PoolingName = Literal["mean", "cls", "last"]
"""Which hidden states of a text are its embedding: their mean, that of the first token, or of the last one."""
Evidence = tuple[float, ...]
"""Features of one drafted token, from which its acceptance is predicted; each drafter defines its own."""
NO_PARENT = -1
Progress = Callable[[int, int, str], None]
"""Callback of long work: (steps done, steps in all, what is being done); an exception it raises ends the work."""


def no_progress(_done: int, _total: int, _what: str) -> None:
    """A callback that ignores progress."""


class Distribution(NamedTuple):
    """A sparse probability distribution: the `token_ids` [m] left after truncation and their `probs` [m], sum 1."""

    token_ids: TokenIds
    probs: NDArray[np.float64]

    def prob_of(self, token_id: int) -> float:
        """Probability of one token; 0 if it was truncated."""
        indices = np.flatnonzero(self.token_ids == token_id)
        return self.probs[indices[0]] if indices.size else 0


_CERTAIN = np.ones(1)
_CERTAIN.flags.writeable = False


def one_hot(token_id: int) -> Distribution:
    """All probability on one token."""
    return Distribution(np.array([token_id], np.int32), _CERTAIN)


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of one target pass.

    `token_ids` [n]; `parents` [n], index of the row before it, or -1 for the last cached token of the sequence;
    `sequences` [n], the KV sequence of each row; `outputs` [n], True for rows that need logits.
    Rows of one sequence are together; with different parents they form a tree, whose main chain comes first.
    """

    token_ids: TokenIds
    parents: TokenIds
    sequences: TokenIds
    outputs: NDArray[np.bool_]

    @staticmethod
    def chain(token_ids: Sequence[int] | TokenIds, *, sequence: int = 0, last_only: bool = False) -> Batch:
        """Consecutive rows, with logits for all of them or for the last one only (prefill)."""
        ids = np.asarray(token_ids, np.int32)
        return Batch(ids, *_chain_rows(ids.size, sequence, last_only))

    @staticmethod
    def tree(pending_token_id: int, draft: Draft, *, sequence: int = 0) -> Batch:
        """The pending token as row 0 and draft node i as row i + 1, with logits for all rows."""
        ids, parents = np.empty((2, draft.num_tokens + 1), np.int32)
        ids[0], ids[1:] = pending_token_id, draft.token_ids
        parents[0], parents[1:] = NO_PARENT, draft.parents
        parents[1:] += 1
        return Batch(ids, parents, np.full(ids.size, sequence, np.int32), np.ones(ids.size, np.bool_))

    @property
    def width(self) -> int:
        """Number of rows."""
        return int(self.token_ids.size)


@lru_cache(maxsize=256)
def _chain_rows(count: int, sequence: int, last_only: bool) -> tuple[TokenIds, TokenIds, NDArray[np.bool_]]:
    """Parents, sequences and outputs [count] of consecutive rows; all batches of this shape share the arrays."""
    outputs = np.full(count, not last_only)
    outputs[-1:] = True
    found = np.arange(-1, count - 1, dtype=np.int32), np.full(count, sequence, np.int32), outputs
    for array in found:
        array.flags.writeable = False
    return found


def packed(batches: Sequence[Batch]) -> Batch:
    """The rows of all `batches`, one after another."""
    widths = np.array([batch.width for batch in batches], np.int32)
    begins = np.repeat(np.cumsum(widths, dtype=np.int32) - widths, widths)  # of its batch, for each row
    parents = np.concatenate([batch.parents for batch in batches])
    return Batch(
        np.concatenate([batch.token_ids for batch in batches]),
        np.where(parents >= 0, parents + begins, parents),
        np.concatenate([batch.sequences for batch in batches]),
        np.concatenate([batch.outputs for batch in batches]),
    )


@dataclass(frozen=True, slots=True)
class Draft:
    """The proposed tokens of one round: a tree in which parents come before children and the main chain comes first.

    `token_ids` [n]; `parents` [n], index of the parent node, or -1 for a child of the pending token;
    `confidences` [n], estimated probability that a node is accepted, given that its parent is;
    `distributions`: per node, the distribution it was sampled from; None if the proposal is deterministic;
    `evidence`: per node, the features from which its confidence is estimated; None if there are none;
    `wants_rows`: the drafter needs the target's most likely token after every row, rejected rows included;
    `is_chain`: the tree has a single branch.
    Raises BatchError when the sizes differ or a parent comes after its child.
    """

    token_ids: TokenIds
    parents: TokenIds
    confidences: NDArray[np.float32]
    distributions: tuple[Distribution, ...] | None = None
    evidence: tuple[Evidence, ...] | None = None
    wants_rows: bool = False
    is_chain: bool = field(init=False, compare=False)
    num_tokens: int = field(init=False, compare=False)

    def __post_init__(self) -> None:
        count = int(self.token_ids.size)
        object.__setattr__(self, "num_tokens", count)
        distributions, evidence = self.distributions, self.evidence
        if not (
            self.parents.size == self.confidences.size == count
            and (distributions is None or len(distributions) == count)
            and (evidence is None or len(evidence) == count)
        ):
            given = [len(each) for each in (distributions, evidence) if each is not None]
            sizes = [count, self.parents.size, self.confidences.size, *given]
            raise BatchError(f"a draft needs one parent, confidence, distribution and evidence per token, got {sizes}")
        parents = self.parents.tolist()
        object.__setattr__(self, "is_chain", parents == list(range(NO_PARENT, count - 1)))
        if not (self.is_chain or all(NO_PARENT <= parent < node for node, parent in enumerate(parents))):
            raise BatchError(f"draft parents must come before their children, got {parents}")

    @staticmethod
    def chain(
        token_ids: Sequence[int] | TokenIds,
        confidences: Sequence[float] | NDArray[np.float32] | None = None,
        distributions: Sequence[Distribution] | None = None,
        evidence: Sequence[Evidence] | None = None,
    ) -> Draft:
        """A draft with a single branch; confidences are 1 if not given."""
        ids = np.asarray(token_ids, np.int32)
        known = np.ones(ids.size, np.float32) if confidences is None else np.asarray(confidences, np.float32)
        parents = np.arange(-1, ids.size - 1, dtype=np.int32)
        return Draft(
            ids,
            parents,
            known,
            None if distributions is None else tuple(distributions),
            None if evidence is None else tuple(evidence),
        )

    def first(self, count: int, confidences: Sequence[float] | None = None) -> Draft:
        """The first `count` nodes, which are a valid tree because parents come before children.

        `confidences`, at least `count` values, replace the draft's own.
        """
        return Draft(
            self.token_ids[:count],
            self.parents[:count],
            self.confidences[:count] if confidences is None else np.array(confidences[:count], np.float32),
            None if self.distributions is None else self.distributions[:count],
            None if self.evidence is None else self.evidence[:count],
            self.wants_rows,
        )

    @property
    def main_chain(self) -> Draft:
        """The first branch; the whole draft if it is a chain."""
        if self.is_chain:
            return self
        return self.first(next(node for node, parent in enumerate(self.parents.tolist()) if parent != node - 1))

    def depths(self) -> list[int]:
        """Number of ancestors of each node within the draft."""
        depths: list[int] = []
        for parent in self.parents.tolist():
            depths.append(0 if parent == NO_PARENT else depths[parent] + 1)
        return depths

    def children_of(self, node: int) -> list[int]:
        """Children of `node` (-1: of the pending token), in the order in which they were proposed."""
        children: list[int] = np.flatnonzero(self.parents == node).tolist()
        return children

    def child_of(self, node: int, token_id: int) -> int | None:
        """The child of `node` (-1: of the pending token) that proposes `token_id`; None if there is none."""
        if self.is_chain:
            child = node + 1
            return child if child < self.num_tokens and self.token_ids[child] == token_id else None
        matches = np.flatnonzero((self.parents == node) & (self.token_ids == token_id))
        return int(matches[0]) if matches.size else None


EMPTY_DRAFT = Draft.chain([])


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result of verifying one draft: the accepted path of nodes, then the residual or bonus token.

    `row_choices`, only for a draft with `wants_rows`: the target's most likely token after the pending token and after
    each node.
    """

    accepted_nodes: tuple[int, ...]
    next_token_id: int
    row_choices: tuple[int, ...] | None = None
