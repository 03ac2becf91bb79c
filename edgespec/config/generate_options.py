"""Typed options of one generation (`GenerateOptions`) and of the command line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edgespec.config.checks import (
    as_schema,
    as_texts,
    at_least,
    check_draft_length,
    is_number,
    one_of,
    optional_text,
    refuses_unknown,
    switches,
    whole,
)
from edgespec.config.names import (
    DRAFTERS,
    MAX_GRAMMAR_CHARACTERS,
    MAX_TOP_LOGPROBS,
    REASONING_FORMATS,
    RULES,
    DrafterName,
    DraftLength,
    ReasoningFormat,
    RuleName,
)
from edgespec.errors import ConfigError, shown


@refuses_unknown(ConfigError)
@dataclass(frozen=True, slots=True)
class GenerateOptions:
    """Options of one generation. `drafter`, `draft_length` and `verify` None: as the model was loaded.

    `max_tokens`: limit of new tokens; None, or -1 as in llama.cpp: until the context is full. `stop`: one or more
    strings that end the answer and are not part of it. `ignore_eos`: end tokens do not end the answer. `logprobs`:
    return each token's natural log probability under the raw softmax, before temperature, bias, penalties and
    truncation; `top_logprobs`: number of most likely tokens to return the same for. `max_wait_s`: seconds to wait for
    another generation to end; 0: do not wait; None: no limit. `noise_offset`: sample position i with the random numbers
    of position i + `noise_offset`. Set it when the oldest turns of a conversation were dropped, else a new answer may
    get the random numbers of an old one and repeat it; `edgespec.chat.conversation.Conversation.noise_offset` computes
    it.

    Structured output, one of: `json_schema`: the answer is JSON that matches it, a dict or JSON text; `grammar`: a Lark
    or GBNF grammar that the answer follows; `regex`: a regular expression that the whole answer matches.
    `free_until`: the answer is free up to and including this text, such as "</think>", then up to two line ends may
    come, and what follows is structured. An answer cut by `max_tokens`, a stop string or the context is incomplete. A
    grammar is checked when a generation is requested.

    `prediction`: what most of the answer is expected to be, such as a file that is to be edited; it is drafted from and
    changes no text.
    Raises ConfigError for a value that is not allowed.
    """

    max_tokens: int | None = None
    stop: str | Sequence[str] = ()
    ignore_eos: bool = False
    drafter: DrafterName | None = None
    draft_length: DraftLength | None = None
    verify: RuleName | None = None
    logprobs: bool = True
    top_logprobs: int = 0
    max_wait_s: float | None = None
    noise_offset: int = 0
    json_schema: Mapping[str, Any] | str | None = None
    grammar: str | None = None
    regex: str | None = None
    free_until: str | None = None
    prediction: str | None = None

    def __post_init__(self) -> None:
        if self.json_schema is not None:
            object.__setattr__(self, "json_schema", as_schema(self.json_schema))
        self._check_structure()
        optional_text("prediction", self.prediction)
        at_least("noise_offset", whole("noise_offset", self.noise_offset), 0)
        if self.max_tokens == NO_LIMIT and isinstance(self.max_tokens, int):
            object.__setattr__(self, "max_tokens", None)
        at_least("max-tokens", self.max_tokens, 1, "leave it out for an answer of any length, as -1 does")
        object.__setattr__(self, "stop", as_texts(self.stop))
        switches(self, "ignore_eos", "logprobs")
        whole("top_logprobs", self.top_logprobs)
        if not 0 <= self.top_logprobs <= (MAX_TOP_LOGPROBS if self.logprobs else 0):
            raise ConfigError(
                f"top_logprobs must be from 0 to {MAX_TOP_LOGPROBS}, and 0 without logprobs, got "
                f"{shown(self.top_logprobs)}"
            )
        if self.max_wait_s is not None and not (is_number(self.max_wait_s) and 0 <= self.max_wait_s <= _MOST_WAIT_S):
            raise ConfigError(
                f"max_wait_s must be from 0 to {_MOST_WAIT_S} seconds, or None for no limit, got "
                f"{shown(self.max_wait_s)}"
            )
        if self.drafter is not None:
            one_of("drafter", self.drafter, DRAFTERS)
        if self.verify is not None:
            one_of("verify", self.verify, RULES)
        if self.draft_length is not None:
            check_draft_length(self.draft_length)

    @property
    def structure(self) -> str | None:
        """Which of json_schema, grammar and regex is given; None for an answer without structure."""
        return next((name for name in STRUCTURES if getattr(self, name) is not None), None)

    def _check_structure(self) -> None:
        """Raise ConfigError for more than one structure, an empty one, or an option that contradicts it."""
        given = {name: text for name in STRUCTURES if (text := getattr(self, name)) is not None}
        for name, text in (given | {"free_until": self.free_until}).items():
            optional_text(name, text)
            if text == "":
                raise ConfigError(f"{name} is empty: leave it out for an answer without structure")
            if text is not None and len(text) > MAX_GRAMMAR_CHARACTERS:
                raise ConfigError(f"{name} has {len(text)} characters; at most {MAX_GRAMMAR_CHARACTERS} are allowed")
        if len(given) > 1:
            raise ConfigError(f"{' and '.join(given)} were both given: an answer has one structure, keep one")
        if self.free_until is not None and not given:
            raise ConfigError("free_until needs json_schema, grammar or regex: without one the whole answer is free")
        if given and self.ignore_eos is True:
            raise ConfigError(
                f"ignore_eos contradicts {next(iter(given))}, which decides where the answer ends: keep one"
            )


_MOST_WAIT_S = 10**9
NO_LIMIT = -1
STRUCTURES = ("json_schema", "grammar", "regex")


@dataclass(frozen=True, slots=True)
class SessionOptions:
    """What the command line shows, and how it builds the prompt. Does not change the output for a given prompt.

    `thinking`: whether a model that can reason before it answers does; None leaves it to the chat template.
    `reasoning_format`: auto and deepseek tell reasoning apart from the answer, none leaves it in the text.
    `raw`: print the text exactly as the model wrote it in a terminal too, without word wrap or readable tool calls.
    """

    system: str | None = None
    chat_template: bool = True
    thinking: bool | None = None
    reasoning_format: ReasoningFormat = "auto"
    show_draft: bool = False
    stats: bool = False
    raw: bool = False

    def __post_init__(self) -> None:
        optional_text("system", self.system)
        switches(self, "chat_template", "show_draft", "stats", "raw")
        one_of("reasoning-format", self.reasoning_format, REASONING_FORMATS)
        if self.thinking is not None:
            switches(self, "thinking")
