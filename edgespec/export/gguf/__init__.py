"""Conversion of Hugging Face checkpoints to GGUF: quantisation, early exits, tokenizer check."""

from __future__ import annotations

from edgespec.errors import CapabilityError
from edgespec.installation import install_command

try:
    import gguf as _gguf  # noqa: F401
except ImportError as exc:
    raise CapabilityError(f"converting to GGUF needs the package gguf: {install_command('export')}") from exc

from edgespec.export.gguf.convert import OUTPUT_TYPES, Conversion, convert
from edgespec.export.gguf.early_exit import EarlyExit, early_exit_gguf
from edgespec.export.gguf.quantise import GGUF_QUANTS, NEEDS_IMPORTANCE, export_gguf, quantise
from edgespec.export.gguf.tokenizer_check import check_tokenizer
from edgespec.formats.architectures import ARCHITECTURES
from edgespec.formats.gguf.tokenizer import pre_tokenizer_name

__all__ = [
    "ARCHITECTURES",
    "GGUF_QUANTS",
    "NEEDS_IMPORTANCE",
    "OUTPUT_TYPES",
    "Conversion",
    "EarlyExit",
    "check_tokenizer",
    "convert",
    "early_exit_gguf",
    "export_gguf",
    "pre_tokenizer_name",
    "quantise",
]
