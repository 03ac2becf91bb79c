"""Medusa and EAGLE heads in torch, with their products in bfloat16, and the loss they learn by.

Parameters have the names of a heads file; the inference code is in `edgespec.drafters`. Only drafts that begin in the
answers are computed: of the prompts the keys and values, which drafts look at.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from edgespec.formats.onnx.llama_config import LlamaConfig
from trainlib.llama import UNSEEN, rotated

CHUNKS = {"cpu": 128, "cuda": 8192}  # rows whose logits fit the cache of a CPU, or are enough for a GPU


class Heads(nn.Module, ABC):
    """Heads on a frozen target. `num_inputs`: states of other layers that they read, fused by `project`.

    `rows` [m, hidden]: those of the target's head for `token_ids` [m], the draft vocabulary. A row, scaled to unit
    size, is also the embedding of its token; other tokens have a zero embedding.
    """

    def __init__(self, config: LlamaConfig, rows: Tensor, token_ids: Tensor, num_inputs: int) -> None:
        super().__init__()
        self.config, self.num_inputs, width = config, num_inputs, config.hidden_size
        slots = torch.full((config.vocab_size,), len(token_ids), device=rows.device)
        slots[token_ids] = torch.arange(len(token_ids), device=rows.device)
        unit = rows.float() / rows.float().pow(2).mean().sqrt()
        self.register_buffer("slots", slots, persistent=False)
        self.register_buffer("inputs", torch.cat((unit, unit.new_zeros(1, width))), persistent=False)
        if num_inputs:
            self.project = nn.Parameter(torch.cat((torch.zeros(width, num_inputs * width), torch.eye(width)), dim=1))

    def embed(self, token_ids: Tensor) -> Tensor:
        found: Tensor = F.embedding(self.slots[token_ids], self.inputs)
        return found

    def fused(self, features: Tensor) -> Tensor:
        return product(features, self.project) if self.num_inputs else features

    @abstractmethod
    def drafts(self, features: Tensor, ids: Tensor, firsts: Tensor, count: int, depth: int) -> Iterator[Tensor]:
        """For k = 0..depth-1 the states [texts, count, hidden] of `count` drafts; a text's first begins at `firsts`.

        `features` [texts, n, ...], `ids` [texts, n + 1], `firsts` [texts]. Draft j of a text begins with its pair
        firsts + j, a state and the token behind it; its k-th state is that before token k + 2 behind the pair's state.
        Earlier tokens of a draft are taken from the text. Drafts that reach over a text's end are of no use.
        """

    @staticmethod
    def _begins(firsts: Tensor, count: int, pairs: int) -> Tensor:
        found: Tensor = (firsts[:, None] + torch.arange(count, device=firsts.device)).clamp(max=pairs - 1)
        return found


class MedusaHeads(Heads):
    """Medusa (arXiv 2401.10774): one head per drafted token, each a stack of `blocks` blocks x + SiLU(W x + b).

    Unlike Medusa, the first block also reads the token behind the state, as in Hydra (arXiv 2402.05109): above
    temperature 0, the state does not determine which token was sampled.
    """

    def __init__(
        self, config: LlamaConfig, rows: Tensor, token_ids: Tensor, num_inputs: int, depth: int, blocks: int = 1
    ) -> None:
        super().__init__(config, rows, token_ids, num_inputs)
        self.blocks, width = blocks, config.hidden_size
        sizes = [2 * width if place % blocks == 0 else width for place in range(depth * blocks)]
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(width, size)) for size in sizes)
        self.biases = nn.ParameterList(nn.Parameter(torch.zeros(width)) for _ in sizes)
        self.to(rows.device)

    def drafts(self, features: Tensor, ids: Tensor, firsts: Tensor, count: int, depth: int) -> Iterator[Tensor]:
        begins = self._begins(firsts, count, features.shape[1] - 1)
        states = self.fused(features.gather(1, begins[..., None].expand(-1, -1, features.shape[-1])))
        first = torch.cat((states, self.embed(ids.gather(1, begins + 1))), dim=-1)
        for head in range(min(depth, len(self.weights) // self.blocks)):
            found = states
            for block in range(self.blocks):
                place = head * self.blocks + block
                found = found + F.silu(product(found if block else first, self.weights[place]) + self.biases[place])
            yield found


class EagleHead(Heads):
    """EAGLE (arXiv 2401.15077): one Llama layer over (state, next token) predicts the next state, autoregressively.

    Predicted states are fed back (training-time test of EAGLE-3, arXiv 2503.01840): step k of a draft attends to the
    target's pairs up to the one that it begins with, and to its own steps.
    """

    def __init__(self, config: LlamaConfig, rows: Tensor, token_ids: Tensor, num_inputs: int, ffn: int) -> None:
        super().__init__(config, rows, token_ids, num_inputs)
        width, size = config.hidden_size, config.head_dim
        self.fc = _matrix(width, 2 * width)
        self.attention_norm, self.mlp_norm, self.norm = (nn.Parameter(torch.ones(width)) for _ in range(3))
        self.q_proj = _matrix(config.num_heads * size, width)
        self.k_proj, self.v_proj = (_matrix(config.num_kv_heads * size, width) for _ in range(2))
        self.o_proj = _matrix(width, config.num_heads * size, 0.1)
        self.gate_proj, self.up_proj = (_matrix(ffn, width) for _ in range(2))
        self.down_proj = _matrix(width, ffn, 0.1)
        half = torch.arange(0, size, 2, dtype=torch.float32, device=rows.device)
        self._frequencies = config.rope_theta ** -(half / size)
        self.to(rows.device)

    def drafts(self, features: Tensor, ids: Tensor, firsts: Tensor, count: int, depth: int) -> Iterator[Tensor]:
        pairs = features.shape[1] - 1
        begins = self._begins(firsts, count, pairs)
        found = self.fused(features[:, :pairs])
        x = self._combined(found, ids[:, 1 : pairs + 1])
        normed, every = self._rms(x, self.attention_norm), torch.arange(pairs, device=ids.device)[None]
        keys, values = [self._keys(normed, every)], [self._shared(self._split(normed, self.v_proj))]
        x = x.gather(1, begins[..., None].expand(-1, -1, x.shape[-1]))
        for step in range(depth):
            places = begins + step
            if step:
                x = self._combined(found, ids.gather(1, (places + 1).clamp(max=ids.shape[1] - 1)))
            normed = self._rms(x, self.attention_norm)
            if step:
                keys.append(self._keys(normed, places))
                values.append(self._shared(self._split(normed, self.v_proj)))
            queries = rotated(self._split(normed, self.q_proj), *self._angles(places))
            x = x + product(_attended(queries, keys, values, begins), self.o_proj)
            normed = self._rms(x, self.mlp_norm)
            inner = F.silu(_bf16(normed, self.gate_proj)) * _bf16(normed, self.up_proj)
            found = self._rms(x + product(inner, self.down_proj), self.norm)
            yield found

    def _combined(self, states: Tensor, token_ids: Tensor) -> Tensor:
        return product(torch.cat((states, self.embed(token_ids)), dim=-1), self.fc)

    def _keys(self, normed: Tensor, places: Tensor) -> Tensor:
        return self._shared(rotated(self._split(normed, self.k_proj), *self._angles(places)))

    def _split(self, x: Tensor, weight: Tensor) -> Tensor:
        return product(x, weight).view(*x.shape[:2], -1, self.config.head_dim).transpose(1, 2)

    def _shared(self, x: Tensor) -> Tensor:
        return x.repeat_interleave(self.config.num_heads // self.config.num_kv_heads, dim=1)

    def _rms(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x.float(), (x.shape[-1],), weight, self.config.norm_epsilon)

    def _angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Of `positions` [texts or 1, n], for all heads."""
        angles = (positions.float()[..., None] * self._frequencies)[:, None]
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos(), angles.sin()


