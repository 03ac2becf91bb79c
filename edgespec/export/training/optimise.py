"""Shared by all training runs: learning-rate schedule, optimisers, atomic checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from edgespec.export.training.journal import RESUME_FIX
from edgespec.export.training.muon import Muon
from edgespec.platform.files import atomic_file


@dataclass(frozen=True)
class Schedule:
    """Learning rates of one training run of `total_tokens`."""

    total_tokens: int
    warmup_fraction: float = 0.02
    decay_fraction: float = 0.35
    matrix_rate: float = 0.02
    embedding_rate: float = 0.004

    def rate_factor(self, tokens_seen: int) -> float:
        """Factor on both learning rates after `tokens_seen` tokens."""
        progress = tokens_seen / self.total_tokens
        if progress < self.warmup_fraction:
            return max(progress, 1e-4) / self.warmup_fraction
        return max(min(1.0, (1.0 - progress) / self.decay_fraction), 0.01)


def make_optimizers(network: nn.Module, schedule: Schedule) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of layers, AdamW for embedding, head and norms."""
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, weight in network.named_parameters():
        is_matrix = weight.ndim == 2 and "embed" not in name and "lm_head" not in name
        (matrices if is_matrix else others).append(weight)
    muon = Muon(matrices, lr=schedule.matrix_rate, weight_decay=0.05, momentum=0.95)
    adamw = torch.optim.AdamW(others, lr=schedule.embedding_rate, betas=(0.9, 0.95), weight_decay=0.0)
    optimizers: list[torch.optim.Optimizer] = [muon, adamw]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["base_lr"] = group["lr"]
    return optimizers


def set_rate(optimizers: list[torch.optim.Optimizer], factor: float) -> None:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["base_lr"] * factor


def save_checkpoint(value: Any, path: Path) -> None:
    """Save atomically. Raises StateError if the disk is full, which torch reports as RuntimeError."""
    with atomic_file(path, RuntimeError, fix=RESUME_FIX) as temporary:
        torch.save(value, temporary)
