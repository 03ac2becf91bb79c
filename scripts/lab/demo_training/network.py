"""A small Llama in torch, for training only: the run-time engines never import it.

Parameter names are those of Hugging Face's `LlamaForCausalLM`, so `state_dict()` is a checkpoint as it stands.
Two things are here that a plain Llama lacks, both from LayerSkip (arXiv 2404.16710): layer dropout whose rate
rises with depth, and the hidden state after any layer, so that a loss can be put on an early exit.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# One compiled variant per batch shape; a run has about ten shapes (curriculum, evaluation, halves).
torch._dynamo.config.recompile_limit = 64

NORM_EPS = 1e-5


@dataclass(frozen=True)
class NetworkShape:
    """Sizes of one network; the embedding is tied to the output head."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int = 64
    rope_theta: float = 10000.0

    def hf_config(self, context_length: int, special_ids: dict[str, int]) -> dict[str, Any]:
        """The `config.json` of the same network for transformers and every converter."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": context_length,
            "rms_norm_eps": NORM_EPS,
            "rope_theta": self.rope_theta,
            "tie_word_embeddings": True,
            "attention_bias": False,
            "mlp_bias": False,
            "torch_dtype": "float16",
            **special_ids,
        }

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), (x.shape[-1],), self.weight, self.eps).to(x.dtype)


def rope_tables(shape: NetworkShape, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines [positions, head_dim] in Hugging Face's half-split order."""
    half = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
    angles = positions.float()[:, None] * (shape.rope_theta**-half)[None, :]
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate [batch, heads, length, head_dim] by the tables of its positions."""
    first, second = x.chunk(2, dim=-1)
    return x * cos.to(x.dtype) + torch.cat((-second, first), dim=-1) * sin.to(x.dtype)


class Attention(nn.Module):
    def __init__(self, shape: NetworkShape) -> None:
        super().__init__()
        width, head = shape.hidden_size, shape.head_dim
        self.shape = shape
        self.q_proj = nn.Linear(width, shape.num_heads * head, bias=False)
        self.k_proj = nn.Linear(width, shape.num_kv_heads * head, bias=False)
        self.v_proj = nn.Linear(width, shape.num_kv_heads * head, bias=False)
        self.o_proj = nn.Linear(shape.num_heads * head, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, past: list[Tensor] | None) -> Tensor:
        batch, length, _ = x.shape

        def heads(y: Tensor, count: int) -> Tensor:
            return y.view(batch, length, count, self.shape.head_dim).transpose(1, 2)

        q = rotate(heads(self.q_proj(x), self.shape.num_heads), cos, sin)
        k = rotate(heads(self.k_proj(x), self.shape.num_kv_heads), cos, sin)
        v = heads(self.v_proj(x), self.shape.num_kv_heads)
        if past is not None:
            if past:
                k, v = torch.cat((past[0], k), dim=2), torch.cat((past[1], v), dim=2)
            past[:] = [k, v]
        groups = self.shape.num_heads // self.shape.num_kv_heads
        k, v = (t.repeat_interleave(groups, dim=1) for t in (k, v))
        causal = k.shape[2] == length
        out = F.scaled_dot_product_attention(q, k, v, is_causal=causal and length > 1)
        return self.o_proj(out.transpose(1, 2).reshape(batch, length, -1))


class MLP(nn.Module):
    def __init__(self, shape: NetworkShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, shape: NetworkShape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size, NORM_EPS)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, NORM_EPS)
        self.mlp = MLP(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, past: list[Tensor] | None = None) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, past)
        return x + self.mlp(self.post_attention_layernorm(x))


class Backbone(nn.Module):
    def __init__(self, shape: NetworkShape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_layers))
        self.norm = RMSNorm(shape.hidden_size, NORM_EPS)


@torch.compile(dynamic=False)
def head_loss(hidden: Tensor, norm_weight: Tensor, embedding: Tensor, target_ids: Tensor) -> Tensor:
    """Final norm, head and cross-entropy in one compiled piece: the fp32 logits are never stored twice."""
    x = F.rms_norm(hidden.float(), (hidden.shape[-1],), norm_weight, NORM_EPS).to(torch.bfloat16)
    logits = F.linear(x, embedding.to(torch.bfloat16)).float()
    return F.cross_entropy(logits.flatten(0, 1), target_ids.flatten())


class Network(nn.Module):
    """Causal language model; `hidden` and `logits` are separate so that early exits share the head."""

    def __init__(self, shape: NetworkShape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Backbone(shape)
        self.apply(self._initialise)
        residual_std = 0.02 / math.sqrt(2 * shape.num_layers)
        for name, weight in self.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                nn.init.normal_(weight, std=residual_std)

    @staticmethod
    def _initialise(module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)

    def hidden(
        self,
        token_ids: Tensor,
        *,
        exit_layer: int | None = None,
        kept_layers: list[bool] | None = None,
        past: list[list[Tensor]] | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Final hidden states [batch, length, hidden] of `token_ids` [batch, length], and those after `exit_layer`.

        `kept_layers` is this step's layer dropout; `past` is one KV list per layer, filled in place (decoding).
        """
        start = past[0][0].shape[2] if past and past[0] else 0
        cos, sin = rope_tables(self.shape, torch.arange(start, start + token_ids.shape[1]))
        x = self.model.embed_tokens(token_ids)
        early = None
        for index, layer in enumerate(self.model.layers):
            if kept_layers is None or kept_layers[index]:
                x = layer(x, cos, sin, past[index] if past is not None else None)
            if exit_layer is not None and index + 1 == exit_layer:
                early = x
        return x, early

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores [..., vocab] of hidden states [..., hidden] through the shared final norm and head."""
        return F.linear(self.model.norm(hidden), self.model.embed_tokens.weight)

    def forward(self, token_ids: Tensor) -> Tensor:
        return self.logits(self.hidden(token_ids)[0])

    def cross_entropy(self, hidden: Tensor, target_ids: Tensor) -> Tensor:
        """Mean loss in nats of hidden states [batch, length, hidden] against `target_ids` [batch, length]."""
        return head_loss(hidden, self.model.norm.weight, self.model.embed_tokens.weight, target_ids)

    def compile_layers(self) -> None:
        """Compile layer by layer, since layer dropout changes the whole graph at every step (1.4x on two cores)."""
        for layer in self.model.layers:
            layer.compile(dynamic=False)

    def parameter_count(self) -> int:
        return sum(weight.numel() for weight in self.parameters())
