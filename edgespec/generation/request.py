"""A request for one generation after its checks, and the initial state of a generation of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from edgespec.config import DrafterName, GenerateOptions, RuleName
from edgespec.engines.sequence import CachedSequence
from edgespec.generation.run_state import Run
from edgespec.reports import RoundRecord, Stats
from edgespec.sampling import Sampler
from edgespec.sampling.constraint.grammar import mismatch
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

    @property
    def notes(self) -> tuple[str, ...]:
        """What of its schema or grammar is not kept."""
        return () if self.sampler.constraint is None else self.sampler.constraint.facts.notes

    @property
    def schema(self) -> str:
        """A JSON schema that a finished answer is to be checked against, as its grammar allows more; mostly ""."""
        return "" if self.sampler.constraint is None else self.sampler.constraint.facts.schema

    def note_on(self, answer: str) -> str:
        """Why a finished answer does not match `schema`; "" if it does. Blocks while a child process checks it."""
        return mismatch(self.schema, answer.split(self.options.free_until or "\0", 1)[-1]) if self.schema else ""

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
