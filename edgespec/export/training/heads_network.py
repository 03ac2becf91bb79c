"""Medusa and EAGLE heads on the last hidden state of a frozen target, in torch, for training only.

Both read the state of a token and the next token, and use the target's output head, cut down to the draft vocabulary.
Root i of a row of text is the draft that begins after token i + 1: its inputs are state i and token i + 1, and its k-th
token (from 0) is trained to be token i + 2 + k. The inference code is in `edgespec.drafters`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from edgespec.export.training.students import StudentShape

NORM_EPS = 1e-5


class DraftVocabulary(nn.Module):
    """The draft vocabulary: rows `weight` [m, hidden] of the target's head for `token_ids` [m]; `scale` of logits.

    A row, scaled to unit size, is also the input embedding of its token; other tokens have a zero embedding.
    """

    def __init__(self, head: Tensor, token_ids: Tensor, scale: float) -> None:
        super().__init__()
        rows = head[token_ids].float()
        self.size = 1.0 / float(rows.pow(2).mean().sqrt())
        self.scale = scale
        slots = torch.full((len(head),), len(token_ids), device=head.device)
        slots[token_ids] = torch.arange(len(token_ids), device=head.device)
        # These belong to the target and are not saved with the heads.
        self.register_buffer("token_ids", token_ids, persistent=False)
        self.register_buffer("weight", rows, persistent=False)
        self.register_buffer("inputs", torch.cat((rows * self.size, rows.new_zeros(1, rows.shape[1]))), False)
        self.register_buffer("slots", slots, persistent=False)

    def embed(self, token_ids: Tensor) -> Tensor:
        """Input embeddings [..., hidden] of `token_ids` [...]."""
        return F.embedding(self.slots[token_ids], self.inputs)

    def logits(self, states: Tensor) -> Tensor:
        """Logits [..., m] of predicted states [..., hidden]."""
        return F.linear(states, self.weight) * self.scale


class Heads(nn.Module, ABC):
    """Base class of both kinds of heads. `depth`: number of tokens to draft.

    `num_inputs` states of other layers, of unit size, precede the last one in what they read; `project` fuses them.
    """

    def __init__(self, vocabulary: DraftVocabulary, depth: int, num_inputs: int = 0) -> None:
        super().__init__()
        self.vocabulary, self.depth, self.num_inputs = vocabulary, depth, num_inputs
        if num_inputs:
            width = vocabulary.weight.shape[1]
            self.project = nn.Parameter(torch.cat((torch.zeros(width, num_inputs * width), torch.eye(width)), dim=1))

    @property
    def device(self) -> torch.device:
        return self.vocabulary.weight.device

    def drafts(self, states: Tensor, token_ids: Tensor) -> Iterator[Tensor]:
        """For k = 0..depth-1, the predicted states [batch, length - 2 - k, hidden] of all roots with a k-th token.

        `states` [batch, length, all inputs]: the target's; `token_ids` [batch, length]. Earlier tokens of a draft are
        taken from the text (teacher forcing).
        """
        return self.drafts_from(F.linear(states, self.project) if self.num_inputs else states, token_ids)

    @abstractmethod
    def drafts_from(self, states: Tensor, token_ids: Tensor) -> Iterator[Tensor]:
        """The same as `drafts`, from fused states [batch, length, hidden]."""


class MedusaHeads(Heads):
    """Medusa (arXiv 2401.10774): one head per drafted token, each a stack of `blocks` blocks x + SiLU(W x + b).

    Unlike Medusa, the first block also reads the token after the state, as in Hydra (arXiv 2402.05109): above
    temperature 0, the state does not determine which token was sampled.
    """

    def __init__(self, vocabulary: DraftVocabulary, depth: int, blocks: int, num_inputs: int = 0) -> None:
        super().__init__(vocabulary, depth, num_inputs)
        width = vocabulary.weight.shape[1]
        self.weights = nn.ParameterList()
        self.biases = nn.ParameterList()
        for _ in range(depth):
            for block in range(blocks):
                self.weights.append(nn.Parameter(torch.zeros(width, 2 * width if block == 0 else width)))
                self.biases.append(nn.Parameter(torch.zeros(width)))
        self.blocks = blocks

    def drafts_from(self, states: Tensor, token_ids: Tensor) -> Iterator[Tensor]:
        states, following = states[:, :-1], self.vocabulary.embed(token_ids[:, 1:])
        first = torch.cat((states, following), dim=-1)
        for index in range(self.depth):
            found = states
            for block in range(self.blocks):
                place = index * self.blocks + block
                given = first if block == 0 else found
                found = found + F.silu(F.linear(given, self.weights[place], self.biases[place]))
            yield found[:, : found.shape[1] - 1 - index]


class EagleHead(Heads):
    """EAGLE (arXiv 2401.15077): one Llama layer over (state, next token) predicts the next state, autoregressively.

    Training feeds back predicted states (training-time test of EAGLE-3, arXiv 2503.01840): step k of root i attends to
    the target's pairs up to i and to its own steps 1..k.
    """

    def __init__(
        self, vocabulary: DraftVocabulary, depth: int, shape: StudentShape, rope_theta: float, num_inputs: int = 0
    ) -> None:
        super().__init__(vocabulary, depth, num_inputs)
        width, head = shape.hidden, shape.head_dim
        self.shape, self.rope_theta = shape, rope_theta
        self.fc = nn.Linear(2 * width, width, bias=False)
        self.attention_norm = nn.Parameter(torch.ones(width))
        self.q_proj = nn.Linear(width, shape.heads * head, bias=False)
        self.k_proj = nn.Linear(width, shape.kv_heads * head, bias=False)
        self.v_proj = nn.Linear(width, shape.kv_heads * head, bias=False)
        self.o_proj = nn.Linear(shape.heads * head, width, bias=False)
        self.mlp_norm = nn.Parameter(torch.ones(width))
        self.gate_proj = nn.Linear(width, shape.ffn, bias=False)
        self.up_proj = nn.Linear(width, shape.ffn, bias=False)
        self.down_proj = nn.Linear(shape.ffn, width, bias=False)
        self.norm = nn.Parameter(torch.ones(width))
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.5 / math.sqrt(module.in_features))

    def drafts_from(self, states: Tensor, token_ids: Tensor) -> Iterator[Tensor]:
        roots = states.shape[1] - 2
        found = states[:, :-1]
        keys: list[Tensor] = []
        values: list[Tensor] = []
        for step in range(self.depth):
            count = roots - step if step else roots + 1  # the last pair is only attended to
            pairs = torch.cat(
                (found[:, :count], self.vocabulary.embed(token_ids[:, 1 + step : 1 + step + count])), dim=-1
            )
            found = self._layer(self.fc(pairs), step, keys, values)
            yield found[:, : roots - step]

    def _layer(self, x: Tensor, step: int, keys: list[Tensor], values: list[Tensor]) -> Tensor:
        """The states predicted by step `step` of every root; appends its keys and values to those of earlier steps."""
        batch, count, _ = x.shape
        shape = self.shape
        normed = _rms(x, self.attention_norm)

        def heads(y: Tensor, number: int) -> Tensor:
            return y.view(batch, count, number, shape.head_dim).transpose(1, 2)

        cos, sin = self._rope(torch.arange(step, step + count, device=x.device))
        q = _rotate(heads(self.q_proj(normed), shape.heads), cos, sin)
        groups = shape.heads // shape.kv_heads
        keys.append(_rotate(heads(self.k_proj(normed), shape.kv_heads), cos, sin).repeat_interleave(groups, dim=1))
        values.append(heads(self.v_proj(normed), shape.kv_heads).repeat_interleave(groups, dim=1))
        mixed = _attend(q, keys, values)
        x = x + self.o_proj(mixed.transpose(1, 2).reshape(batch, count, -1))
        normed = _rms(x, self.mlp_norm)
        x = x + self.down_proj(F.silu(self.gate_proj(normed)) * self.up_proj(normed))
        return _rms(x, self.norm)

    def _rope(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        half = torch.arange(0, self.shape.head_dim, 2, dtype=torch.float32, device=positions.device)
        angles = positions.float()[:, None] * (self.rope_theta ** -(half / self.shape.head_dim))[None, :]
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos(), angles.sin()


def _attend(q: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    """Attention of q [batch, heads, n, size]: causal over the first step's keys, plus one key of each later step."""
    count = q.shape[2]
    if len(keys) == 1:
        return F.scaled_dot_product_attention(q, keys[0], values[0], is_causal=True)
    q = q / math.sqrt(q.shape[3])
    scores = q @ keys[0][:, :, :count].transpose(2, 3)
    hidden = torch.ones(count, count, dtype=torch.bool, device=q.device).triu(1)
    own = [(q * key[:, :, :count]).sum(dim=-1, keepdim=True) for key in keys[1:]]
    shares = torch.cat((scores.masked_fill(hidden, -torch.inf), *own), dim=-1).softmax(dim=-1)
    mixed = shares[..., :count] @ values[0][:, :, :count]
    for place, value in enumerate(values[1:]):
        mixed = mixed + shares[..., count + place : count + place + 1] * value[:, :, :count]
    return mixed


def _rms(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x.float(), (x.shape[-1],), weight, NORM_EPS)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin
