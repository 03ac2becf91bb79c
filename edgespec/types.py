"""The values that pass between the parts: batches, drafts, verdicts, token events."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import BatchError

TokenIds = NDArray[np.int32]
Logits = NDArray[np.float32]
FinishReason = Literal["stop", "length", "cancelled"]
Evidence = tuple[float, ...]
"""What a drafter knows of one of its tokens before the target has seen it; its meaning is the drafter's own."""
NO_PARENT = -1
Progress = Callable[[int, int, str], None]
"""Called while something long is made, with (done, total, what is being done)."""


def no_progress(_done: int, _total: int, _what: str) -> None:
    """For callers who do not want to know."""


class Closing:
    """What has to be closed: a `with` block closes it at its end."""

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Distribution(NamedTuple):
    """A sparse probability distribution: `token_ids` [m] that survive truncation and their `probs` [m], sum 1."""

    token_ids: TokenIds
    probs: NDArray[np.float64]

    def prob_of(self, token_id: int) -> float:
        """Probability of one token, 0 when truncated away."""
        found = np.flatnonzero(self.token_ids == token_id)
        return self.probs[found[0]] if found.size else 0


def one_hot(token_id: int) -> Distribution:
    return Distribution(np.array([token_id], np.int32), np.ones(1))


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of one target pass.

    `token_ids` [n]; `parents` [n], the row each row follows, or -1 for the last cached token of its sequence;
    `sequences` [n], the KV sequence of each row; `outputs` [n], which rows need logits.
    Rows of one sequence that have different parents form a tree, main chain first.
    """

    token_ids: TokenIds
    parents: TokenIds
    sequences: TokenIds
    outputs: NDArray[np.bool_]

    @staticmethod
    def chain(token_ids: Sequence[int] | TokenIds, *, sequence: int = 0, last_only: bool = False) -> Batch:
        """Rows that follow one another; logits for all of them, or for the last one only (prefill)."""
        ids = np.asarray(token_ids, np.int32)
        outputs = np.full(ids.size, not last_only)
        outputs[-1:] = True
        return Batch(ids, np.arange(-1, ids.size - 1, dtype=np.int32), np.full(ids.size, sequence, np.int32), outputs)

    @staticmethod
    def tree(pending_token_id: int, draft: Draft, *, sequence: int = 0) -> Batch:
        """The pending token as row 0 and draft node i as row i + 1, all with logits."""
        ids = np.concatenate((np.array([pending_token_id], np.int32), draft.token_ids))
        parents = np.concatenate((np.array([NO_PARENT], np.int32), draft.parents + 1)).astype(np.int32)
        return Batch(ids, parents, np.full(ids.size, sequence, np.int32), np.ones(ids.size, np.bool_))

    @property
    def width(self) -> int:
        return int(self.token_ids.size)


@dataclass(frozen=True, slots=True)
class Draft:
    """The proposed tokens of one round: a tree listed parents first, main chain first.

    `token_ids` [n]; `parents` [n], index of the parent node or -1 for a child of the pending token;
    `confidences` [n], the estimated probability that a node is accepted given that its parent was;
    `distributions`, one per node: what the node was sampled from, or None for a deterministic proposal;
    `evidence`, one per node: what the confidences are to be estimated from, or None when there is nothing to go by;
    `wants_rows`: its drafter learns from what the target would choose after every row, refused ones included;
    `is_chain`: there is one branch only.
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
        """The draft without all but its first `count` nodes; parents come first, so what is left is whole.

        `confidences`, at least `count`: to take the place of its own.
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
        """The first branch, which is listed first: the whole draft when it has no other."""
        if self.is_chain:
            return self
        return self.first(next(node for node, parent in enumerate(self.parents.tolist()) if parent != node - 1))

    def depths(self) -> list[int]:
        """How many of the draft's nodes stand before each node on its path."""
        found: list[int] = []
        for parent in self.parents.tolist():
            found.append(0 if parent == NO_PARENT else found[parent] + 1)
        return found

    def children_of(self, node: int) -> list[int]:
        """The nodes below `node` (-1: below the pending token), in the order in which they were proposed."""
        found: list[int] = np.flatnonzero(self.parents == node).tolist()
        return found

    def child_of(self, node: int, token_id: int) -> int | None:
        """The node below `node` (-1: below the pending token) that proposes `token_id`."""
        found = np.flatnonzero((self.parents == node) & (self.token_ids == token_id))
        return int(found[0]) if found.size else None


EMPTY_DRAFT = Draft.chain([])


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the target made of one draft: the accepted path of nodes, then one token of the target's own.

    `row_choices`, for a draft that wants them: the likeliest token after the pending one and after each node.
    """

    accepted_nodes: tuple[int, ...]
    next_token_id: int
    row_choices: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class RoundRecord:
    """What one round decided, cost and brought. Times in seconds.

    `position`: index of the first token it could emit; `drafter`: who drafted, None for a plain pass; `width`: rows of
    the target pass; `confidences`: per draft token, the estimated probability that it stands if its parent does;
    `draft_s` includes deciding. `verify_s` is the target pass alone. `judge_s`: choosing tokens, keeping what stands.
    `is_disturbed`: the machine was busy with something else, so that the times say nothing of costs.
    """

    position: int
    drafter: str | None
    drafted_tokens: int
    accepted_tokens: int
    confidences: tuple[float, ...]
    draft_s: float
    verify_s: float
    judge_s: float = 0.0
    is_disturbed: bool = False

    @property
    def width(self) -> int:
        return self.drafted_tokens + 1


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One emitted token.

    `text` is what became printable with it (may be empty inside a UTF-8 sequence or a possible stop string);
    `position` its index in the sequence; `drafter` is the name of who proposed it, None for a token that the target
    added itself; `logprob` its natural log probability under the target's raw softmax, before temperature, bias,
    penalties and truncation; `top_logprobs`, where asked for, the (token id, log probability) of the likeliest tokens
    under the same, the likeliest first; `finish_reason` is set on the last event only.
    """

    token_id: int
    text: str
    position: int
    drafter: str | None
    logprob: float | None = None
    finish_reason: FinishReason | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()

    @property
    def from_draft(self) -> bool:
        return self.drafter is not None


@dataclass(slots=True)
class Stats:
    """Raw counters of one generation; every ratio is derived and guards zero. Times in seconds.

    `notes`: what a user must be told of it, such as a drafter that failed and was left out.
    """

    prompt_tokens: int = 0
    reused_tokens: int = 0
    new_tokens: int = 0
    rounds: int = 0
    target_passes: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    prefill_s: float = 0.0
    draft_s: float = 0.0
    verify_s: float = 0.0
    wall_s: float = 0.0
    peak_rss_bytes: int = 0
    finish_reason: FinishReason | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def acceptance_rate(self) -> float:
        """Accepted per drafted token; 0 when nothing was drafted."""
        return self.accepted_tokens / self.drafted_tokens if self.drafted_tokens else 0.0

    @property
    def mean_accepted_length(self) -> float:
        """Tokens emitted per verifying target pass, residual or bonus token included; the prefill's token is none."""
        return (self.new_tokens - 1) / self.rounds if self.rounds else 0.0

    @property
    def decode_s(self) -> float:
        return self.wall_s - self.prefill_s

    @property
    def overhead_s(self) -> float:
        """Time that is neither prefill nor drafting nor a target pass: our own bookkeeping."""
        return max(self.wall_s - self.prefill_s - self.draft_s - self.verify_s, 0.0)

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of decoding; prefill and the token that it yields are excluded."""
        return (self.new_tokens - 1) / self.decode_s if self.decode_s > 0 and self.new_tokens else 0.0
