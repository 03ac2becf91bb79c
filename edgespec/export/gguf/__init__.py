"""Conversion of Hugging Face checkpoints to GGUF. Raises CapabilityError where the package gguf is missing."""

from __future__ import annotations

from edgespec.installation import IMPORT_FAILURES, not_importable

try:
    import gguf as gguf
except IMPORT_FAILURES as exc:
    raise not_importable("an export", exc, "gguf", "convert") from exc
