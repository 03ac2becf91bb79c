"""The composition root: the only place where engines meet drafters. Loads a pair, then answers prompts with it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Self

import numpy as np

from edgespec.config import DrafterName, GenerateOptions, LoadOptions, RuleName
from edgespec.control.cost import CostCurve, DraftCost
from edgespec.deciding import Deciders
from edgespec.decode import Run, autoregressive, speculative
from edgespec.drafters.base import Drafter
from edgespec.engines.base import Engine
from edgespec.engines.sequence import CachedSequence
from edgespec.engines.watch import ClassWatch
from edgespec.errors import ConfigError, PromptError, StateError
from edgespec.loading import open_models
from edgespec.manifest import ModelPair
from edgespec.memory import peak_rss_bytes
from edgespec.sampling import Sampler, Sampling
from edgespec.stopping import StopRules
from edgespec.types import FinishReason, RoundRecord, Stats, TokenEvent, TokenIds
from edgespec.verify import LOSSY, RULES

logger = logging.getLogger("edgespec")
Prompt = str | Sequence[int]
Messages = Sequence[Mapping[str, Any]]
_WORTH_TELLING = 1.15  # what padding may cost a lone token before the user is told


@dataclass(frozen=True, slots=True)
class Result:
    """One finished generation. `token_ids` include the end token; `text` ends before it and before a stop string."""

    text: str
    token_ids: tuple[int, ...]
    prompt_token_ids: tuple[int, ...]
    finish_reason: FinishReason
    logprobs: tuple[float, ...]
    seed: int
    drafter: DrafterName
    verify: RuleName
    reproducible: bool
    lossless: bool
    stats: Stats


class Model:
    """A loaded target with its drafters. One generation at a time, a newer one ends an older; any thread may call."""

    def __init__(
        self, options: LoadOptions, pair: ModelPair, target: Engine, drafters: dict[DrafterName, Drafter]
    ) -> None:
        self.options = options
        self.pair = pair
        self.target = target
        self.stats = Stats()
        self._sequence = CachedSequence(target)
        self._class_watch = ClassWatch()
        self._deciders = Deciders(options, pair, self._sequence, drafters)
        self._current: Run | None = None
        self._lock = threading.RLock()

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
        notes += [note for drafter in self._deciders.drafters.values() for note in drafter.notes]
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
        vocabulary = self.target.vocabulary
        return vocabulary.encode(text, parse_special=parse_special, add_bos=vocabulary.adds_bos)

    def encode_chat(self, messages: Messages, tools: Messages | None = None) -> list[int]:
        """Token ids of a conversation through the model's own chat template, the assistant's turn opened.

        Raises PromptError when the model has no chat template or the template refuses the messages.
        """
        from edgespec.chat import encode_rendered, render_chat  # jinja2 is needed only here

        vocabulary = self.target.vocabulary
        if vocabulary.chat_template is None:
            raise PromptError(f"model {self.pair.name!r} has no chat template: use --no-chat-template, or generate()")
        bos = "" if vocabulary.bos_id is None else vocabulary.token_name(vocabulary.bos_id)
        render = partial(render_chat, vocabulary.chat_template, tools=tools, bos_token=bos)
        ids = encode_rendered(vocabulary, render, messages)
        if vocabulary.adds_bos and vocabulary.bos_id is not None and ids[:1] != [vocabulary.bos_id]:
            ids.insert(0, vocabulary.bos_id)
        return ids

    def stream(
        self,
        prompt: Prompt,
        sampling: Sampling | None = None,
        options: GenerateOptions | None = None,
        on_round: Callable[[RoundRecord], None] | None = None,
    ) -> Iterator[TokenEvent]:
        """Token events of one generation; `self.stats` fills while it runs. Closing the iterator ends it.

        `on_round` hears of every round when it is over, before its tokens are emitted.
        Raises PromptError, SamplingError or CapabilityError before any work when the request cannot be met.
        """
        chosen = options or GenerateOptions()
        run = self._prepare(prompt, sampling or self.recommended_sampling, chosen)
        run.on_round = on_round
        controller = self._deciders.controller(chosen)
        if controller is None:
            return self._watch(run, autoregressive(run))
        rule = RULES[chosen.verify or self.options.verify]
        return self._watch(run, speculative(run, controller, rule))

    def generate(
        self,
        prompt: Prompt,
        sampling: Sampling | None = None,
        options: GenerateOptions | None = None,
        on_round: Callable[[RoundRecord], None] | None = None,
    ) -> Result:
        """One whole generation. Raises as `stream`."""
        sampling, options = sampling or self.recommended_sampling, options or GenerateOptions()
        prompt_ids = self._prompt_ids(prompt)
        events = list(self.stream(prompt_ids.tolist(), sampling, options, on_round))
        rule = options.verify or self.options.verify
        return Result(
            text="".join(event.text for event in events),
            token_ids=tuple(event.token_id for event in events),
            prompt_token_ids=tuple(prompt_ids.tolist()),
            finish_reason=self.stats.finish_reason or "length",
            logprobs=tuple(event.logprob for event in events if event.logprob is not None),
            seed=sampling.seed,
            drafter=options.drafter or self.drafter_name,
            verify=rule,
            reproducible=self.is_reproducible(rule),
            lossless=rule not in LOSSY,
            stats=self.stats,
        )

    def chat(
        self,
        messages: Messages,
        sampling: Sampling | None = None,
        options: GenerateOptions | None = None,
        tools: Messages | None = None,
    ) -> Iterator[TokenEvent]:
        """The assistant's next turn; the part of the conversation that both caches hold is not read again."""
        return self.stream(self.encode_chat(messages, tools), sampling, options)

    def prepare(self) -> None:
        """Measure what the first generation would otherwise have to; nothing when it was measured before."""
        self._deciders.controller(GenerateOptions())

    @property
    def cost_curve(self) -> CostCurve:
        """What the target's passes cost on this machine, measured at the first load and refined by every pass."""
        return self._deciders.cost_curve

    @property
    def draft_costs(self) -> dict[str, DraftCost]:
        """What the tokens of each drafter that owns a model cost on this machine."""
        return self._deciders.draft_costs

    @property
    def draft_engine(self) -> Engine | None:
        """The draft model's engine with its cache emptied, for measuring; None without a draft model."""
        return self._deciders.draft_engine

    @property
    def draft_name(self) -> DrafterName | None:
        """The drafter that the pair's draft became: model or early-exit; None without one."""
        return self._deciders.draft_name

    @property
    def drafter_names(self) -> list[DrafterName]:
        """Every drafter that can be asked for here and may pay; those that need many rows only where rows are cheap."""
        return self._deciders.names

    @property
    def drafter_bytes(self) -> int:
        """Memory that the drafters hold now: a draft model's weights and cache, the tables of the others."""
        return sum(drafter.bytes_used for drafter in self._deciders.drafters.values())

    def forget(self) -> None:
        """Empty the caches: the next generation reads its whole prompt, as if it were the first. Ends a running one.

        What was learnt of costs and confidences stays.
        """
        with self._lock:
            self._current = None
            self._sequence.rollback(0)
            self._deciders.empty()

    def cancel(self) -> None:
        """End the running generation after at most one pass; does nothing when none runs."""
        if self._current is not None:
            self.target.cancel()
            for drafter in self._deciders.drafters.values():
                drafter.cancel()

    def close(self) -> None:
        """Free both models; closing twice is allowed."""
        try:
            self._deciders.keep()
        except OSError as exc:  # a file of the model was deleted meanwhile: nothing can be kept under its name
            logger.debug("what was learnt is not kept: %s", exc)
        finally:
            for drafter in self._deciders.drafters.values():
                drafter.close()
            self.target.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _prompt_ids(self, prompt: Prompt) -> TokenIds:
        if isinstance(prompt, str):
            if not prompt:
                raise PromptError("the prompt is empty: give at least one character")
            prompt = self.encode(prompt)
        ids = np.asarray(prompt, np.int64)
        size = self.target.vocabulary.size
        if ids.size and not (ids.min() >= 0 and ids.max() < size):
            raise PromptError(f"a prompt token id is outside the vocabulary 0..{size - 1}")
        return ids.astype(np.int32)

    def _prepare(self, prompt: Prompt, sampling: Sampling, options: GenerateOptions) -> Run:
        vocabulary = self.target.vocabulary
        end_ids = frozenset() if options.ignore_eos else vocabulary.end_ids
        run = Run(
            target=self._sequence,
            prompt_ids=self._prompt_ids(prompt),
            sampler=Sampler(sampling, vocabulary.size),
            stop=StopRules(end_ids, options.stop, options.max_tokens),
            logprobs=options.logprobs,
            watch=self._class_watch,
        )
        self.stats = run.stats
        return run

    def _watch(self, run: Run, events: Generator[TokenEvent, None, None]) -> Iterator[TokenEvent]:
        """Pass events on, one step at a time under the lock; `cancel` reaches this generation and no later one."""
        with self._lock:
            self._current = run
            self.target.clear_cancel()
            for drafter in self._deciders.drafters.values():
                drafter.clear_cancel()
        try:
            while True:
                with self._lock:
                    if self._current is not run:
                        raise StateError(
                            "this generation was ended by a newer one on the same model: read each to its end before "
                            "the next one starts, or load the model twice"
                        )
                    event = next(events, None)
                if event is None:
                    return
                yield event
        finally:
            with self._lock:
                run.stats.peak_rss_bytes = peak_rss_bytes()
                if self._current is run:
                    events.close()
                    self._current = None
                    begin = run.prompt_ids.size
                    self._deciders.learn(self._sequence.token_ids[begin : begin + run.stats.new_tokens])


def load(model: str = "demo", **options: Any) -> Model:
    """Load a pair by registry name or path; `options` are the fields of `LoadOptions`.

    Raises ConfigError for an unknown or bad option, ModelNotFound, ModelFileError, VocabularyMismatch (naming the
    first token that differs) and CapabilityError when what was demanded is not possible.
    """
    try:
        chosen = LoadOptions(model=model, **options)
    except TypeError as exc:
        known = ", ".join(LoadOptions.__dataclass_fields__)
        raise ConfigError(f"unknown option in {sorted(options)}; known: {known}") from exc
    pair, target, drafters = open_models(chosen)
    opened = Model(chosen, pair, target, drafters)
    try:
        opened.prepare()
    except BaseException:
        opened.close()
        raise
    return opened
