"""Shapes by name. They follow real models; every head has the demo's 64 dimensions."""

from __future__ import annotations

from edgespec.bench.expansion import LLAMA_1B, Shape
from edgespec.errors import ConfigError

# 3b has Llama 3.2 3B's matrices and cache: its 24 + 8 heads of 128 become 48 + 16 of 64. The two small ones have the
# proportions of models sold as drafts; their vocabulary is smaller so that the head, which real small models spend
# half their weights on, does not hide the layers.
SHAPES = {
    "60m": Shape(512, 2048, 11, 8, 4, vocab_size=32_768),
    "300m": Shape(1024, 2816, 24, 16, 4, vocab_size=32_768),
    "1b": LLAMA_1B,
    "3b": Shape(3072, 8192, 28, 48, 16, vocab_size=128_256),
}


def shape_of(size: str) -> Shape:
    """The shape of that name. Raises ConfigError."""
    if size not in SHAPES:
        raise ConfigError(f"no shape {size!r}; allowed: {', '.join(SHAPES)}")
    return SHAPES[size]
