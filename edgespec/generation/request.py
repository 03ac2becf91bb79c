"""A request for one generation: made of what the caller of a loaded model gives, after checking it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from edgespec.config.options import GenerateOptions, LoadOptions, Sampling
from edgespec.config.values import DrafterName, RuleName
from edgespec.engines.sequence import CachedSequence
from edgespec.errors import ConfigError, PromptError, SamplingError, shown
from edgespec.generation.inputs import checked_ids, of_kind, require_writer
from edgespec.generation.run_state import Run, check_prompt
from edgespec.reports import RoundRecord, Stats
from edgespec.sampling import Sampler
from edgespec.sampling.constraint.grammar import Grammar, mismatch
from edgespec.sampling.constraint.state import Constraint, Constraints
from edgespec.sampling.stopping import StopRules
from edgespec.types import TokenIds

if TYPE_CHECKING:
    from edgespec.generation.executor import Executor

_MOST_CHARACTERS = 16  # of a prediction, per token of the context


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


class RequestMaker:
    """For the model of `executor`, loaded with `options`. Its methods raise as those of `Model`."""

    def __init__(self, executor: Executor, options: LoadOptions) -> None:
        self._executor, self._options = executor, options
        self._constraints = Constraints()

    def make(
        self,
        prompt: str | Sequence[int],
        sampling: Sampling,
        options: GenerateOptions | None,
        on_round: Callable[[RoundRecord], None] | None,
    ) -> Request:
        """The request that `Model.stream` describes."""
        chosen = of_kind("options", options or GenerateOptions(), GenerateOptions, ConfigError)
        sampling = of_kind("sampling", sampling, Sampling, SamplingError)
        require_writer(self._executor.target.facts)
        if on_round is not None and not callable(on_round):
            raise ConfigError(f"on_round must be a function of one RoundRecord, got {shown(on_round)}")
        prompt_ids = self._prompt_ids(prompt)
        check_prompt(prompt_ids, self._executor.target.facts.context_length)
        self._executor.pool.check(chosen)
        constraint = self._constraint(chosen, prompt_ids.size)
        return Request(
            prompt_ids,
            Sampler(sampling, self._executor.target.vocabulary.size, chosen.noise_offset, constraint),
            chosen,
            chosen.drafter or self._options.drafter,
            chosen.verify or self._options.verify,
            on_round,
            self._predicted_ids(chosen.prediction),
        )

    def encode(self, text: str, *, parse_special: bool = False) -> list[int]:
        """Token ids of `text` as a prompt."""
        with self._executor.vocabulary() as vocabulary:
            return vocabulary.encode(
                of_kind("text", text, str, PromptError), parse_special=parse_special, add_bos=vocabulary.adds_bos
            )

    def require_room(self, count: int, what: Literal["tokens", "messages", "characters"]) -> None:
        """Raise PromptError for more than the context can hold, whatever they are."""
        most = held = self._executor.target.facts.context_length
        if count > most and what == "characters":
            with self._executor.vocabulary() as vocabulary:
                most *= vocabulary.most_characters
        if count > most:
            raise PromptError(
                f"the prompt has {count} {what} but the context holds only {held} tokens, answer included: shorten the "
                "prompt or give a larger --ctx-size"
            )

    def check_drafter(self, options: GenerateOptions) -> None:
        """Check that there is the drafter of `options`."""
        self._executor.pool.check(of_kind("options", options, GenerateOptions, ConfigError))

    def check_structure(self, options: GenerateOptions) -> None:
        """Check the grammar of `options`, if there is one."""
        self._constraint(of_kind("options", options, GenerateOptions, ConfigError), 0)

    def _constraint(self, options: GenerateOptions, begin: int) -> Constraint | None:
        grammar = Grammar.of(options)
        if grammar is None:
            return None
        with self._executor.vocabulary() as vocabulary:
            return self._constraints.of(grammar, vocabulary, begin)

    def _predicted_ids(self, prediction: str | None) -> TokenIds | None:
        """As much of a predicted answer as the context may hold."""
        most = self._executor.target.facts.context_length
        if not prediction:
            return None
        with self._executor.vocabulary() as vocabulary:
            return np.array(vocabulary.encode(prediction[: _MOST_CHARACTERS * most])[:most], np.int32)

    def _prompt_ids(self, prompt: str | Sequence[int]) -> TokenIds:
        if isinstance(prompt, str):
            if not prompt:
                raise PromptError("the prompt is empty: give at least one character")
            self.require_room(len(prompt), "characters")
            prompt = self.encode(prompt)
        with self._executor.vocabulary() as vocabulary:
            return checked_ids(prompt, vocabulary.size)
