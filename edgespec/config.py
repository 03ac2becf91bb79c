"""The typed options of a run: what is loaded, and how one generation goes."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any, Literal, TypedDict, TypeGuard, TypeVar, get_args

from edgespec.errors import ConfigError, EdgespecError, shown

DrafterName = Literal[
    "auto",
    "none",
    "model",
    "tree",
    "hierarchical",
    "early-exit",
    "medusa",
    "eagle",
    "eagle3",
    "ngram",
    "suffix",
    "cache",
    "lookahead",
]
DraftLength = int | Literal["auto"]
RuleName = Literal["coupled", "rejection", "block", "typical"]
EngineName = Literal["auto", "llamacpp", "onnx"]
ProviderName = Literal["auto", "cpu", "cuda", "dml", "webgpu"]
CacheType = Literal["f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "int8"]
DRAFTERS: tuple[DrafterName, ...] = get_args(DrafterName)
RULES: tuple[RuleName, ...] = ("coupled", "rejection", "block", "typical")
ENGINES: tuple[EngineName, ...] = ("auto", "llamacpp", "onnx")
PROVIDERS: tuple[ProviderName, ...] = ("auto", "cpu", "cuda", "dml", "webgpu")
CACHE_TYPES: tuple[CacheType, ...] = ("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "int8")
MAX_DRAFT_LENGTH = 64
MAX_TOP_LOGPROBS = 256
MAX_COUNT = 2**31 - 1  # what the engines' libraries count with
Class = TypeVar("Class", bound=type[Any])


def refuses_unknown(error: type[EdgespecError]) -> Callable[[Class], Class]:
    """A decorator of a dataclass: a keyword that is none of its fields raises `error` and names those that are."""

    def decorate(cls: Class) -> Class:
        make = cls.__init__

        @wraps(make)
        def __init__(self: Any, *args: Any, **fields: Any) -> None:  # noqa: N807
            known = cls.__dataclass_fields__
            if unknown := sorted(fields.keys() - known.keys()):
                raise error(f"{cls.__name__} has no option {unknown[0]!r}; known: {', '.join(known)}")
            make(self, *args, **fields)

        cls.__init__ = __init__
        return cls

    return decorate


def _one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in allowed:
        raise ConfigError(f"{name} {shown(value)} is not known; allowed: {', '.join(allowed)}")


def _whole(name: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ConfigError(f"{name} must be a whole number, got {shown(value)}")
    return value


def _at_least(name: str, given: object, least: int) -> None:
    if given is None:
        return
    value = _whole(name, given)
    if value < least:
        raise ConfigError(f"{name} must be at least {least}, got {shown(value)}")
    if value > MAX_COUNT:
        raise ConfigError(f"{name} must be at most {MAX_COUNT}, got {shown(value)}")


def _optional_text(name: str, value: object) -> None:
    if value is not None and not isinstance(value, str):
        raise ConfigError(f"{name} must be text, got {shown(value)}")


def _is_number(value: object) -> TypeGuard[int | float]:
    """Whether `value` is a number of Python's own; a bool is none here."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _switches(options: object, *names: str) -> None:
    """Raises ConfigError for a field of those names that is neither True nor False."""
    for name in names:
        if not isinstance(value := getattr(options, name), bool):
            raise ConfigError(f"{name} must be True or False, got {shown(value)}")


def _as_texts(value: object) -> tuple[str, ...]:
    """Stop strings; one text is one of them and not its letters."""
    texts = (value,) if isinstance(value, str) else value
    if not isinstance(texts, Sequence) or not all(isinstance(text, str) for text in texts):
        raise ConfigError(f"stop must be a text or several texts, got {shown(value)}")
    if not all(texts):
        raise ConfigError("a stop string is empty; give at least one character")
    return tuple(texts)


def _as_path(name: str, value: object) -> Path | None:
    """A path, which Python callers mostly have as text."""
    if value is None or isinstance(value, Path):
        return value
    if not isinstance(value, str | os.PathLike):
        raise ConfigError(f"{name} must be a path, got {shown(value)}")
    return Path(os.fsdecode(value))


