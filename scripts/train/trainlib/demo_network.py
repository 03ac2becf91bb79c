"""The demo family's target: a small Llama and its training from scratch with LayerSkip's recipe.

A plain Llama lacks two things of LayerSkip's (arXiv 2404.16710): layer dropout whose rate rises with depth, and the
hidden state after any layer, so that a loss can be put on an early exit.
"""

from __future__ import annotations

import math
import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from trainlib.optimise import Schedule, make_optimizers, save_checkpoint, update

# One compiled variant per batch shape; a run has about ten shapes (curriculum, evaluation, halves).
torch._dynamo.config.recompile_limit = 64

BETWEEN_SAVES_S = 240.0
TokenStream = NDArray[np.int32]


def network_config(hidden: int, inner: int, layers: int, heads: int, kv_heads: int, **changes: Any) -> LlamaConfig:
    """A small Llama with the demo's vocabulary, whose embedding is its output head too."""
    sizes = {"vocab_size": 4096, "head_dim": 64, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5}
    return LlamaConfig(
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        tie_word_embeddings=True,
        **{**sizes, "bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 0, **changes},
    )


@torch.compile(dynamic=False)
def head_loss(hidden: Tensor, norm_weight: Tensor, epsilon: float, embedding: Tensor, target_ids: Tensor) -> Tensor:
    """Final norm, head and cross-entropy in one compiled piece: the fp32 logits are never stored twice."""
    x = F.rms_norm(hidden.float(), (hidden.shape[-1],), norm_weight, epsilon).to(torch.bfloat16)
    logits = F.linear(x, embedding.to(torch.bfloat16)).float()
    return F.cross_entropy(logits.flatten(0, 1), target_ids.flatten())


def new_network(config: LlamaConfig) -> LlamaForCausalLM:
    """A network whose outputs to the residual stream are the smaller the deeper it is."""
    network = LlamaForCausalLM(config)
    for name, weight in network.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            nn.init.normal_(weight, std=0.02 / math.sqrt(2 * config.num_hidden_layers))
    return network


def hidden_states(
    network: LlamaForCausalLM, token_ids: Tensor, exit_layer: int = 0, kept_layers: list[bool] | None = None
) -> tuple[Tensor, Tensor | None]:
    """Final hidden states [batch, length, hidden] of `token_ids` [batch, length], and those after `exit_layer`, if any.

    `kept_layers` is this step's layer dropout.
    """
    x = network.model.embed_tokens(token_ids)
    angles = network.model.rotary_emb(x, torch.arange(token_ids.shape[1])[None])
    early = None
    for index, layer in enumerate(network.model.layers):
        if kept_layers is None or kept_layers[index]:
            x = layer(x, position_embeddings=angles)
        if index + 1 == exit_layer:
            early = x
    return x, early


def cross_entropy(network: LlamaForCausalLM, hidden: Tensor, target_ids: Tensor) -> Tensor:
    """Mean loss in nats of hidden states [batch, length, hidden] against `target_ids` [batch, length]."""
    norm = network.model.norm
    found: Tensor = head_loss(hidden, norm.weight, norm.variance_epsilon, network.lm_head.weight, target_ids)
    return found


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
    network: LlamaForCausalLM, batch: Tensor, schedule: BatchSchedule, step: int, rng: random.Random
) -> tuple[Tensor, Tensor]:
    """(total, final-layer) cross-entropy in nats per token; one early exit a step, by turns, on a quarter of rows."""
    inputs, targets = batch[:, :-1], batch[:, 1:]
    rates = layer_dropout_rates(network.config.num_hidden_layers, schedule.max_layer_dropout)
    kept = [rng.random() >= rate for rate in rates]
    exit_layer = 1 + step % (network.config.num_hidden_layers - 1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden, early = hidden_states(network, inputs, exit_layer, kept)
    main = cross_entropy(network, hidden, targets)
    rows = max(1, len(batch) // 4)
    assert early is not None
    side = cross_entropy(network, early[:rows], targets[:rows])
    depth_weight = exit_layer / network.config.num_hidden_layers
    return main + schedule.early_exit_weight * depth_weight * side, main.detach()


@torch.no_grad()
def held_out_loss(network: LlamaForCausalLM, stream: TokenStream, length: int = 1024, max_rows: int = 32) -> float:
    """Mean cross-entropy in nats per token over the first `max_rows` windows of a held-out stream."""
    losses = []
    for start in range(0, min(len(stream) - length - 1, max_rows * length), length):
        window = torch.from_numpy(stream[start : start + length + 1].astype(np.int64))[None]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            hidden, _ = hidden_states(network, window[:, :-1])
        losses.append(cross_entropy(network, hidden, window[:, 1:]).item())
    return float(np.mean(losses))


def pretrain(
    config: LlamaConfig,
    documents: list[TokenStream],
    held_out: dict[str, TokenStream],
    schedule: BatchSchedule,
    work: Path,
    seed: int,
) -> LlamaForCausalLM:
    """Train a network from scratch, or go on from `work/target.pt`; returns it when `total_tokens` are seen."""
    torch.manual_seed(seed)
    network = new_network(config)
    for layer in network.model.layers:  # since layer dropout changes the whole graph at every step (1.4x on two cores)
        layer.compile(dynamic=False)
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