def _attended(queries: Tensor, keys: list[Tensor], values: list[Tensor], begins: Tensor) -> Tensor:
    """Of drafts that begin with the pairs `begins` [texts, count]: those up to there, and one key of each later step.

    In bfloat16, of which softmax takes its sums in float32: scores in float32 would be most of a step's time.
    """
    batch, _, count, size = queries.shape
    pairs, queries = keys[0].shape[2], (queries / math.sqrt(size)).bfloat16()
    scores = queries @ keys[0].bfloat16().transpose(2, 3)
    later = torch.arange(pairs, device=queries.device) > begins[:, None, :, None]
    own = [(queries * key).sum(dim=-1, keepdim=True).bfloat16() for key in keys[1:]]
    shares = torch.cat((scores.masked_fill(later, UNSEEN), *own), dim=-1).softmax(dim=-1)
    mixed = (shares[..., :pairs] @ values[0].bfloat16()).float()
    for place, value in enumerate(values[1:], pairs):
        mixed = mixed + shares[..., place : place + 1] * value
    return mixed.transpose(1, 2).reshape(batch, count, -1)


class Distance(torch.autograd.Function):
    """(loss, total variation) of `states` [n, hidden], sums over n: `share` of cross-entropy, the rest total variation.

    `rows` [m, hidden] of the target's head; `wanted` [n, m]: the target's probabilities among these tokens. With q the
    softmax of the logits and s the signs of q - p, their gradients are q - p and q (s - q.s) / 2.
    """

    @staticmethod
    def forward(ctx: Any, states: Tensor, rows: Tensor, wanted: Tensor, share: float) -> tuple[Tensor, Tensor]:
        gradient = torch.empty_like(states)
        entropy, variation = states.new_zeros(()), states.new_zeros(())
        size = CHUNKS[states.device.type]
        for begin in range(0, len(states), size):
            chunk = slice(begin, begin + size)
            logits, expected = F.linear(states[chunk].bfloat16(), rows).float(), wanted[chunk].float()
            logits -= logits.logsumexp(dim=-1, keepdim=True)
            entropy -= (expected * logits).sum()
            drafted = logits.exp_()
            signs = (drafted - expected).sign_()
            toward = (drafted * signs).sum(dim=-1, keepdim=True)
            variation += 0.5 * (toward.sum() - (expected * signs).sum())
            half = 0.5 * (1 - share)
            by_logit = drafted * (signs * half + (share - half * toward)) - share * expected
            gradient[chunk] = (by_logit.bfloat16() @ rows).float()
        ctx.save_for_backward(gradient)
        return share * entropy + (1 - share) * variation, variation

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.saved_tensors[0] * given[0], None, None, None


def product(x: Tensor, weight: Tensor) -> Tensor:
    return _bf16(x, weight).float()


def _bf16(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x.bfloat16(), weight.bfloat16())


def _matrix(outputs: int, inputs: int, scale: float = 0.5) -> nn.Parameter:
    return nn.Parameter(torch.randn(outputs, inputs) * scale / math.sqrt(inputs))
