"""The llama.cpp engine: GGUF models on CPUs, Apple Silicon and consumer GPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from edgespec.engines.llamacpp.engine import LlamaCppEngine
    from edgespec.engines.llamacpp.tokenizer import LlamaCppVocabulary, VocabularyFile

__all__ = ["LlamaCppEngine", "LlamaCppVocabulary", "VocabularyFile"]
_HOMES = {"LlamaCppEngine": "engine", "LlamaCppVocabulary": "tokenizer", "VocabularyFile": "tokenizer"}


def __getattr__(name: str) -> Any:
    """Import a class on first use: a plan needs `footprint` alone, and no engine."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
