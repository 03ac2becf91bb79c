"""Typed options of loading a pair (`LoadOptions`), of one generation and of the command line."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any, Literal, TypedDict, TypeGuard, TypeVar, get_args

from edgespec.errors import ConfigError, EdgespecError, shown
from edgespec.sizes import parse_budget

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
MAX_PARALLEL = 64
MAX_GRAMMAR_CHARACTERS = 1 << 18  # of a schema or grammar: what compiles within a second
MAX_COUNT = 2**31 - 1  # the engines' libraries count in int32
Class = TypeVar("Class", bound=type[Any])


def refuses_unknown(error: type[EdgespecError]) -> Callable[[Class], Class]:
    """Dataclass decorator: an unknown keyword raises `error` with the list of known ones."""

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
    """Whether `value` is an int or a float; bool does not count."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _switches(options: object, *names: str) -> None:
    """Raise ConfigError if one of these fields is neither True nor False."""
    for name in names:
        if not isinstance(value := getattr(options, name), bool):
            raise ConfigError(f"{name} must be True or False, got {shown(value)}")


def _as_texts(value: object) -> tuple[str, ...]:
    """Stop strings as a tuple; a single str is one stop string."""
    texts = (value,) if isinstance(value, str) else value
    if not isinstance(texts, Sequence) or not all(isinstance(text, str) for text in texts):
        raise ConfigError(f"stop must be a string or a list of strings, got {shown(value)}")
    if not all(texts):
        raise ConfigError("stop contains an empty string; each stop string needs at least one character")
    return tuple(texts)


def _as_schema(value: object) -> str:
    """A JSON schema, given as a mapping or as JSON text, as JSON text. Raises ConfigError."""
    try:
        found = json.loads(value) if isinstance(value, str) else value
        text = json.dumps(dict(found), ensure_ascii=False, allow_nan=False) if isinstance(found, Mapping) else None
    except json.JSONDecodeError as exc:
        raise ConfigError(f"json_schema is not valid JSON: {exc}") from exc
    except (TypeError, ValueError, RecursionError) as exc:
        raise ConfigError(f"json_schema holds what JSON cannot, or is nested too deeply: {exc}") from exc
    if text is None:
        raise ConfigError(f"json_schema must be a JSON object, as a dict or as text, got {shown(value)}")
    return text


def _as_path(name: str, value: object) -> Path | None:
    """`value` as a Path; accepts str and os.PathLike."""
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
        raise ConfigError(f"max-slowdown must be a fraction of time from 0 to 1, got {shown(value)}")


Location = str | os.PathLike[str]


class LoadKeywords(TypedDict, total=False):
    """Keywords of `load`: the fields of `LoadOptions` except `model`. Paths may be str."""

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
    parallel: int
    gpu_layers: int
    draft_gpu_layers: int | None
    cache_type_k: CacheType | None
    cache_type_v: CacheType | None
    draft_cache_type_k: CacheType | None
    draft_cache_type_v: CacheType | None
    memory: str | int | None
    provider: ProviderName
    corpus: bool
    recall: bool
    learn: bool