def _check_draft_length(value: object) -> None:
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    if not (isinstance(value, str) and value == "auto") and not (is_whole and value in range(MAX_DRAFT_LENGTH + 1)):
        raise ConfigError(f"draft-length must be auto or 0..{MAX_DRAFT_LENGTH}, got {shown(value)}")


def _check_draft_temperature(value: object) -> None:
    if not (_is_number(value) and 0.05 <= value <= 20):
        raise ConfigError(f"draft-temp must be a number from 0.05 to 20, got {shown(value)}")


def _check_share(value: object) -> None:
    if not (_is_number(value) and 0 <= value <= 1):
        raise ConfigError(f"max-slowdown must be a share of time from 0 to 1, got {shown(value)}")


Location = str | os.PathLike[str]


class LoadKeywords(TypedDict, total=False):
    """The fields of `LoadOptions` but `model`, as keywords of `load`; paths may be text there."""

    draft: Location | None
    medium: Location | None
    exit_layer: int | None
    heads: Location | None
    engine: EngineName
    drafter: DrafterName
    draft_length: DraftLength
    draft_temperature: float
    max_slowdown: float
    verify: RuleName
    reproducible: bool | None
    context_length: int | None
    draft_context_length: int | None
    threads: int | None
    gpu_layers: int
    draft_gpu_layers: int | None
    cache_type_k: CacheType | None
    cache_type_v: CacheType | None
    provider: ProviderName
    corpus: bool
    recall: bool
    learn: bool


@refuses_unknown(ConfigError)
@dataclass(frozen=True, slots=True)
class LoadOptions:
    """What is loaded and how. None means: decide from the model and the machine.

    `model`: registry name or path; paths may be text; `draft`: path of a draft model, or None for the pair's own;
    `medium`: path of a model between the two, for drafter hierarchical, or None for the pair's own, which is loaded
    for that drafter only; `heads`: path of a file of heads for drafter medusa or eagle, or None for the pair's own,
    which auto takes where there is no draft model; `exit_layer`: layers of an ONNX target that draft, None for what its
    pair was exported with; lengths in tokens; `drafter` auto: whichever is expected to pay, by the round;
    `draft_length` auto: as many tokens as pay; a number with drafter auto means the pair's own draft where there is
    one, else ngram; of drafters tree, medusa and eagle it is the nodes of a tree where the target scores trees.
    `draft_temperature`: the draft model's temperature as a multiple of the target's. `max_slowdown`: share of plain
    decoding's time that speculation may lose at most. `engine`: which of a pair's files are taken; `provider`: the
    device of ONNX Runtime, `gpu_layers` that of llama.cpp; `reproducible`: None means yes where the model and the rule
    allow it, True demands it, False gives it up for speed.
    `corpus`: drafter suffix looks in the user's corpus too; `recall`: drafter cache knows what models wrote in earlier
    runs; `learn`: what this one writes is added to that, on disk. Neither unless asked for: prompts that are decoded
    again, as when measuring, would meet their own answers.
    """

    model: str = "demo"
    draft: Path | None = None
    medium: Path | None = None
    exit_layer: int | None = None
    heads: Path | None = None
    engine: EngineName = "auto"
    drafter: DrafterName = "auto"
    draft_length: DraftLength = "auto"
    draft_temperature: float = 1.0
    max_slowdown: float = 0.02
    verify: RuleName = "coupled"
    reproducible: bool | None = None
    context_length: int | None = None
    draft_context_length: int | None = None
    threads: int | None = None
    gpu_layers: int = 0
    draft_gpu_layers: int | None = None
    cache_type_k: CacheType | None = None
    cache_type_v: CacheType | None = None
    provider: ProviderName = "auto"
    corpus: bool = True
    recall: bool = False
    learn: bool = False

    def __post_init__(self) -> None:
        _switches(self, "corpus", "recall", "learn", *(("reproducible",) if self.reproducible is not None else ()))
        _whole("gpu_layers", self.gpu_layers)
        if not isinstance(self.model, str | os.PathLike):
            raise ConfigError(f"model must be a registry name or a path, got {shown(self.model)}")
        object.__setattr__(self, "model", os.fsdecode(self.model))
        for name in ("draft", "medium", "heads"):
            object.__setattr__(self, name, _as_path(name, getattr(self, name)))
        _one_of("engine", self.engine, ENGINES)
        _one_of("drafter", self.drafter, DRAFTERS)
        _one_of("verify", self.verify, RULES)
        for kind in (self.cache_type_k, self.cache_type_v):
            if kind is not None:
                _one_of("cache type", kind, CACHE_TYPES)
        _one_of("provider", self.provider, PROVIDERS)
        _at_least("threads", self.threads, 1)
        _at_least("gpu-layers", self.gpu_layers, -1)
        _at_least("draft gpu-layers", self.draft_gpu_layers, -1)
        _at_least("exit-layer", self.exit_layer, 1)
        _at_least("ctx-size", self.context_length, 16)
        _at_least("draft ctx-size", self.draft_context_length, 16)
        _check_draft_length(self.draft_length)
        _check_draft_temperature(self.draft_temperature)
        _check_share(self.max_slowdown)
        if self.reproducible and self.verify != "coupled":
            raise ConfigError(
                f"--reproducible and --verify {self.verify} contradict each other: under it the text depends on the "
                "draft. Use --verify coupled, or --no-reproducible"
            )


