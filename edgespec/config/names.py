"""What options may be called, and their limits."""

from __future__ import annotations

from typing import Literal, get_args

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
    "dflash",
    "mtp",
    "ngram",
    "suffix",
    "cache",
    "lookahead",
]
DraftLength = int | Literal["auto"]
GpuLayers = int | Literal["auto"]
ContextLength = int | Literal["auto"]
RuleName = Literal["coupled", "rejection", "block", "typical"]
EngineName = Literal["auto", "llamacpp", "onnx"]
ProviderName = Literal["auto", "cpu", "cuda", "dml", "webgpu"]
CacheType = Literal["f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "int8"]
PoolingName = Literal["mean", "cls", "last"]
ReasoningFormat = Literal["auto", "none", "deepseek"]
DRAFTERS: tuple[DrafterName, ...] = get_args(DrafterName)
RULES: tuple[RuleName, ...] = ("coupled", "rejection", "block", "typical")
LOSSY: frozenset[RuleName] = frozenset({"typical"})  # rules that change the target's output distribution
ENGINES: tuple[EngineName, ...] = ("auto", "llamacpp", "onnx")
PROVIDERS: tuple[ProviderName, ...] = ("auto", "cpu", "cuda", "dml", "webgpu")
REASONING_FORMATS: tuple[ReasoningFormat, ...] = ("auto", "none", "deepseek")  # llama-server's names
POOLINGS: tuple[PoolingName, ...] = ("mean", "cls", "last")
CACHE_TYPES: tuple[CacheType, ...] = ("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "int8")
MAX_DRAFT_LENGTH = 64
MAX_TOP_LOGPROBS = 256
MAX_PARALLEL = 64
RANDOM_SEED = -1  # as a seed, like None: another one each time, as in llama.cpp
MAX_GRAMMAR_CHARACTERS = 1 << 18  # of a schema or grammar: what compiles within a second
MAX_COUNT = 2**31 - 1  # the engines' libraries count in int32
