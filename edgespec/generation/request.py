"""A request for one generation after its checks, and the initial state of a generation of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from edgespec.config import DrafterName, GenerateOptions, RuleName
from edgespec.engines.sequence import CachedSequence
from edgespec.generation.run_state import Run
from edgespec.reports import RoundRecord, Stats
from edgespec.sampling import Sampler
from edgespec.sampling.stopping import StopRules
from edgespec.types import TokenIds


@dataclass(frozen=True, slots=True)
class Request:
    """A checked request for one generation. `on_round` is called after every round, before its tokens are emitted."""

    prompt_ids: TokenIds
    sampler: Sampler
    options: GenerateOptions
    drafter: DrafterName
    rule: RuleName
    on_round: Callable[[RoundRecord], None] | None
    predicted_ids: TokenIds | None = None

    def run_on(self, sequence: CachedSequence, stats: Stats) -> Run:
        """The state of a generation of it on a sequence of the target; `stats` is updated while it runs."""
        options = self.options
        end_ids = frozenset() if options.ignore_eos else sequence.engine.vocabulary.end_ids
        return Run(
            target=sequence,
            prompt_ids=self.prompt_ids,
            sampler=self.sampler,
            stop=StopRules(end_ids, tuple(options.stop), options.max_tokens),
            logprobs=options.logprobs,
            top_logprobs=options.top_logprobs,
            on_round=self.on_round,
            predicted_ids=self.predicted_ids,
            stats=stats,
        )
