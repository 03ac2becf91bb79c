"""Typed options: their names and limits, the checks of their values, and the classes that hold them."""

from __future__ import annotations

from edgespec.config.generate_options import GenerateOptions, SessionOptions
from edgespec.config.load_options import LoadKeywords, LoadOptions, keywords_of
from edgespec.config.names import (
    CACHE_TYPES,
    DRAFTERS,
    ENGINES,
    LOSSY,
    MAX_DRAFT_LENGTH,
    MAX_PARALLEL,
    POOLINGS,
    PROVIDERS,
    RANDOM_SEED,
    REASONING_FORMATS,
    RULES,
    CacheType,
    DrafterName,
    DraftLength,
    EngineName,
    PoolingName,
    ProviderName,
    ReasoningFormat,
    RuleName,
)
from edgespec.config.serve_options import ServeOptions

__all__ = [
    "CACHE_TYPES",
    "DRAFTERS",
    "ENGINES",
    "LOSSY",
    "MAX_DRAFT_LENGTH",
    "MAX_PARALLEL",
    "POOLINGS",
    "PROVIDERS",
    "RANDOM_SEED",
    "REASONING_FORMATS",
    "RULES",
    "CacheType",
    "DraftLength",
    "DrafterName",
    "EngineName",
    "GenerateOptions",
    "LoadKeywords",
    "LoadOptions",
    "PoolingName",
    "ProviderName",
    "ReasoningFormat",
    "RuleName",
    "ServeOptions",
    "SessionOptions",
    "keywords_of",
]
