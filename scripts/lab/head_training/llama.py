"""A Llama of a GGUF in torch: whole texts at once, or one step for many texts, each in a place of the KV cache."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

LEAST_SQUARE = 1e-6  # as in edgespec.drafters.states
UNSEEN = -1e9
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Sizes:
    """Of a Llama without rope scaling."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    vocabulary: int
    epsilon: float
    rope_theta: float


class Weights:
    """Matrices in `dtype`, norms in float32; queries and keys in Hugging Face's order of rotary halves."""

    def __init__(self, path: Path, dtype: torch.dtype = torch.bfloat16, device: str = "cpu") -> None:
        import gguf

        reader = gguf.GGUFReader(path)
        facts = {name: field.contents() for name, field in reader.fields.items() if name.startswith("llama.")}
        heads, hidden = int(facts["llama.attention.head_count"]), int(facts["llama.embedding_length"])
        self.sizes = Sizes(
            layers=int(facts["llama.block_count"]),
            hidden=hidden,
            heads=heads,
            kv_heads=int(facts["llama.attention.head_count_kv"]),
            head_size=int(facts.get("llama.rope.dimension_count", hidden // heads)),
            vocabulary=int(facts["llama.vocab_size"]),
            epsilon=float(facts["llama.attention.layer_norm_rms_epsilon"]),
            rope_theta=float(facts.get("llama.rope.freq_base", 10_000.0)),
        )
        self.device = torch.device(device)
        self._found = {
            tensor.name.removesuffix(".weight"): gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            for tensor in reader.tensors
        }
        self.embedding = self._matrix("token_embd", dtype)
        self.head = self._matrix("output", dtype) if "output" in self._found else self.embedding
        self.norm = self._matrix("output_norm", torch.float32)
        self.blocks = [self._block(f"blk.{index}.", dtype) for index in range(self.sizes.layers)]
        self._found.clear()

    def _block(self, prefix: str, dtype: torch.dtype) -> dict[str, Tensor]:
        sizes = self.sizes
        queries = self._halves(f"{prefix}attn_q", sizes.heads)
        keys = self._halves(f"{prefix}attn_k", sizes.kv_heads)
        together = torch.cat((queries, keys, self._matrix(f"{prefix}attn_v", torch.float32)))
        gate_up = [self._matrix(f"{prefix}ffn_{name}", dtype) for name in ("gate", "up")]
        return {
            "attention_norm": self._matrix(f"{prefix}attn_norm", torch.float32),
            "queries_keys_values": together.to(dtype),
            "mixed": self._matrix(f"{prefix}attn_output", dtype),
            "mlp_norm": self._matrix(f"{prefix}ffn_norm", torch.float32),
            "gate_up": torch.cat(gate_up),
            "down": self._matrix(f"{prefix}ffn_down", dtype),
        }

    def _matrix(self, name: str, dtype: torch.dtype) -> Tensor:
        return torch.from_numpy(np.array(self._found[name], np.float32)).to(self.device, dtype)

    def _halves(self, name: str, heads: int) -> Tensor:
        """llama.cpp interleaves the two halves of a rotary pair."""
        found, size = self._matrix(name, torch.float32), self.sizes.head_size
        return found.view(heads, size // 2, 2, -1).transpose(1, 2).reshape(heads * size, -1)


class Llama:
    """`weights` and a cache for `places` texts of up to `room` tokens.

    What heads read of a token: the inputs of `read_layers`, of unit size unless `is_scaled` is false, and its last
    state, side by side.
    """

    def __init__(
        self, weights: Weights, places: int = 0, room: int = 0, read_layers: Sequence[int] = (), is_scaled: bool = True
    ) -> None:
        sizes = weights.sizes
        self.weights, self.sizes, self.room, self.device = weights, sizes, room, weights.device
        self._read, self._is_scaled = tuple(read_layers), is_scaled
        shape = (sizes.layers, places, sizes.kv_heads, room, sizes.head_size)
        self._dtype = weights.embedding.dtype
        self._keys, self._values = (torch.zeros(shape, dtype=self._dtype, device=self.device) for _ in range(2))
        half = torch.arange(0, sizes.head_size, 2, dtype=torch.float32, device=self.device)
        self._frequencies = sizes.rope_theta ** -(half / sizes.head_size)

    @torch.no_grad()
    def read(self, token_ids: Tensor, places: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Whole texts [n, length], padded at their ends: features and states [n, length, ...].

        They are kept in the cache where `places` [n] are given.
        """
        count, length = token_ids.shape
        cos, sin = self._angles(torch.arange(length, device=self.device))

        def attend(index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k = rotated(q.transpose(1, 2), cos, sin), rotated(k.transpose(1, 2), cos, sin)
            q, k, v = q.to(self._dtype), k.to(self._dtype), v.transpose(1, 2)
            if places is not None:
                self._keys[index, places, :, :length], self._values[index, places, :, :length] = k, v
            groups = self.sizes.heads // self.sizes.kv_heads
            k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            return mixed.transpose(1, 2).reshape(count, length, -1)

        return self._run(token_ids, attend)

    @torch.no_grad()
    def step(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        """The next token [places] of every text, at `positions` [places]: its states [places, hidden]."""
        count, sizes = len(token_ids), self.sizes
        cos, sin = (table[:, None] for table in self._angles(positions))
        hidden = torch.arange(self.room, device=self.device)[None, :] > positions[:, None]
        bias = torch.zeros(hidden.shape, device=self.device).masked_fill_(hidden, UNSEEN)[:, None, None]
        every = torch.arange(count, device=self.device)

        def attend(index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = self._keys[index], self._values[index]
            keys[every, :, positions], values[every, :, positions] = rotated(k, cos, sin).to(self._dtype), v
            grouped = rotated(q, cos, sin).to(self._dtype).view(count, sizes.kv_heads, -1, sizes.head_size)
            # the whole room: a slice of the cache would be copied first
            scores = (grouped @ keys.transpose(2, 3)).float() / math.sqrt(sizes.head_size) + bias
            return (scores.softmax(dim=-1).to(self._dtype) @ values).reshape(count, -1)

        return self._run(token_ids, attend)[1]

    def logits(self, states: Tensor) -> Tensor:
        return F.linear(states.to(self._dtype), self.weights.head).float()

    def _run(self, token_ids: Tensor, attend: Attend) -> tuple[Tensor, Tensor]:
        sizes, weights = self.sizes, self.weights
        x = F.embedding(token_ids, weights.embedding).float()
        features = []
        for index, block in enumerate(weights.blocks):
            if index in self._read:
                features.append(F.rms_norm(x, (sizes.hidden,), eps=LEAST_SQUARE) if self._is_scaled else x)
            found = F.linear(self._normed(x, block["attention_norm"]), block["queries_keys_values"])
            found = found.view(*x.shape[:-1], -1, sizes.head_size)
            q, k, v = found.split((sizes.heads, sizes.kv_heads, sizes.kv_heads), dim=-2)
            x = x + F.linear(attend(index, q.float(), k.float(), v), block["mixed"]).float()
            gate, up = F.linear(self._normed(x, block["mlp_norm"]), block["gate_up"]).chunk(2, dim=-1)
            x = x + F.linear(F.silu(gate) * up, block["down"]).float()
        states = F.rms_norm(x, (sizes.hidden,), weights.norm, sizes.epsilon)
        return torch.cat((*features, states), dim=-1), states

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (self.sizes.hidden,), weight, self.sizes.epsilon).to(self._dtype)

    def _angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        angles = positions.float()[..., None] * self._frequencies
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos(), angles.sin()


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin
