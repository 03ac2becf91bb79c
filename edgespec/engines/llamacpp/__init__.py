"""The llama.cpp engine: GGUF models on CPUs, Apple Silicon and consumer GPUs."""

from edgespec.engines.llamacpp.eagle3 import Eagle3Head
from edgespec.engines.llamacpp.engine import LlamaCppEngine
from edgespec.engines.llamacpp.tokenizer import LlamaCppVocabulary, VocabularyFile

__all__ = ["Eagle3Head", "LlamaCppEngine", "LlamaCppVocabulary", "VocabularyFile"]
