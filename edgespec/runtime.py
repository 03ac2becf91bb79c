"""The Python API: `load` opens a model pair, `Model` generates with it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, Unpack

import numpy as np
from numpy.typing import NDArray

from edgespec.chat.reasoning import AnswerParts, answer_parts, before_structure
from edgespec.chat.template import CHILDREN, answer_prefix, encode_messages, num_characters, read_template
from edgespec.closing import Closing, closed_on_failure
from edgespec.config.options import GenerateOptions, LoadKeywords, LoadOptions, Sampling
from edgespec.config.values import LOSSY, DrafterName
from edgespec.drafters.base import Drafter
from edgespec.engines.base import Engine
from edgespec.errors import CapabilityError, ConfigError, PromptError, PromptTooLong, SamplingError, shown
from edgespec.formats.gguf.header import keeping_headers
from edgespec.formats.manifest import ModelPair
from edgespec.generation.batching import ContinuousBatch
from edgespec.generation.embedding import Text, TextEmbedder, as_texts
from edgespec.generation.executor import Executor
from edgespec.generation.handle import Generation, Result
from edgespec.generation.request import (
    Request,
    checked_chat,
    checked_ids,
    checked_tools,
    of_kind,
    refuses_unknown_keywords,
    require_writer,
)
from edgespec.generation.run_state import check_prompt
from edgespec.generation.saved_state import load_sequence, save_sequence, state_path
from edgespec.installation import has_memory_limit
from edgespec.loading.opening import open_models, start_trial
from edgespec.loading.requirements import resolve_pair
from edgespec.memory.fit import fit
from edgespec.memory.plan import Room
from edgespec.memory.watch import MemoryReport
from edgespec.platform.memory import keep_one_arena
from edgespec.reports import RoundRecord, Stats
from edgespec.sampling.constraint.grammar import Grammar
from edgespec.sampling.constraint.state import Constraint, Constraints
from edgespec.sampling.sampler import Sampler
from edgespec.types import TokenIds

__all__ = ["Generation", "Messages", "Model", "Prompt", "Result", "load"]
Prompt = str | Sequence[int]
Messages = Sequence[Mapping[str, Any]]
OnRound = Callable[[RoundRecord], None]
_MOST_CHARACTERS = 16  # of a prediction, per token of the context


class Model(Closing):
    """A loaded target with its drafters. Made by `load`; also a context manager that closes it.

    Any thread or asyncio task may call it. Generations run one at a time; others wait in a queue. Every method raises
    StateError after `close`, and Busy if it would have to wait for a generation that cannot end meanwhile.
    """

    def __init__(
        self,
        options: LoadOptions,
        pair: ModelPair,
        target: Engine,
        drafters: dict[DrafterName, Drafter],
        memory: MemoryReport | None = None,
    ) -> None:
        self.options = options
        self.pair = pair
        self.target = target
        self.memory = memory  # what was planned and what is used; None for a model that was not loaded by `load`
        self._executor = Executor(options, pair, target, drafters, memory)
        self.drafters = self._executor.pool  # the drafters, and what their use has taught of costs
        self._sequence = self._executor.sequence
        self._constraints = Constraints()
        self.embedder = TextEmbedder(self._executor, options)  # `embed` in steps

    def __repr__(self) -> str:
        facts = self.target.facts
        state = "closed" if self._executor.turn.is_shut else f"context {facts.context_length}"
        return f"<Model {self.pair.name!r} on {facts.name} ({facts.device}), drafter {self.drafter_name}, {state}>"

    @property
    def stats(self) -> Stats:
        """Counters of the generation that began last. Other threads may begin one: prefer `Generation.stats`."""
        return self._executor.last_stats

    @property
    def drafter_name(self) -> DrafterName:
        """The drafter of generations that do not choose one."""
        return self.options.drafter

    @property
    def context_length(self) -> int:
        """Maximum number of tokens of prompt and answer together."""
        return self.target.facts.context_length

    @property
    def reproducible(self) -> bool:
        """Whether the text is the same with any drafter, any draft length, and without speculation."""
        return self.options.verify == "coupled" and self.target.facts.pinned_class is not None

    @property
    def notes(self) -> tuple[str, ...]:
        """Remarks on the effective configuration that the user should see."""
        notes = [self.memory.note] if self.memory is not None and self.memory.note else []
        notes += self.target.facts.notes
        pinned, rule = self.target.facts.pinned_class, self.options.verify
        if rule in LOSSY:
            notes.append(f"LOSSY: --verify {rule} changes the target's output distribution")
        elif rule != "coupled":
            notes.append(f"not reproducible: with --verify {rule} the text depends on the draft")
        elif pinned is not None and pinned[0] > 1:
            fix = "-ctk q8_0 may help; " if self.target.facts.name == "llamacpp" else ""
            notes.append(
                f"Reproducible mode: a single token takes a pass of {pinned[0]} on this model; {fix}see "
                "--no-reproducible"
            )
        notes += [note for drafter in list(self.drafters.drafters.values()) for note in drafter.notes]
        facts = self.target.facts
        if facts.writes and not facts.can_speculate and self.options.drafter != "none":
            notes.append(f"speculation is off: {facts.why_no_speculation}")
        return tuple(notes)

    @property
    def recommended_sampling(self) -> Sampling:
        """Sampling settings of generations that give none: the pair's recommended values over the defaults."""
        settings: dict[str, Any] = dict(self.pair.recommended)
        return Sampling(**settings)

    def encode(self, text: str, *, parse_special: bool = False) -> list[int]:
        """Token ids of `text` as a prompt, with the begin-of-text token if the model uses one.

        `parse_special`: control tokens spelled out in the text become their ids. Raises PromptError if it is not a str.
        """
        of_kind("text", text, str, PromptError)
        with self._executor.vocabulary() as vocabulary:
            return vocabulary.encode(text, parse_special=parse_special, add_bos=vocabulary.adds_bos)

    def require_room(self, count: int, what: Literal["tokens", "messages", "characters"]) -> None:
        """Raise PromptTooLong for more than the context can hold whatever they are: a check that takes no time."""
        most = self.context_length
        if count > most and what == "characters":
            with self._executor.vocabulary() as vocabulary:
                most *= vocabulary.most_characters
        if count > most:
            raise PromptTooLong(
                f"the prompt has {count} {what} but the context holds only {self.context_length} tokens, answer "
                "included: shorten the prompt or give a larger --ctx-size",
                -(-count * self.context_length // most),  # at least
                self.context_length,
            )

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids; control tokens print nothing. Raises PromptError for an id outside the vocabulary."""
        with self._executor.vocabulary() as vocabulary:
            return vocabulary.decode(checked_ids(token_ids, vocabulary.size).tolist())

    def encode_chat(
        self, messages: Messages, tools: Messages | None = None, template_arguments: Mapping[str, Any] | None = None
    ) -> list[int]:
        """Token ids of a conversation, rendered by the model's chat template up to the start of the assistant's turn.

        If the last message is an assistant's text, they end behind it: the answer goes on from there. `messages` and
        `tools` as in OpenAI's API; `template_arguments`: further arguments of the template, such as
        `{"enable_thinking": False}` for Qwen3. Raises PromptError if the model has no chat template or the template
        rejects the messages, leaves out the text to go on from, or does not use an argument.
        """
        messages = checked_chat(messages)
        tools = checked_tools(tools)
        require_writer(self.target.facts)
        with self._executor.vocabulary() as vocabulary:
            return encode_messages(vocabulary, messages, tools, self.pair.name, template_arguments)

    @refuses_unknown_keywords
    def stream(
        self,
        prompt: Prompt,
        sampling: Sampling | None = None,
        options: GenerateOptions | None = None,
        on_round: OnRound | None = None,
    ) -> Generation:
        """Start a generation: iterate over the handle for its token events, or call its `result()`.

        The request is checked here; decoding starts when the first event is read. `prompt`: text or token ids.
        `on_round` is called after every round, before its tokens are emitted; it must not call the model.
        Raises PromptError, SamplingError, ConfigError or CapabilityError if the request is not valid; ConfigError names
        the place of a mistake in a schema or grammar.
        """
        chosen = of_kind("options", options or GenerateOptions(), GenerateOptions, ConfigError)
        sampling = of_kind("sampling", sampling or self.recommended_sampling, Sampling, SamplingError)
        require_writer(self.target.facts)
        if on_round is not None and not callable(on_round):
            raise ConfigError(f"on_round must be a function of one RoundRecord, got {shown(on_round)}")
        prompt_ids = self._prompt_ids(prompt)
        check_prompt(prompt_ids, self.context_length)
        self.drafters.check(chosen)
        constraint = self._constraint(chosen, prompt_ids.size)
        request = Request(
            prompt_ids,
            Sampler(sampling, self.target.vocabulary.size, constraint),
            chosen,
            chosen.drafter or self.options.drafter,
            chosen.verify or self.options.verify,
            on_round,
            self._predicted_ids(chosen.prediction),
        )
        return Generation(self._executor, request)

    def _prompt_ids(self, prompt: Prompt) -> TokenIds:
        if isinstance(prompt, str):
            if not prompt:
                raise PromptError("the prompt is empty: give at least one character")
            self.require_room(len(prompt), "characters")
            prompt = self.encode(prompt)
        with self._executor.vocabulary() as vocabulary:
            return checked_ids(prompt, vocabulary.size)

    def _constraint(self, options: GenerateOptions, begin: int) -> Constraint | None:
        grammar = Grammar.of(of_kind("options", options, GenerateOptions, ConfigError))
        if grammar is None:
            return None
        with self._executor.vocabulary() as vocabulary:
            return self._constraints.of(grammar, vocabulary, begin)

    def _predicted_ids(self, prediction: str | None) -> TokenIds | None:
        """As much of a predicted answer as the context may hold."""
        if not prediction:
            return None
        with self._executor.vocabulary() as vocabulary:
            ids = vocabulary.encode(prediction[: _MOST_CHARACTERS * self.context_length])
            return np.array(ids[: self.context_length], np.int32)

    @refuses_unknown_keywords
    def generate(
        self,
        prompt: Prompt,
        sampling: Sampling | None = None,
        options: GenerateOptions | None = None,
        on_round: OnRound | None = None,
    ) -> Result:
        """Generate a complete answer. Raises the errors of `stream`, and those of iterating over its events."""
        return self.stream(prompt, sampling, options, on_round).result()

    @refuses_unknown_keywords
    def chat(
        self,
        messages: Messages,
        sampling: Sampling | None = None,
        options: GenerateOptions | None = None,
        tools: Messages | None = None,
    ) -> Generation:
        """Generate the assistant's next turn; like `stream`. The part of the prompt that is still cached is reused.

        If the last message is an assistant's text without tool calls, the model goes on with it: the result has the new
        text only. Raises PromptError if `options` asks for a structure then, or the chat template leaves it out.
        """
        self.require_room(len(checked_chat(messages)), "messages")
        self.require_room(num_characters(messages, tools), "characters")
        prompt_ids = self.encode_chat(messages, tools)
        if options is not None:
            with self._executor.vocabulary() as vocabulary:
                prompt_ids = before_structure(vocabulary, prompt_ids, options, answer_prefix(messages))
        return self.stream(prompt_ids, sampling, options)

    def check_structure(self, options: GenerateOptions) -> None:
        """Check the grammar of `options`, if there is one, as a generation does.

        Raises ConfigError, which names the place of a mistake, and CapabilityError where llguidance is not installed.
        """
        self._constraint(options, 0)

    def split_answer(self, result: Result, tools: Messages = (), messages: Messages = ()) -> AnswerParts:
        """The reasoning, the text and the tool calls of a chat's result.

        `tools`: those that the chat had; `messages`: its own, needed where the last was an answer that was cut while it
        reasoned. A call that does not parse stays in the text, as does one that `max_tokens` cut. Raises
        CapabilityError for tools with a model whose chat template writes calls in no known form, StateError if the
        model is closed.
        """
        result = of_kind("result", result, Result, ConfigError)
        prefix = answer_prefix(messages) if messages else ""
        with self._executor.vocabulary() as vocabulary:
            is_cut = result.finish_reason == "length"
            ids = result.prompt_token_ids, result.token_ids
            return answer_parts(vocabulary, *ids, result.text, tools, prefix, is_cut=is_cut)

    def split_reasoning(self, result: Result) -> tuple[str, str]:
        """(reasoning, answer) of a chat's result, without the tags around the reasoning.

        The reasoning is "" for a model that does not reason. Raises StateError if the model is closed.
        """
        parts = self.split_answer(result)
        return parts.reasoning, parts.text

    @contextmanager
    def batch(self, max_wait_s: float | None = None) -> Iterator[ContinuousBatch]:
        """Exclusive use of the model for up to `LoadOptions.parallel` generations at once; all end with the block.

        `max_wait_s`: as in GenerateOptions. Raises Busy and StateError.
        """
        with self._executor.exclusive(max_wait_s):
            try:
                yield self._executor.batch
            finally:
                self._executor.batch.end_all()

    @refuses_unknown_keywords
    def generate_all(
        self, prompts: Sequence[Prompt], sampling: Sampling | None = None, options: GenerateOptions | None = None
    ) -> list[Result]:
        """Complete answers to all prompts, in their order, up to `LoadOptions.parallel` of them at once.

        Raises the errors of `generate`; the first one ends all of them.
        """
        if isinstance(prompts, str) or not isinstance(prompts, Sequence):
            raise PromptError(f"prompts must be a list of prompts, got {shown(prompts)}")
        generations = [self.stream(prompt, sampling, options) for prompt in prompts]
        with self.batch(generations[0].request.options.max_wait_s if generations else None) as batch:
            return batch.results(generations)

    @refuses_unknown_keywords
    def embed(self, texts: str | Sequence[Text], *, truncate: bool = False) -> NDArray[np.float32]:
        """Embeddings [n, size] of texts, or of their token ids, each of length 1.

        For GGUF models made for this, whose file names a pooling, and for others with `LoadOptions.pooling`. Other
        requests have their turn in between; what is cached of conversations stays. `truncate`: leave out the end of a
        text that is longer than the context. Raises CapabilityError for a model that gives none or if there is no
        memory for it, PromptError for a text that is empty or too long, Busy and StateError.
        """
        self._executor.turn.require_open()
        self.embedder.pooling()
        return self.embedder.embed(self.embedder.encode(as_texts(texts), truncate=truncate))

    def prepare(self) -> None:
        """Build the drafters now rather than in the first generation. Runs no pass of a model."""
        with self._executor.exclusive():
            self.drafters.controller(GenerateOptions())

    def forget(self) -> None:
        """Clear the KV caches: the next generation reads its whole prompt. Waits for a running generation.

        Learnt costs and confidences are kept.
        """
        with self._executor.exclusive():
            self._executor.forget()

    def save_state(self, path: str | os.PathLike[str]) -> int:
        """Write the KV cache and its tokens to a file, for `load_state` in a later run; returns the number of tokens.

        The file is about `target.facts.kv_bytes_per_token` per token. Raises StateError when it cannot be written.
        """
        with self._executor.exclusive():
            return save_sequence(state_path(path), self._sequence)

    def load_state(self, path: str | os.PathLike[str]) -> int:
        """Restore what `save_state` wrote; returns the number of tokens. A prompt that begins with them is not read
        again.

        Raises StateError for a missing or damaged file, or one of another model, library, cache type or reproducible
        mode; generating is possible as before.
        """
        with self._executor.exclusive():
            return load_sequence(state_path(path), self._sequence)

    def cancel(self) -> None:
        """End the running generation after at most one pass. Does nothing if none runs. See `Generation.cancel`."""
        self._executor.cancel()

    def close(self) -> None:
        """Cancel the running generation, wait for it to end and free both models. Closing twice is allowed.

        Raises Busy inside `on_round`, where waiting would deadlock.
        """
        self._executor.close()


def load(model: str | os.PathLike[str] | LoadOptions = "demo", **options: Unpack[LoadKeywords]) -> Model:
    """Load a pair by registry name or path, with the fields of `LoadOptions` as keywords; or by one `LoadOptions`.

    Raises ConfigError for an unknown option, a bad value or a file that is not a chat template, ModelNotFound,
    ModelFileError, VocabularyMismatch (names the first token that differs), and CapabilityError if the model or engine
    does not support an option, or if the pair does not fit into memory (says what it needs, what is left and what would
    fit). Memory is planned before anything is loaded: `Model.memory` has the plan, and `Model.notes` says what was
    given up for it.
    """
    if isinstance(model, LoadOptions):
        if options:
            raise ConfigError(
                f"LoadOptions and {sorted(options)} were both given: use dataclasses.replace(options, ...)"
            )
        chosen = model
    else:
        given: dict[str, Any] = dict(options)
        chosen = LoadOptions(model=model, **given)  # type: ignore[arg-type]  # LoadOptions accepts any path
    template = read_template(chosen.chat_template_file)
    try:
        with keeping_headers():
            room = Room.now(chosen.memory)
            if has_memory_limit():  # which counts reserved addresses, such as the unused stacks of threads
                keep_one_arena()
            else:
                CHILDREN.warm()
            pair = resolve_pair(chosen)
            with start_trial(chosen, pair) as trial:
                fitted = fit(chosen, pair, room)
                target, drafters = open_models(fitted.options, fitted.pair, trial)
    except MemoryError as exc:
        why = "needs more memory than this process may have. Use a smaller --ctx-size, a smaller model, or no draft"
        raise CapabilityError(f"{chosen.model} {why}") from exc
    if template is not None:
        target.vocabulary.chat_template = template
    opened = Model(fitted.options, fitted.pair, target, drafters, MemoryReport.of(fitted, room))
    with closed_on_failure(opened):
        opened.prepare()
    return opened
