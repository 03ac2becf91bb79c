"""Learning rates, optimisers and checkpoints of a training.

Muon (https://kellerjordan.github.io/posts/muon/) computes in a number type that the device multiplies fast:
torch.optim.Muon always takes bfloat16, for which most CPUs have no instructions. One step of a 1152 x 576 matrix took
3.2 s on one core of a Zen 3 that way, and takes 0.16 s here. Learning rates and weight decay mean the same in both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from edgespec.errors import CapabilityError
from edgespec.platform.files import atomic_file

# A fifth-degree polynomial that brings all singular values between 0 and 1 close to 1 in five steps.
COEFFICIENTS = 3.4445, -4.7750, 2.0315
STEPS = 5
LEAST_NORM = 1e-7


class Muon(torch.optim.Optimizer):
    """Steps by the orthogonalised momentum (Nesterov's) of matrices; `lr` is that of square ones, as in torch."""

    def __init__(self, params: Iterable[Tensor], lr: float, weight_decay: float = 0.05, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.ndim != 2:
                    raise ValueError(f"Muon is for matrices, got a weight of shape {tuple(weight.shape)}")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        assert closure is None, "the gradients must be there"
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state[weight]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(weight)
                average = state["momentum_buffer"].lerp_(weight.grad, 1 - group["momentum"])
                update = orthogonal(weight.grad.lerp(average, group["momentum"]))
                rate = group["lr"] * math.sqrt(max(1.0, weight.shape[0] / weight.shape[1]))
                weight.mul_(1 - group["lr"] * group["weight_decay"]).add_(update.to(weight.dtype), alpha=-rate)


def orthogonal(matrix: Tensor) -> Tensor:
    """The matrix [m, n] with all its singular values near 1 (.7 to 1.2), by Newton-Schulz steps."""
    found = matrix.to(torch.float32 if matrix.device.type == "cpu" else torch.bfloat16)
    is_tall = matrix.shape[0] > matrix.shape[1]
    found = found.T if is_tall else found
    found = found / found.norm().clamp(min=LEAST_NORM)
    first, third, fifth = COEFFICIENTS
    for _ in range(STEPS):
        gram = found @ found.T
        found = torch.addmm(found, torch.addmm(gram, gram, gram, beta=third, alpha=fifth), found, beta=first)
    return found.T if is_tall else found


@dataclass(frozen=True)
class Schedule:
    """Learning rates of a training of `total_tokens`: a warm-up, a plateau, a linear decay."""

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
    muon = Muon(matrices, lr=schedule.matrix_rate)
    adamw = torch.optim.AdamW(others, lr=schedule.embedding_rate, betas=(0.9, 0.95), weight_decay=0.0)
    optimizers: list[torch.optim.Optimizer] = [muon, adamw]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["base_lr"] = group["lr"]
    return optimizers


def update(
    network: nn.Module, optimizers: Sequence[torch.optim.Optimizer], rate_factor: float, most_norm: float = 1.0
) -> None:
    """One step of all optimizers along the gradients that are there, cut to `most_norm`; then they are cleared."""
    torch.nn.utils.clip_grad_norm_(network.parameters(), most_norm)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["base_lr"] * rate_factor
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def save_checkpoint(value: Any, path: Path) -> None:
    """Save atomically. Raises StateError if the disk is full, which torch reports as RuntimeError."""
    with atomic_file(path, RuntimeError) as temporary:
        torch.save(value, temporary)


def pick_device(wanted: str) -> torch.device:
    """The torch device; `auto`: CUDA, else Apple's GPU, else the CPU. Raises CapabilityError if there is none such."""
    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if wanted == "auto":
        wanted = next(name for name, there in available.items() if there)
    if not available.get(wanted):
        raise CapabilityError(f"--device {wanted}: torch finds no such device; --device cpu works everywhere")
    return torch.device(wanted)
