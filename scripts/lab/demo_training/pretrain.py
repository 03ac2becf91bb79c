"""Pre-training of the demo target with LayerSkip's recipe, resumable at any step.

Optimiser: Muon for matrices of the layers, AdamW for the embedding and the norms. Learning rate: a short warm-up, a
plateau, a linear decay over the last part, driven by tokens seen, so that a resumed run continues the same curve.
"""

from __future__ import annotations

import csv
import math
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from tqdm import tqdm

from demo_training.network import Network, NetworkShape
from edgespec.export.training.optimise import Schedule, make_optimizers, save_checkpoint, set_rate

TokenStream = NDArray[np.int32]


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


class RunLog:
    """Append-only CSV of a training run."""

    def __init__(self, path: Path, columns: list[str]) -> None:
        self.path, self.columns = path, columns
        if not path.exists():
            self._append(columns)

    def _append(self, row: list[Any]) -> None:
        with self.path.open("a", newline="") as handle:
            csv.writer(handle).writerow(row)

    def write(self, **values: Any) -> None:
        self._append([values.get(column, "") for column in self.columns])


def pretrain(
    shape: NetworkShape,
    documents: list[TokenStream],
    held_out: dict[str, TokenStream],
    schedule: BatchSchedule,
    work: Path,
    seed: int,
    *,
    start: Mapping[str, Tensor] | None = None,
    save_every_s: float = 240.0,
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
    log = RunLog(work / "target.csv", ["tokens", "loss", "tokens_per_s", *(f"held_out_{d}" for d in held_out)])

    def save() -> None:
        state = {
            "network": network.state_dict(),
            "optimizers": [o.state_dict() for o in optimizers],
            "position": sampler.position,
            "tokens_seen": tokens_seen,
            "step": step,
        }
        save_checkpoint(state, checkpoint)

    bar = tqdm(total=schedule.total_tokens, initial=tokens_seen, unit="tok", desc="target")
    last_save = last_log = time.monotonic()
    logged_tokens, running = tokens_seen, 0.0
    while tokens_seen < schedule.total_tokens:
        length = schedule.length_at(tokens_seen)
        batch = sampler.batch(schedule.batch_tokens // length, length)
        set_rate(optimizers, schedule.rate_factor(tokens_seen))
        total, main = training_loss(network, batch, schedule, step, random.Random(seed * 1_000_003 + step))
        total.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        step += 1
        tokens_seen += batch.numel() - len(batch)
        running = main.item() if step == 1 else 0.95 * running + 0.05 * main.item()
        bar.update(batch.numel() - len(batch))
        bar.set_postfix(loss=f"{running:.3f}")
        now = time.monotonic()
        if now - last_save > save_every_s or tokens_seen >= schedule.total_tokens:
            save()
            losses = {f"held_out_{d}": round(held_out_loss(network, s), 4) for d, s in held_out.items()}
            rate = (tokens_seen - logged_tokens) / max(now - last_log, 1e-9)
            log.write(tokens=tokens_seen, loss=round(running, 4), tokens_per_s=round(rate), **losses)
            last_save = last_log = time.monotonic()
            logged_tokens = tokens_seen
    bar.close()
    return network