@refuses_unknown(ConfigError)
@dataclass(frozen=True, slots=True)
class LoadOptions:
    """Which models to load, and how. None means: choose by model and machine.

    Models. `model`: registry name or path of the target's pair; paths may be str. `draft`: draft model; None: the
    pair's own. `medium`: model between target and draft, loaded for drafter hierarchical only; None: the pair's own.
    `heads`: heads file for drafter medusa or eagle; None: the pair's own, which drafter auto uses if there is no draft
    model. `exit_layer`: number of layers of an ONNX target that draft; None: as the pair was exported. `engine`: which
    files of the pair to use.

    Speculation. `drafter`: auto chooses the drafter with the best expected speed, every round. `draft_length`: tokens,
    or nodes for a drafter that drafts trees if the target can score trees; auto chooses every round; a number with
    drafter auto selects the pair's own draft, or ngram without one. `draft_temperature`: factor on the target's
    temperature for sampling from the draft model. `verify`: the acceptance rule. `max_slowdown`: the fraction of plain
    decoding time that speculation may lose at most.
    `reproducible`: same tokens with and without speculation; None: where model and rule allow it; True: required, else
    CapabilityError; False: off, for speed.

    Machine. `context_length`, `draft_context_length`: tokens. `parallel`: generations that can run at once
    (`Model.batch`), each with a context of that length. `gpu_layers`, `draft_gpu_layers`: layers that llama.cpp
    places on the GPU, -1 for all. `provider`: ONNX Runtime's device. `cache_type_k`, `cache_type_v`: KV cache formats,
    `draft_cache_type_k`, `draft_cache_type_v` those of the draft model. `memory`: budget for all that is loaded, as
    "6GiB", "80%" of what is free, "auto" for all of it, or bytes; options that are not given are chosen smaller to keep
    it. None: what is free, and only the draft model gives way.

    Texts to draft from. `corpus`: drafter suffix also searches the user's corpus. `recall`: drafter cache reads what it
    learnt in earlier runs. `learn`: this run's answers are added to that file. Both are off by default: a benchmark
    that decodes the same prompt twice would otherwise draft from its own earlier answer.

    Raises ConfigError for a value that is not allowed.
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
    parallel: int = 1
    gpu_layers: int = 0
    draft_gpu_layers: int | None = None
    cache_type_k: CacheType | None = None
    cache_type_v: CacheType | None = None
    draft_cache_type_k: CacheType | None = None
    draft_cache_type_v: CacheType | None = None
    memory: str | int | None = None
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
        if self.memory is not None:
            parse_budget(self.memory)
        for kind in (self.cache_type_k, self.cache_type_v, self.draft_cache_type_k, self.draft_cache_type_v):
            if kind is not None:
                _one_of("cache type", kind, CACHE_TYPES)
        _one_of("provider", self.provider, PROVIDERS)
        _at_least("threads", self.threads, 1)
        if not 1 <= _whole("parallel", self.parallel) <= MAX_PARALLEL:
            raise ConfigError(f"parallel must be from 1 to {MAX_PARALLEL}, got {shown(self.parallel)}")
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
                f"--reproducible does not work with --verify {self.verify}, whose text depends on the "
                "draft. Use --verify coupled, or --no-reproducible"
            )


@refuses_unknown(ConfigError)
@dataclass(frozen=True, slots=True)
class GenerateOptions:
    """Options of one generation. `drafter`, `draft_length` and `verify` None: as the model was loaded.

    `max_tokens`: limit of new tokens; None: until the context is full. `stop`: one or more strings that end the answer
    and are not part of it. `ignore_eos`: end tokens do not end the answer. `logprobs`: return each token's natural log
    probability under the raw softmax, before temperature, bias, penalties and truncation; `top_logprobs`: number of
    most likely tokens to return the same for. `max_wait_s`: seconds to wait for another generation to end; 0: do not
    wait; None: no limit. `noise_offset`: sample position i with the random numbers of position i + `noise_offset`. Set
    it when the oldest turns of a conversation were dropped, else a new answer may get the random numbers of an old one
    and repeat it; `edgespec.chat.conversation.Conversation.noise_offset` computes it.

    Structured output, one of: `json_schema`: the answer is JSON of this schema, a dict or JSON text; `grammar`: a Lark
    or GBNF grammar that the answer follows; `regex`: a regular expression that the whole answer matches.
    `free_until`: the answer is free up to and including this text, such as "</think>", and structured after it. An
    answer that `max_tokens`, a stop string or the context cuts is incomplete. A grammar is checked when a generation
    is asked for.
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

    def __post_init__(self) -> None:
        if self.json_schema is not None:
            object.__setattr__(self, "json_schema", _as_schema(self.json_schema))
        self._check_structure()
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
            raise ConfigError(f"max_wait_s must be None or at least 0 seconds, got {shown(self.max_wait_s)}")
        if self.drafter is not None:
            _one_of("drafter", self.drafter, DRAFTERS)
        if self.verify is not None:
            _one_of("verify", self.verify, RULES)
        if self.draft_length is not None:
            _check_draft_length(self.draft_length)

    def _check_structure(self) -> None:
        """Raise ConfigError for more than one structure, an empty one, or an option that contradicts it."""
        given = {
            name: text for name in ("json_schema", "grammar", "regex") if (text := getattr(self, name)) is not None
        }
        for name, text in (given | {"free_until": self.free_until}).items():
            _optional_text(name, text)
            if text == "":
                raise ConfigError(f"{name} is empty: leave it out for an answer without structure")
            if text is not None and len(text) > MAX_GRAMMAR_CHARACTERS:
                raise ConfigError(f"{name} has {len(text)} characters; at most {MAX_GRAMMAR_CHARACTERS} are allowed")
        if len(given) > 1:
            raise ConfigError(f"{' and '.join(given)} were both given: an answer has one structure, keep one")
        if self.free_until is not None and not given:
            raise ConfigError("free_until needs json_schema, grammar or regex: without one the whole answer is free")
        if given and self.ignore_eos is True:
            raise ConfigError(f"ignore_eos contradicts {next(iter(given))}, which says where the answer ends: keep one")


@dataclass(frozen=True, slots=True)
class SessionOptions:
    """What the command line shows, and how it builds the prompt. Does not change the output for a given prompt.

    `raw`: print the text exactly as the model wrote it in a terminal too, without word wrap or readable tool calls.
    """

    system: str | None = None
    chat_template: bool = True
    show_draft: bool = False
    stats: bool = False
    raw: bool = False

    def __post_init__(self) -> None:
        _optional_text("system", self.system)
        _switches(self, "chat_template", "show_draft", "stats", "raw")
