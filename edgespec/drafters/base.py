"""The contract of a drafter: whatever proposes tokens. It sees committed tokens only, never the target's next ones."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgespec.engines.base import Engine
from edgespec.sampling import Sampler
from edgespec.types import Draft, Evidence, TokenIds, Verdict


class DraftRequest(NamedTuple):
    """What one round asks of a drafter.

    `token_ids` [n]: prompt and emitted tokens, the pending one last; the first proposed token stands at position n.
    `max_tokens`: most nodes the draft may have. `sampler`: the target's settings and noise; a drafter that samples
    uses both, so that its tokens couple with the target's. `needs_distributions`: the acceptance rule compares
    distributions, so sampled proposals come with theirs. `worth_going_on(num_drafted, evidence)`: asked by drafters
    whose tokens cost time, after each token with that token's evidence; False ends the draft behind it.
    `num_drafted`: how many of the last `token_ids` are drafted themselves, by another drafter in the same round.
    `max_branches`: most side branches that the draft may have, 0 for a chain. `row_cost`: what a further row of the
    target's pass costs, in tokens: a node of a tree that stands with less probability does not pay for its row.
    `features` [m, hidden size]: the target's last hidden states of the m tokens before the pending one, m at least 1,
    the last row the one that the pending token was sampled from; None unless the drafter `wants_features`.
    `layer_inputs` [m, layers * hidden size]: likewise, what went into the layers that the drafter `wants_layers` of.
    """

    token_ids: TokenIds
    max_tokens: int
    sampler: Sampler
    needs_distributions: bool = False
    should_continue: Callable[[int, Evidence], bool] | None = None
    max_branches: int = 0
    num_drafted: int = 0
    row_cost: float = 0.0
    features: NDArray[np.float32] | None = None
    layer_inputs: NDArray[np.float32] | None = None

    def at_most(self, max_tokens: int) -> DraftRequest:
        """The same request for no more tokens."""
        return self if max_tokens >= self.max_tokens else DraftRequest(self.token_ids, max_tokens, *self[2:])


class Drafter(ABC):
    """One method of proposing tokens, for one generation at a time.

    `is_free`: drafting costs next to nothing, so that it may be done on trial. `wants_features`: it reads the target's
    hidden states. `evidence_kind`: what the evidence of its tokens is: `bucket`, one number that names a class of
    alike proposals; `scores`, numbers that grow with the probability of being accepted, each of the order of one.
    `prior`: the log odds of being accepted to begin with, a bias and what each score adds, where that is known.
    """

    name: str
    notes: tuple[str, ...] = ()  # what a user must be told of it
    is_free: ClassVar[bool] = False
    wants_features: ClassVar[bool] = False
    wants_layers: tuple[int, ...] = ()  # of the target, counted from 0: what goes into them is to be in each request
    evidence_kind: ClassVar[Literal["bucket", "scores"]] = "scores"
    prior: ClassVar[tuple[float, ...]] = (-0.2,)

    @abstractmethod
    def begin(self, prompt_ids: TokenIds) -> None:
        """A new generation starts from `prompt_ids` [n]; state that its prefix shares with the last one may stay."""

    @abstractmethod
    def draft(self, request: DraftRequest) -> Draft:
        """Propose at most `request.max_tokens` tokens to follow `request.token_ids`; an empty draft is allowed."""

    def observe(self, draft: Draft, verdict: Verdict) -> None:
        """Learn what became of the last draft; the committed tokens arrive with the next request."""

    def num_uncached(self, token_ids: TokenIds) -> int:
        """Tokens that it would first have to read to draft behind the committed `token_ids` [n]."""
        return 0

    @property
    def engine(self) -> Engine | None:
        """Its own engine; None without one."""
        return None

    def reset_engine(self) -> Engine | None:
        """Its own engine with an empty cache, for measuring; None without one. Only within a turn."""
        return None

    @property
    def bytes_used(self) -> int:
        """Memory held beyond the shared one, in bytes."""
        return 0

    def set_threads(self, threads: int) -> None:
        """Let drafts from now on use so many threads, where it has a model that can."""

    def cancel(self) -> None:
        """End a running draft early; may be called from any thread."""

    def clear_cancel(self) -> None:
        """Forget a `cancel` that no draft has met."""

    def close(self) -> None:
        """Free what the drafter owns."""
