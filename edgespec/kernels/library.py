"""Where the compiled library of the kernels is."""

import os
from pathlib import Path


def library_path() -> Path | None:
    """Path of the shared library, None if it has not been built."""
    path = os.environ.get("EDGESPEC_KERNELS")
    return Path(path) if path else None


def why_missing() -> str:
    """Why `library_path` is None, and the fix."""
    return "the kernels have not been built: edgespec doctor says how to get them"
