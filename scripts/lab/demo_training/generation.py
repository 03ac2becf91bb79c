"""Batched sampling from a `Network` with a preallocated KV cache: the text on which students are distilled."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from demo_training.network import Network, rope_tables, rotate
from edgespec.export.training.writing import sample


class BatchDecoder:
    """Keys and values [rows, kv_heads, capacity, head_dim] per layer, bfloat16, for rows of equal length."""

    def __init__(self, network: Network, rows: int, capacity: int) -> None:
        shape = network.shape
        self.network = network
        self.length = 0
        size = (shape.num_layers, 2, rows, shape.num_kv_heads, capacity, shape.head_dim)
        self._cache = torch.zeros(size, dtype=torch.bfloat16)
        self._cos, self._sin = rope_tables(shape, torch.arange(capacity))

    def _attend(self, index: int, x: Tensor) -> Tensor:
        shape, layer = self.network.shape, self.network.model.layers[index].self_attn
        rows, new, _ = x.shape
        end = self.length + new
        cos, sin = self._cos[self.length : end], self._sin[self.length : end]

        def heads(y: Tensor, count: int) -> Tensor:
            return y.view(rows, new, count, shape.head_dim).transpose(1, 2)

        q = rotate(heads(layer.q_proj(x), shape.num_heads), cos, sin).to(torch.bfloat16)
        keys, values = self._cache[index]
        keys[:, :, self.length : end] = rotate(heads(layer.k_proj(x), shape.num_kv_heads), cos, sin)
        values[:, :, self.length : end] = heads(layer.v_proj(x), shape.num_kv_heads)
        keys, values = keys[:, :, :end], values[:, :, :end]
        groups = shape.num_heads // shape.num_kv_heads
        if new == 1:  # the heads of a group become query rows: nothing is repeated in memory
            out = F.scaled_dot_product_attention(q.view(rows, shape.num_kv_heads, groups, -1), keys, values)
            return layer.o_proj(out.reshape(rows, 1, -1))
        assert self.length == 0, "several tokens at once are a prefill"
        keys, values = keys.repeat_interleave(groups, dim=1), values.repeat_interleave(groups, dim=1)
        out = F.scaled_dot_product_attention(q, keys, values, is_causal=True)
        return layer.o_proj(out.transpose(1, 2).reshape(rows, new, -1))

    def step(self, token_ids: Tensor) -> Tensor:
        """Append `token_ids` [rows, n] (n > 1 only at the start); returns float32 logits [rows, vocab] of the last."""
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = self.network.model.embed_tokens(token_ids)
            for index, layer in enumerate(self.network.model.layers):
                x = x + self._attend(index, layer.input_layernorm(x))
                x = x + layer.mlp(layer.post_attention_layernorm(x))
            self.length += token_ids.shape[1]
            return self.network.logits(x[:, -1]).float()


@torch.no_grad()
def generate(network: Network, prompts: Tensor, length: int, temperatures: Tensor, seed: int) -> Tensor:
    """Continue `prompts` [rows, n] to [rows, length], each row at its own temperature. Documents follow each other."""
    generator = torch.Generator().manual_seed(seed)
    rows, start = prompts.shape
    decoder = BatchDecoder(network, rows, length)
    token_ids = torch.empty((rows, length), dtype=torch.int64)
    token_ids[:, :start] = prompts
    logits = decoder.step(prompts)
    for position in range(start, length):
        token_ids[:, position] = sample(logits, temperatures, generator)
        if position + 1 < length:
            logits = decoder.step(token_ids[:, position : position + 1])
    return token_ids
