"""The interface of a controller, which decides each round of a generation which drafter drafts how many tokens.

A controller sees committed tokens, costs and outcomes, but no logits: under the coupled rule its decisions change the
speed and never the output.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from typing import NamedTuple

from edgespec.drafters.base import Drafter, DraftRequest
from edgespec.drafters.predicted import FORCED, PREDICTION, ForcedDrafter, PredictedDrafter
from edgespec.engines.sequence import Passes
from edgespec.reports import RoundRecord
from edgespec.types import EMPTY_DRAFT, Draft, TokenIds, Verdict


class Proposal(NamedTuple):
    """One round's draft and the name of the drafter it came from; None when nothing was drafted."""

    draft: Draft
    drafter: str | None = None


NOTHING = Proposal(EMPTY_DRAFT)
Clock = Callable[[], float]
"""Seconds that went by since some moment."""


class Controller(ABC):
    """Proposes before each round and learns from its outcome."""

    def __init__(self) -> None:
        self._asked = ""  # the drafter that drafts
        self._left_out, self._dropped = set[str](), set[str]()  # until `begin`, and for good
        self._resting = 0  # plain rounds that come next

    @abstractmethod
    def begin(self, prompt_ids: TokenIds, prefill_s: float = 0.0, clock: Clock | None = None) -> None:
        """A new generation starts from `prompt_ids` [n], which the target took `prefill_s` to read.

        `clock`: seconds of this generation, without those of others whose drafts share passes with its own.
        """

    @abstractmethod
    def proposing(self, request: DraftRequest) -> Passes[Proposal]:
        """The draft of the next round: at most `request.max_tokens` tokens; an empty one is plain decoding.

        Asks for the passes of draft models.
        """

    def leave_out(self) -> str:
        """The drafter that was asked last has failed: leave it out until `begin`. Returns its name."""
        self._left_out.add(self._asked)
        return self._asked

    def drop(self, names: Collection[str]) -> None:
        """These drafters were closed: leave them out for good."""
        self._dropped.update(names)
        self._left_out.update(names)

    def rest(self) -> int:
        """How many rounds to decode plainly before it is asked again: it may not draft in them, nor learns anything."""
        return self._resting

    @abstractmethod
    def observe(self, proposal: Proposal, verdict: Verdict, record: RoundRecord) -> None:
        """Learn the outcome of the last proposal and the cost of the round."""


class FixedLength(Controller):
    """One drafter with the same draft length in every round; what a grammar forces or a caller predicts comes first."""

    def __init__(self, drafter: Drafter, draft_length: int) -> None:
        super().__init__()
        self._drafter, self._asked, self.draft_length = drafter, drafter.name, draft_length
        self._forced, self._predicted = ForcedDrafter(), PredictedDrafter()

    def begin(self, prompt_ids: TokenIds, prefill_s: float = 0.0, clock: Clock | None = None) -> None:
        self._left_out &= self._dropped  # one may be dropped while the prompt is read, by another answer of the batch
        self._drafter.begin(prompt_ids)
        self._predicted.begin(prompt_ids)

    def proposing(self, request: DraftRequest) -> Passes[Proposal]:
        forced = self._forced.draft(request)  # its length is not limited: it costs nothing and is nearly certain
        if forced.num_tokens:
            return Proposal(forced, FORCED)
        most = min(self.draft_length, request.max_tokens)
        if most < 1 or self._asked in self._left_out:
            return NOTHING
        predicted = self._predicted.draft(request.at_most(most))
        if predicted.num_tokens:
            return Proposal(predicted, PREDICTION)
        draft = yield from self._drafter.drafting(request.at_most(most))
        return Proposal(draft, self._drafter.name if draft.num_tokens else None)

    def observe(self, proposal: Proposal, verdict: Verdict, record: RoundRecord) -> None:
        if proposal.drafter not in (FORCED, PREDICTION):
            self._drafter.observe(proposal.draft, verdict)
