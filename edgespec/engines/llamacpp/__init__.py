"""The llama.cpp engine: GGUF models on CPUs, Apple Silicon and consumer GPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from edgespec.engines.llamacpp.dflash import DFlashHead
    from edgespec.engines.llamacpp.eagle3 import Eagle3Head
    from edgespec.engines.llamacpp.engine import LlamaCppEngine
    from edgespec.engines.llamacpp.mtp import MtpFileHead
    from edgespec.engines.llamacpp.tokenizer import LlamaCppVocabulary, VocabularyFile

__all__ = ["DFlashHead", "Eagle3Head", "LlamaCppEngine", "LlamaCppVocabulary", "MtpFileHead", "VocabularyFile"]
_HOMES = {"DFlashHead": "dflash", "Eagle3Head": "eagle3", "LlamaCppEngine": "engine", "MtpFileHead": "mtp"}
_HOMES |= {"LlamaCppVocabulary": "tokenizer", "VocabularyFile": "tokenizer"}


def __getattr__(name: str) -> Any:
    """Import a class on first use: a plan needs `footprint` alone, and no engine."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
