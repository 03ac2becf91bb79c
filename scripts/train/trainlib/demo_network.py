"""The demo family's target: a small Llama in torch and its training from scratch with LayerSkip's recipe.

Parameter names are those of Hugging Face's `LlamaForCausalLM`, so `state_dict()` is a checkpoint as it stands. A plain
Llama lacks two things of LayerSkip's (arXiv 2404.16710): layer dropout whose rate rises with depth, and the hidden
state after any layer, so that a loss can be put on an early exit.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from trainlib.optimise import Schedule, make_optimizers, save_checkpoint, update

# One compiled variant per batch shape; a run has about ten shapes (curriculum, evaluation, halves).
torch._dynamo.config.recompile_limit = 64

NORM_EPS = 1e-5
BETWEEN_SAVES_S = 240.0
TokenStream = NDArray[np.int32]


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

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape

        def heads(y: Tensor, count: int) -> Tensor:
            return y.view(batch, length, count, self.shape.head_dim).transpose(1, 2)

        q = rotate(heads(self.q_proj(x), self.shape.num_heads), cos, sin)
        k = rotate(heads(self.k_proj(x), self.shape.num_kv_heads), cos, sin)
        v = heads(self.v_proj(x), self.shape.num_kv_heads)
        groups = self.shape.num_heads // self.shape.num_kv_heads
        k, v = (t.repeat_interleave(groups, dim=1) for t in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
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

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
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
    """Causal language model whose embedding is its output head, too."""

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
        self, token_ids: Tensor, *, exit_layer: int | None = None, kept_layers: list[bool] | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Final hidden states [batch, length, hidden] of `token_ids` [batch, length], and those after `exit_layer`.

        `kept_layers` is this step's layer dropout.
        """
        cos, sin = rope_tables(self.shape, torch.arange(token_ids.shape[1]))
        x = self.model.embed_tokens(token_ids)
        early = None
        for index, layer in enumerate(self.model.layers):
            if kept_layers is None or kept_layers[index]:
                x = layer(x, cos, sin)
            if exit_layer is not None and index + 1 == exit_layer:
                early = x
        return x, early

    def forward(self, token_ids: Tensor) -> Tensor:
        """Scores [batch, length, vocab]."""
        return F.linear(self.model.norm(self.hidden(token_ids)[0]), self.model.embed_tokens.weight)

    def cross_entropy(self, hidden: Tensor, target_ids: Tensor) -> Tensor:
        """Mean loss in nats of hidden states [batch, length, hidden] against `target_ids` [batch, length]."""
        return head_loss(hidden, self.model.norm.weight, self.model.embed_tokens.weight, target_ids)

    def compile_layers(self) -> None:
        """Compile layer by layer, since layer dropout changes the whole graph at every step (1.4x on two cores)."""
        for layer in self.model.layers:
            layer.compile(dynamic=False)


@dataclass(frozen=True)
class BatchSchedule(Schedule):
    """Learning rates, and what a batch holds; lengths in tokens."""

    batch_tokens: int = 8192
    # (fraction of the run, sequence length): attention is a third of the time, so short windows come first
    lengths: tuple[tuple[float, int], ...] = ((0.65, 512), (0.92, 1024), (1.0, 2048))
    max_layer_dropout: float = 0.1
    early_exit_weight: float = 0.3

    def length_at(self, tokens_seen: int) -> int:
        """Length of the windows after `tokens_seen` tokens."""
        progress = tokens_seen / self.total_tokens
        return next((length for end, length in self.lengths if progress < end), self.lengths[-1][1])


def layer_dropout_rates(num_layers: int, maximum: float) -> list[float]:
    """LayerSkip eq. 2: exponentially rising from 0 at the first layer to `maximum` at the last."""
    scale = math.log(2) / (num_layers - 1)
    return [maximum * (math.exp(index * scale) - 1) for index in range(num_layers)]


class DocumentSampler:
    """Endless shuffled epochs over documents of token ids; domains are repeated by weight.

    Every batch is a function of (seed, position), and position is the only state, so a resumed run sees what an
    uninterrupted one would have seen.
    """

    def __init__(self, documents: list[TokenStream], seed: int) -> None:
        self.documents = documents
        self.seed = seed
        self.position = 0
        self._epoch = -1
        self._stream: TokenStream = np.empty(0, np.int32)
        self._epoch_length = sum(len(d) for d in documents)

    def _load_epoch(self, epoch: int) -> None:
        order = np.random.default_rng([self.seed, epoch]).permutation(len(self.documents))
        self._stream = np.concatenate([self.documents[i] for i in order])
        self._epoch = epoch

    def batch(self, rows: int, length: int) -> Tensor:
        """Token ids [rows, length + 1]; inputs and targets overlap by one."""
        needed = rows * length + 1
        epoch, offset = divmod(self.position, self._epoch_length)
        if offset + needed > self._epoch_length:
            epoch, offset = epoch + 1, 0
            self.position = epoch * self._epoch_length
        if epoch != self._epoch:
            self._load_epoch(epoch)
        flat = torch.from_numpy(self._stream[offset : offset + needed].astype(np.int64))
        self.position += rows * length
        return torch.stack([flat[r * length : (r + 1) * length + 1] for r in range(rows)])


