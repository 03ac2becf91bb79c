"""The contract of a drafter: whatever proposes tokens. It sees committed tokens only, never the target's next ones."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from edgespec.sampling import Sampler
from edgespec.types import Draft, TokenIds, Verdict


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """What one round asks of a drafter.

    `token_ids` [n]: prompt and emitted tokens, the pending one last; the first proposed token stands at position n.
    `max_tokens`: most nodes the draft may have. `sampler`: the target's settings and noise; a drafter that samples
    uses both, so that its tokens couple with the target's. `needs_distributions`: the acceptance rule compares
    distributions, so sampled proposals come with theirs. `worth_going_on(index, confidence)`: asked by drafters whose
    tokens cost time, before each further token; False ends the draft.
    """

    token_ids: TokenIds
    max_tokens: int
    sampler: Sampler
    needs_distributions: bool = False
    worth_going_on: Callable[[int, float], bool] | None = None


class Drafter(ABC):
    """One method of proposing tokens, for one generation at a time."""

    name: str

    @abstractmethod
    def begin(self, prompt_ids: TokenIds) -> None:
        """A new generation starts from `prompt_ids` [n]; state that its prefix shares with the last one may stay."""

    @abstractmethod
    def draft(self, request: DraftRequest) -> Draft:
        """Propose at most `request.max_tokens` tokens to follow `request.token_ids`; an empty draft is allowed."""

    def observe(self, draft: Draft, verdict: Verdict) -> None:
        """Learn what became of the last draft; the committed tokens arrive with the next request."""

    @property
    def bytes_used(self) -> int:
        """Memory held beyond the shared one, in bytes."""
        return 0

    def cancel(self) -> None:
        """End a running draft early; may be called from any thread."""

    def clear_cancel(self) -> None:
        """Forget a `cancel` that no draft has met."""

    def close(self) -> None:
        """Free what the drafter owns."""
