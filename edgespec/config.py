"""The typed options of a run: what is loaded, and how one generation goes."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from edgespec.errors import ConfigError

DrafterName = Literal[
    "auto",
    "none",
    "model",
    "tree",
    "hybrid",
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
DraftTemperature = float | Literal["auto"]
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


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name} {value!r} is not known; allowed: {', '.join(allowed)}")


def _at_least(name: str, value: int | None, least: int) -> None:
    if value is None:
        return
    if not isinstance(value, int):
        raise ConfigError(f"{name} must be a whole number, got {value!r}")
    if value < least:
        raise ConfigError(f"{name} must be at least {least}, got {value}")


def _as_path(name: str, value: object) -> Path | None:
    """A path, which Python callers mostly have as text."""
    if value is None or isinstance(value, Path):
        return value
    if not isinstance(value, str | os.PathLike):
        raise ConfigError(f"{name} must be a path, got {value!r}")
    return Path(value)


def _check_draft_length(value: object) -> None:
    if value != "auto" and not (isinstance(value, int) and 0 <= value <= MAX_DRAFT_LENGTH):
        raise ConfigError(f"draft-length must be auto or 0..{MAX_DRAFT_LENGTH}, got {value!r}")


def _check_draft_temperature(value: object) -> None:
    if value != "auto" and not (
        isinstance(value, int | float) and 0.05 <= value <= 20
    ):  # refuses what is no number too
        raise ConfigError(f"draft-temp must be auto or a factor from 0.05 to 20, got {value!r}")


def _check_share(value: object) -> None:
    if not (isinstance(value, int | float) and 0 <= value <= 1):
        raise ConfigError(f"never-slower must be a share of time from 0 to 1, got {value!r}")


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
    `draft_temperature`: what the draft model samples at over the target's temperature; auto learns
    it from the text under the coupled rule. `never_slower`: share of plain decoding's time that speculation may
    lose at most. `engine`: which of a pair's files are taken; `provider`: the device of ONNX Runtime, `gpu_layers`
    that of llama.cpp; `reproducible`: None means yes where the model and the rule allow it, True demands it, False
    gives it up for speed.
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
    draft_temperature: DraftTemperature = 1.0
    never_slower: float = 0.02
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
        if not isinstance(self.model, str | os.PathLike):
            raise ConfigError(f"model must be a registry name or a path, got {self.model!r}")
        object.__setattr__(self, "model", os.fspath(self.model))
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
        _at_least("exit-layer", self.exit_layer, 1)
        _at_least("ctx-size", self.context_length, 16)
        _at_least("draft ctx-size", self.draft_context_length, 16)
        _check_draft_length(self.draft_length)
        _check_draft_temperature(self.draft_temperature)
        _check_share(self.never_slower)
        if self.reproducible and self.verify != "coupled":
            raise ConfigError(
                f"--reproducible and --verify {self.verify} contradict each other: under it the text depends on the "
                "draft. Use --verify coupled, or --no-reproducible"
            )


@dataclass(frozen=True, slots=True)
class GenerateOptions:
    """One generation. None for a speculative setting means what the model was loaded with."""

    max_tokens: int | None = None  # None: until the context is full
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    drafter: DrafterName | None = None
    draft_length: DraftLength | None = None
    verify: RuleName | None = None
    logprobs: bool = True

    def __post_init__(self) -> None:
        _at_least("max-tokens", self.max_tokens, 1)
        if any(not text for text in self.stop):
            raise ConfigError("a stop string is empty; give at least one character")
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
