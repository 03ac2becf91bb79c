"""The interface of a drafter, which proposes tokens. It sees committed tokens only, never the target's next ones."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgespec.engines.base import Engine
from edgespec.engines.head import DraftHead
from edgespec.engines.sequence import Passes
from edgespec.sampling.sampler import Sampler
from edgespec.types import Draft, Evidence, TokenIds, Verdict


class DraftRequest(NamedTuple):
    """What one round asks of a drafter.

    `token_ids` [n]: prompt and emitted tokens, the pending one last; the first proposed token has position n.
    `max_tokens`: most nodes the draft may have. `sampler`: the target's settings and noise; a drafter that samples
    uses both, so that its tokens couple with the target's. `needs_distributions`: the acceptance rule compares
    distributions, so sampled proposals come with theirs. `should_continue(num_drafted, evidence)`: called by drafters
    whose tokens cost time, after each token with that token's evidence; False ends the draft after it.
    `num_drafted`: how many of the last `token_ids` are drafted themselves, by another drafter in the same round.
    `max_branches`: most side branches that the draft may have, 0 for a chain. `row_cost`: cost of a further row of the
    target's pass, in tokens: a node of a tree that is accepted with a smaller probability does not pay for its row.
    `features` [m, feature size]: the target's last hidden states of the m tokens before the pending one, m at least 1;
    the pending token was sampled from the last row. None unless the drafter `wants_features`.
    `predicted_ids` [m]: what the caller expects the answer to be; None: nothing.
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
    predicted_ids: TokenIds | None = None

    def at_most(self, max_tokens: int) -> DraftRequest:
        """The same request for no more tokens."""
        return self if max_tokens >= self.max_tokens else DraftRequest(self.token_ids, max_tokens, *self[2:])


class Drafter(ABC):
    """One method of proposing tokens, for one generation at a time.

    `is_free`: drafting costs next to nothing, so a draft may be made and not used. `costs_once`: a draft of any length
    costs the same pass. `wants_features`: it reads the target's hidden states. The evidence of its tokens are scores of
    the order of one that grow with the probability of acceptance; `prior`: initial log odds of acceptance, a bias and
    the weight of each score, as far as they are known.
    """

    name: str
    notes: tuple[str, ...] = ()  # for the user, of its configuration
    models: tuple[Engine | DraftHead, ...] = ()  # that its drafts run
    owned: tuple[Engine | DraftHead, ...] = ()  # of these, those that it closes
    is_free: ClassVar[bool] = False
    costs_once: ClassVar[bool] = False
    wants_features: ClassVar[bool] = False
    prior: ClassVar[tuple[float, ...]] = (-0.2,)

    def begin(self, prompt_ids: TokenIds) -> None:
        """A new generation starts from `prompt_ids` [n]; state of a prefix shared with the last one may be kept."""

    def serves(self, request: DraftRequest) -> bool:
        """Whether it may draft anything for a generation of such requests."""
        return True

    @abstractmethod
    def draft(self, request: DraftRequest) -> Draft:
        """Propose at most `request.max_tokens` tokens to follow `request.token_ids`; an empty draft is allowed."""

    def drafting(self, request: DraftRequest) -> Passes[Draft]:
        """`draft`, asking for the passes of its model: those of several sequences may be run as one."""
        yield from ()
        return self.draft(request)

    def observe(self, draft: Draft, verdict: Verdict) -> None:
        """Learn the outcome of the last draft; the committed tokens arrive with the next request."""

    def num_uncached(self, token_ids: TokenIds) -> int:
        """Tokens of the committed `token_ids` [n] that it must read before it can draft behind them."""
        return 0

    def reading(self, token_ids: TokenIds, whole: int, part: int) -> int:
        """`num_uncached` of the next draft, which may be from a part of the text where reading all of it takes long.

        A drafter that can do with less reads the whole text if it lacks at most `whole` tokens of it, and else about
        the latest `part` of them.
        """
        return self.num_uncached(token_ids)

    @property
    def reads_part(self) -> bool:
        """Whether it has read only a part of the text, by `reading`."""
        return False

    def another(self, sequence: int) -> Drafter | None:
        """A drafter of this kind for another sequence, which runs the same models and owns none of them.

        `sequence`: of the target, and of a draft model. None: it serves one sequence, or needs nothing of this one.
        """
        return None

    @property
    def engine(self) -> Engine | None:
        """Its own engine; None without one."""
        return None

    def reset_engine(self) -> Engine | None:
        """Its own engine with an empty cache, for measuring; None without one. Only within a turn."""
        return None

    @property
    def bytes_used(self) -> int:
        """Memory of its own, in bytes."""
        return 0

    def set_threads(self, threads: int) -> None:
        """Threads of the drafts from now on, where its models can change them."""
        for model in self.models:
            model.set_threads(min(threads, model.facts.threads) if isinstance(model, Engine) else threads)

    def cancel(self) -> None:
        """End a running draft early; may be called from any thread."""
        for model in self.models:
            model.cancel()

    def clear_cancel(self) -> None:
        """Withdraw a `cancel` that no draft has seen yet."""
        for model in self.models:
            model.clear_cancel()

    def close(self) -> None:
        """Free what the drafter owns."""
        for model in self.owned:
            model.close()
