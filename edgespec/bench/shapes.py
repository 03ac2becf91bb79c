"""Shapes whose cost a benchmark model takes on. They follow real models; every head has the demo's 64 dimensions."""

from __future__ import annotations

from dataclasses import dataclass

from edgespec.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a Llama. `head_dim` is that of the model which is expanded: rotary positions must stay the same."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    vocab_size: int
    head_dim: int = 64

    @property
    def group_size(self) -> int:
        """Query heads that read one key-value head."""
        return self.num_heads // self.num_kv_heads

    def parameters(self, *, tied: bool = True) -> int:
        """Weights, norms included; with `tied` the head is the embedding and counts once."""
        attention = 2 * self.hidden_size * (self.num_heads + self.num_kv_heads) * self.head_dim
        per_layer = attention + 3 * self.hidden_size * self.intermediate_size + 2 * self.hidden_size
        heads = self.vocab_size * self.hidden_size * (1 if tied else 2)
        return self.num_layers * per_layer + heads + self.hidden_size


# 1b is Llama 3.2 1B. 3b has Llama 3.2 3B's matrices and cache: its 24 + 8 heads of 128 become 48 + 16 of 64. The two
# small ones have the proportions of models sold as drafts; their vocabulary is smaller so that the head, which real
# small models spend half their weights on, does not hide the layers.
SHAPES = {
    "60m": Shape(512, 2048, 11, 8, 4, vocab_size=32_768),
    "300m": Shape(1024, 2816, 24, 16, 4, vocab_size=32_768),
    "1b": Shape(2048, 8192, 16, 32, 8, vocab_size=128_256),
    "3b": Shape(3072, 8192, 28, 48, 16, vocab_size=128_256),
}


def shape_of(size: str) -> Shape:
    """The shape of that name. Raises ConfigError."""
    if size not in SHAPES:
        raise ConfigError(f"no shape {size!r}; allowed: {', '.join(SHAPES)}")
    return SHAPES[size]
