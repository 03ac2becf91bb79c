"""The graph that a GPU is given through CUDA, on the processor, which has kernels for it too."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from edgespec.engines.onnx import engine
from edgespec.engines.widths import METHOD


@contextmanager
def as_for_cuda() -> Iterator[None]:
    """Models that are loaded here on the processor are adapted as for CUDA, and have width classes of their own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "HALF_ONLY", frozenset({"cpu"}))
        patch.setattr(engine, "METHOD", f"{METHOD} as for CUDA")
        yield