@refuses_unknown(ConfigError)
@dataclass(frozen=True, slots=True)
class GenerateOptions:
    """One generation. None for a speculative setting means what the model was loaded with.

    `stop`: texts before which the answer ends, or one of them. `logprobs`: give each token its natural log probability
    under the raw softmax, before temperature, bias, penalties and truncation; `top_logprobs`: those of so many of the
    likeliest tokens too. `max_wait_s`: seconds to wait for the end of another generation, 0 for not at all, None for
    as long as it takes.
    `noise_offset`: the token at position i is sampled with the noise of position i + `noise_offset`. Give it when a
    prompt is a conversation without its oldest turns: an answer that begins where an older one began would otherwise
    be drawn with the same random numbers, and may repeat it. `conversation.Conversation.noise_offset` computes it.
    """

    max_tokens: int | None = None  # None: until the context is full
    stop: str | Sequence[str] = ()
    ignore_eos: bool = False
    drafter: DrafterName | None = None
    draft_length: DraftLength | None = None
    verify: RuleName | None = None
    logprobs: bool = True
    top_logprobs: int = 0
    max_wait_s: float | None = None
    noise_offset: int = 0

    def __post_init__(self) -> None:
        _at_least("noise_offset", _whole("noise_offset", self.noise_offset), 0)
        _at_least("max-tokens", self.max_tokens, 1)
        object.__setattr__(self, "stop", _as_texts(self.stop))
        _switches(self, "ignore_eos", "logprobs")
        _whole("top_logprobs", self.top_logprobs)
        if not 0 <= self.top_logprobs <= (MAX_TOP_LOGPROBS if self.logprobs else 0):
            raise ConfigError(
                f"top_logprobs must be from 0 to {MAX_TOP_LOGPROBS}, and 0 without logprobs, got "
                f"{shown(self.top_logprobs)}"
            )
        if self.max_wait_s is not None and not (_is_number(self.max_wait_s) and self.max_wait_s >= 0):
            raise ConfigError(f"max_wait_s must be None or seconds from 0 on, got {shown(self.max_wait_s)}")
        if self.drafter is not None:
            _one_of("drafter", self.drafter, DRAFTERS)
        if self.verify is not None:
            _one_of("verify", self.verify, RULES)
        if self.draft_length is not None:
            _check_draft_length(self.draft_length)


@dataclass(frozen=True, slots=True)
class SessionOptions:
    """What the command line shows and how it makes a prompt; no part of it changes what a given prompt yields."""

    system: str | None = None
    chat_template: bool = True
    show_draft: bool = False
    stats: bool = False

    def __post_init__(self) -> None:
        _optional_text("system", self.system)
        _switches(self, "chat_template", "show_draft", "stats")
