"""The target's first layers and head as its draft model, without weights of its own in memory.

Either with an engine over the target's weights and its own cache, or with the target's engine itself, which keeps the
states of the first layers so that the verifying pass starts behind them.
"""

from __future__ import annotations

from edgespec.drafters.base import DraftRequest
from edgespec.drafters.model import DraftTemperature, ModelDrafter
from edgespec.engines.base import Engine
from edgespec.engines.pass_request import Passes
from edgespec.types import EMPTY_DRAFT, Draft, Logits, TokenIds


class EarlyExitDrafter(ModelDrafter):
    """Drafts with `engine`, which it owns and closes, over the target's weights in memory."""

    name = "early-exit"

    @property
    def bytes_used(self) -> int:
        facts = self._engine.facts
        return facts.kv_bytes_per_token * facts.context_length


class SharedStateDrafter(EarlyExitDrafter):
    """Drafts with the early exit of the engine `target`, which it does not own: same cache, shared states.

    The target has read the text already, so there is nothing to catch up with and no window.
    `temperature`: as ModelDrafter's.
    """

    def __init__(self, target: Engine, temperature: float = 1.0) -> None:
        # No sequence of its own, unlike ModelDrafter: a drafter must not change the target's cache.
        self._engine = target
        self.temperature = DraftTemperature(temperature)
        self._exit = target.early_exit()

    def another(self, sequence: int) -> None:
        """It follows the target's first sequence only."""

    def begin(self, prompt_ids: TokenIds) -> None:
        """The target reads the prompt for both."""

    def looking_ahead(self, request: DraftRequest) -> Passes[Draft]:
        """The same as ModelDrafter's; empty if the target's cache holds no prefix of the text."""
        text = request.token_ids
        most = min(request.max_tokens, self._engine.facts.context_length - text.size)
        read = self._exit.follow(text)
        if read is None or most < 1:
            return EMPTY_DRAFT
        logits = yield from self._feeding(text[read:])
        return (yield from self._chain(request, logits, most))

    def _feeding(self, token_ids: TokenIds) -> Passes[Logits]:
        yield from ()  # its rows are the target's own and share no pass
        return self._exit.feed(token_ids)

    def _mark(self) -> None:
        pass  # its cache is the target's

    @property
    def _end_ids(self) -> frozenset[int]:
        return self._engine.vocabulary.end_ids

    def num_uncached(self, token_ids: TokenIds) -> int:
        return 1

    def reading(self, token_ids: TokenIds, whole: int, part: int) -> int:
        return 1

    @property
    def reads_part(self) -> bool:
        return False

    @property
    def engine(self) -> Engine | None:
        return None

    def reset_engine(self) -> Engine | None:
        return None

    @property
    def bytes_used(self) -> int:
        return self._exit.bytes_used

    def close(self) -> None:
        """Nothing: the engine is the target's."""
