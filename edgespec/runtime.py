"""The composition root: the only place where engines meet drafters. Loads a pair, then answers prompts with it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, Unpack

from edgespec.acceptance import LOSSY
from edgespec.config import DrafterName, GenerateOptions, LoadKeywords, LoadOptions, RuleName
from edgespec.control.cost import CostCurve, DraftCost
from edgespec.control.pool import DrafterPool
from edgespec.decode import check_prompt
from edgespec.drafters.base import Drafter
from edgespec.engines.base import Engine
from edgespec.errors import ConfigError, PromptError, SamplingError
from edgespec.formats.manifest import ModelPair
from edgespec.generation.executor import Executor, Request
from edgespec.generation.handle import Generation, Result
from edgespec.generation.inputs import checked_chat, checked_ids, of_kind, refuses_unknown_keywords
from edgespec.loading.opening import open_models
from edgespec.sampling import Sampler, Sampling
from edgespec.types import Closing, RoundRecord, Stats, TokenIds

__all__ = ["Generation", "Messages", "Model", "Prompt", "Result", "load"]
Prompt = str | Sequence[int]
Messages = Sequence[Mapping[str, Any]]
OnRound = Callable[[RoundRecord], None]
Found = TypeVar("Found")
_WORTH_TELLING = 1.15  # what padding may cost a lone token before the user is told


class Model(Closing):
    """A loaded target with its drafters. One generation at a time, the others queue; any thread or task may call.

    Raises StateError for any use after `close`, and Busy where the turn that a call needs cannot come.
    """

    def __init__(
        self, options: LoadOptions, pair: ModelPair, target: Engine, drafters: dict[DrafterName, Drafter]
    ) -> None:
        self.options = options
        self.pair = pair
        self.target = target
        self._executor = Executor(options, pair, target, drafters)
        self._pool, self._sequence = self._executor.pool, self._executor.sequence

    def __repr__(self) -> str:
        facts = self.target.facts
        state = "closed" if self._executor.turn.is_shut else f"context {facts.context_length}"
        return f"<Model {self.pair.name!r} on {facts.name} ({facts.device}), drafter {self.drafter_name}, {state}>"

    @property
    def stats(self) -> Stats:
        """Counters of the generation that began last. Each generation has its own, whatever other threads ask for."""
        return self._executor.last_stats

    @property
    def drafter_name(self) -> DrafterName:
        """The drafter used when a generation names none."""
        return self.options.drafter

    @property
    def context_length(self) -> int:
        """Tokens that prompt and answer may have together."""
        return self.target.facts.context_length

    def is_reproducible(self, rule: RuleName) -> bool:
        """Whether the text under `rule` is the same for every drafter and draft length, and without any."""
        return rule == "coupled" and self.target.facts.pinned_class is not None

    @property
    def reproducible(self) -> bool:
        return self.is_reproducible(self.options.verify)

    @property
    def notes(self) -> tuple[str, ...]:
        """What a user must be told of the effective configuration."""
        notes = [*self.target.facts.notes]
        if not self.reproducible:
            notes += self._why_not_reproducible()
        elif self.target.facts.padding_cost > _WORTH_TELLING:
            notes.append(
                f"reproducible: a token without a draft takes {self.target.facts.padding_cost:.2f} times as long here, "
                "since it is padded to a pass whose bits do not depend on its width; --no-reproducible avoids that"
            )
        notes += [note for drafter in self._pool.drafters.values() for note in drafter.notes]
        if not self.target.facts.can_rollback:
            notes.append("this model cannot roll back its state, so nothing is drafted: decoding is plain")
        return tuple(notes)

    @property
    def recommended_sampling(self) -> Sampling:
        """What a generation uses when it names no sampling: the pair's own settings over the defaults, seed 0."""
        settings: dict[str, Any] = dict(self.pair.recommended)
        return Sampling(**settings)

    def _why_not_reproducible(self) -> list[str]:
        if self.options.verify in LOSSY:
            return [f"LOSSY: under --verify {self.options.verify} the text is not the one that the target would write"]
        if self.options.verify != "coupled":
            return [f"not reproducible: under --verify {self.options.verify} the text depends on the draft"]
        return []

    def encode(self, text: str, *, parse_special: bool = False) -> list[int]:
        """Token ids of plain text as a prompt, begin-of-text included where the model wants it."""
        with self._executor.vocabulary() as vocabulary:
            return vocabulary.encode(
                of_kind("text", text, str, PromptError), parse_special=parse_special, add_bos=vocabulary.adds_bos
            )

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of token ids; control tokens print nothing. Raises PromptError for an id outside the vocabulary."""
        with self._executor.vocabulary() as vocabulary:
            return vocabulary.decode(checked_ids(token_ids, vocabulary.size).tolist())

    def encode_chat(self, messages: Messages, tools: Messages | None = None) -> list[int]:
        """Token ids of a conversation through the model's own chat template, the assistant's turn opened.

        Raises PromptError when the model has no chat template or the template refuses the messages.
        """
        from edgespec.chat.template import encode_messages  # jinja2 is needed only here

        messages = checked_chat(messages)
        with self._executor.vocabulary() as vocabulary:
            return encode_messages(vocabulary, messages, tools, self.pair.name)

    @refuses_unknown_keywords
    def stream(
        self,
        prompt: Prompt,
        sampling: Sampling | None = None,
        options: GenerateOptions | None = None,
        on_round: OnRound | None = None,
    ) -> Generation:
        """The handle of one generation: iterate over its token events, or take its `result()`.

        Checks the request and touches nothing else: the generation begins with its first event. `on_round` hears of
        every round when it is over, before its tokens are emitted; it must not ask the model for more.
        Raises PromptError, SamplingError, ConfigError or CapabilityError when the request cannot be met.
        """
        return Generation(self._executor, self._request(prompt, sampling, options, on_round), self.is_reproducible)

    @refuses_unknown_keywords
    def generate(
        self,
        prompt: Prompt,
        sampling: Sampling | None = None,
        options: GenerateOptions | None = None,
        on_round: OnRound | None = None,
    ) -> Result:
        """One whole generation. Raises as `stream`, and as reading its events."""
        return self.stream(prompt, sampling, options, on_round).result()

    @refuses_unknown_keywords
    def chat(
        self,
        messages: Messages,
        sampling: Sampling | None = None,
        options: GenerateOptions | None = None,
        tools: Messages | None = None,
    ) -> Generation:
        """The assistant's next turn, as `stream`; what the caches or a parked state hold of it is not read again."""
        return self.stream(self.encode_chat(messages, tools), sampling, options)

    def _request(
        self, prompt: Prompt, sampling: Sampling | None, options: GenerateOptions | None, on_round: OnRound | None
    ) -> Request:
        chosen = of_kind("options", options or GenerateOptions(), GenerateOptions, ConfigError)
        sampling = of_kind("sampling", sampling or self.recommended_sampling, Sampling, SamplingError)
        prompt_ids = self._prompt_ids(prompt)
        check_prompt(prompt_ids, self.context_length)
        self._pool.check(chosen)
        return Request(
            prompt_ids,
            Sampler(sampling, self.target.vocabulary.size, chosen.noise_offset),
            chosen,
            chosen.drafter or self.drafter_name,
            chosen.verify or self.options.verify,
            on_round,
        )

    def _prompt_ids(self, prompt: Prompt) -> TokenIds:
        if isinstance(prompt, str):
            if not prompt:
                raise PromptError("the prompt is empty: give at least one character")
            prompt = self.encode(prompt)
        with self._executor.vocabulary() as vocabulary:
            return checked_ids(prompt, vocabulary.size)

    def prepare(self) -> None:
        """Make the drafters that the first generation would otherwise have to; no pass is run."""
        with self._executor.exclusive() as pool:
            pool.controller(GenerateOptions())

    def _measured(self, read: Callable[[DrafterPool], Found]) -> Found:
        """What reports costs or plans with them: at once where they were measured, else when nothing runs."""
        if self._pool.is_measured:
            return read(self._pool)
        with self._executor.exclusive() as pool:
            self._executor.forget()
            pool.measure()
            return read(pool)

    @property
    def cost_curve(self) -> CostCurve:
        """What the target's passes cost on this machine, refined by every pass.

        Measured where it was not before, which takes a second or two and empties the caches: a run does without.
        """
        return self._measured(lambda pool: pool.cost_curve)

    @property
    def draft_costs(self) -> dict[str, DraftCost]:
        """What the tokens of each drafter that owns a model cost on this machine; measured as `cost_curve` is."""
        return self._measured(lambda pool: pool.draft_costs)

    @property
    def drafter_names(self) -> list[DrafterName]:
        """Every drafter that can be asked for here and may pay; those that need many rows only where rows are cheap."""
        self._executor.turn.require_open()
        return self._pool.names

    @contextmanager
    def measuring(self) -> Iterator[tuple[Engine, Engine | None]]:
        """The target's engine and the draft model's (None without one), both empty, for the block alone.

        No generation runs meanwhile. Raises Busy, StateError.
        """
        with self._executor.exclusive() as pool:
            self._executor.forget()
            try:
                yield self.target, pool.draft_engine
            finally:
                self._executor.forget()

    @property
    def draft_engine(self) -> Engine | None:
        """The draft model's engine, for its facts; None without a draft model. To run it: `measuring`."""
        return self._pool.draft_engine

    @property
    def draft_name(self) -> DrafterName | None:
        """The drafter that the pair's draft became: model or early-exit; None without one."""
        return self._pool.draft_name

    @property
    def drafter_bytes(self) -> int:
        """Memory that the drafters hold now: a draft model's weights and cache, the tables of the others."""
        return sum(drafter.bytes_used for drafter in list(self._pool.drafters.values()))

    def forget(self) -> None:
        """Empty the caches: the next generation reads its whole prompt, as if it were the first. Waits for its turn.

        What was learnt of costs and confidences stays.
        """
        with self._executor.exclusive():
            self._executor.forget()

    def cancel(self) -> None:
        """End the running generation after at most one pass; does nothing when none runs. `Generation.cancel`: one."""
        self._executor.interrupt()

    def close(self) -> None:
        """Cancel what runs, wait for it, free both models; closing twice is allowed.

        Raises Busy from within a running step of this very thread (on_round), where it could not wait.
        """
        self._executor.close()


def load(model: str | os.PathLike[str] | LoadOptions = "demo", **options: Unpack[LoadKeywords]) -> Model:
    """Load a pair by registry name or path, with the fields of `LoadOptions` as keywords; or as one LoadOptions says.

    Raises ConfigError for an unknown or bad option, ModelNotFound, ModelFileError, VocabularyMismatch (naming the
    first token that differs) and CapabilityError when what was demanded is not possible.
    """
    if isinstance(model, LoadOptions):
        if options:
            raise ConfigError(
                f"LoadOptions and {sorted(options)} were both given: use dataclasses.replace(options, ...)"
            )
        chosen = model
    else:
        given: dict[str, Any] = dict(options)
        chosen = LoadOptions(model=model, **given)  # type: ignore[arg-type]  # turned into text there
    pair, target, drafters = open_models(chosen)
    opened = Model(chosen, pair, target, drafters)
    try:
        opened.prepare()
    except BaseException:
        opened.close()
        raise
    return opened