def split_documents(stream: TokenStream, bos_id: int) -> list[TokenStream]:
    """Cut one stream into its documents, each beginning with `bos_id`."""
    starts = np.flatnonzero(stream == bos_id)
    return np.split(stream, starts[1:])


def training_loss(
    network: Network, batch: Tensor, schedule: BatchSchedule, step: int, rng: random.Random
) -> tuple[Tensor, Tensor]:
    """(total, final-layer) cross-entropy in nats per token; one early exit a step, by turns, on a quarter of rows."""
    inputs, targets = batch[:, :-1], batch[:, 1:]
    rates = layer_dropout_rates(network.shape.num_layers, schedule.max_layer_dropout)
    kept = [rng.random() >= rate for rate in rates]
    exit_layer = 1 + step % (network.shape.num_layers - 1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden, early = network.hidden(inputs, exit_layer=exit_layer, kept_layers=kept)
    main = network.cross_entropy(hidden, targets)
    rows = max(1, len(batch) // 4)
    assert early is not None
    side = network.cross_entropy(early[:rows], targets[:rows])
    depth_weight = exit_layer / network.shape.num_layers
    return main + schedule.early_exit_weight * depth_weight * side, main.detach()


@torch.no_grad()
def held_out_loss(network: Network, stream: TokenStream, length: int = 1024, max_rows: int = 32) -> float:
    """Mean cross-entropy in nats per token over the first `max_rows` windows of a held-out stream."""
    losses = []
    for start in range(0, min(len(stream) - length - 1, max_rows * length), length):
        window = torch.from_numpy(stream[start : start + length + 1].astype(np.int64))[None]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            hidden, _ = network.hidden(window[:, :-1])
        losses.append(network.cross_entropy(hidden, window[:, 1:]).item())
    return float(np.mean(losses))


def pretrain(
    shape: NetworkShape,
    documents: list[TokenStream],
    held_out: dict[str, TokenStream],
    schedule: BatchSchedule,
    work: Path,
    seed: int,
    *,
    start: Mapping[str, Tensor] | None = None,
) -> Network:
    """Train a network from scratch, or go on from `work/target.pt`; returns it when `total_tokens` are seen.

    `start`: weights to begin with in the place of random ones.
    """
    torch.manual_seed(seed)
    network = Network(shape)
    if start is not None:
        network.load_state_dict(start)
    network.compile_layers()
    optimizers = make_optimizers(network, schedule)
    sampler = DocumentSampler(documents, seed)
    checkpoint = work / "target.pt"
    tokens_seen = step = 0
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        network.load_state_dict(state["network"])
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        sampler.position, tokens_seen, step = state["position"], state["tokens_seen"], state["step"]

    def save() -> None:
        state = {
            "network": network.state_dict(),
            "optimizers": [o.state_dict() for o in optimizers],
            "position": sampler.position,
            "tokens_seen": tokens_seen,
            "step": step,
        }
        save_checkpoint(state, checkpoint)

    last_save, running = time.monotonic(), 0.0
    while tokens_seen < schedule.total_tokens:
        length = schedule.length_at(tokens_seen)
        batch = sampler.batch(schedule.batch_tokens // length, length)
        total, main = training_loss(network, batch, schedule, step, random.Random(seed * 1_000_003 + step))
        total.backward()
        update(network, optimizers, schedule.rate_factor(tokens_seen))
        step += 1
        tokens_seen += batch.numel() - len(batch)
        running = main.item() if step == 1 else 0.95 * running + 0.05 * main.item()
        if time.monotonic() - last_save > BETWEEN_SAVES_S or tokens_seen >= schedule.total_tokens:
            save()
            losses = {domain: round(held_out_loss(network, stream), 4) for domain, stream in held_out.items()}
            print(f"{tokens_seen} tokens, loss {running:.4f}, held out {losses}", flush=True)
            last_save = time.monotonic()
    return network
