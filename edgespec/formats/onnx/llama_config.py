"""What a graph of the Llama family is written from: sizes, constants, and how an architecture differs from Llama."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, replace
from typing import Literal, Self

# llama.cpp's names of what can be exported, and the architecture and model type of config.json; what runs as it is on
# our kernels is in `formats.gguf.tables.KINDS`.
WRITABLE = {
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
    "smollm3": ("SmolLM3ForCausalLM", "smollm3"),
    "gemma2": ("Gemma2ForCausalLM", "gemma2"),
    "gemma3": ("Gemma3ForCausalLM", "gemma3_text"),
}


@dataclass(frozen=True, slots=True)
class Experts:
    """The feed-forward parts of a layer of which each token takes `used` of `count`, each `inner` wide.

    `gate`: its activation, a key of `tiles.GATES`; `has_biases`: of the router and the experts; `is_joined`: gate and
    up are one matrix; `has_shared`: one more is taken by all, which is `intermediate_size` wide, times the sigmoid of a
    logit of its own if the router `gates_shared`; `has_preference`: the highest sigmoid(logit) + preference are taken
    (DeepSeek-V3, 2.1.2); `first_layer` that has experts.
    """

    count: int
    used: int
    inner: int
    gate: str = "silu"
    has_biases: bool = False
    is_joined: bool = False
    has_shared: bool = False
    gates_shared: bool = True
    has_preference: bool = False
    first_layer: int = 0


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """Sizes of a model, `max_positions` of its context, its constants; the rest is as a Llama has it unless given.

    `rotary_dim`: the first of a head's values, which are rotated, where these are not all; `rope_divisors` of the
    rotary frequencies [rotary_dim / 2], `long_divisors` where there are more positions than `trained_positions`;
    `rope_scale` of cosines and sines; layers in `windowed_layers` see the last `window` tokens, and rotate by
    `window_rope_theta`, undivided, where that is given, heads of `window_head_dim` where these differ; `biases`: the
    products that have one, such as "q_proj"; `fused`: those that are one, "gate_up_proj" or "qkv_proj";
    `has_head_norms` of queries and keys, `has_wide_norms` of those of all heads at once; `has_pre_norms` and
    `has_post_norms`: inputs and results of attention and feed-forward are normed; `logit_cap`: logits are cap *
    tanh(logits / cap), and so are scores with `attention_cap`; `attention_growth`: scores are 1 + growth * log(n) times
    as large in the n-th stretch of `trained_positions`; `residual_scale`: of what a layer adds; `has_sinks`: each head
    has a score without a value; `experts`: instead of one feed-forward.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    norm_epsilon: float
    rope_theta: float
    rotary_dim: int | None = None
    rope_divisors: tuple[float, ...] = ()
    long_divisors: tuple[float, ...] = ()
    trained_positions: int = 0
    rope_scale: float = 1.0
    window: int = -1
    windowed_layers: frozenset[int] = frozenset()
    window_rope_theta: float | None = None
    window_head_dim: int | None = None
    unrotated_layers: frozenset[int] = frozenset()
    biases: frozenset[str] = frozenset()
    fused: Set[str] = frozenset()
    has_head_norms: bool = False
    has_wide_norms: bool = False
    has_pre_norms: bool = True
    has_post_norms: bool = False
    activation: Literal["silu", "gelu"] = "silu"
    attention_scale: float | None = None
    attention_cap: float = 0.0
    attention_growth: float = 0.0
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    logit_cap: float | None = None
    has_sinks: bool = False
    experts: Experts | None = None

    @property
    def num_rotated(self) -> int:
        """How many of a head's values are rotated."""
        return self.rotary_dim or self.head_dim

    @property
    def is_rotated(self) -> bool:
        """Whether any layer has rotary positions."""
        return not self.unrotated_layers.issuperset(range(self.num_layers))

    @property
    def has_window_tables(self) -> bool:
        """Whether windowed layers have rotary tables of their own."""
        return bool(self.windowed_layers) and self.window_rope_theta is not None

    def for_window(self) -> Self:
        """The same with the rotary settings of windowed layers."""
        theta, head_dim = self.window_rope_theta or self.rope_theta, self.window_head_dim or self.head_dim
        return replace(self, rope_theta=theta, rope_divisors=(), rope_scale=1.0, head_dim=head_dim)
