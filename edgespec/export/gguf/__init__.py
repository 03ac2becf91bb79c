"""Conversion of Hugging Face checkpoints to GGUF. Raises CapabilityError where the package gguf is missing."""

from __future__ import annotations

from edgespec.errors import CapabilityError
from edgespec.installation import install_command

try:
    import gguf as _gguf  # noqa: F401
except ImportError as exc:
    raise CapabilityError(f"converting to GGUF needs the package gguf: {install_command('convert')}") from exc
