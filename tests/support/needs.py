"""Marks of tests for what this machine may lack."""

from __future__ import annotations

import pytest

from edgespec.installation import has_engine
from edgespec.kernels.library import library_path

NEEDS_KERNELS = pytest.mark.skipif(
    library_path() is None, reason="the kernels are not built: scripts/run.py test builds them"
)
NEEDS_LLAMA = pytest.mark.skipif(not has_engine("llamacpp"), reason="llama.cpp is not installed")
