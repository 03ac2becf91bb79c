"""Distilling the draft and the medium from the target, together, so that both share the target's forward pass.

What counts later is agreement with the target along the target's own text, since a draft is judged only while every
earlier token was accepted. Hence half of every batch is text that the target generated, at temperatures from greedy
to 1, renewed every round, and the loss is the total variation distance to the target (acceptance under rejection
sampling is 1 minus it; Leviathan 2211.17192, DistillSpec 2310.08461), with a share of cross-entropy that carries the
start, where total variation alone has hardly any gradient.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from demo_training.generation import generate
from demo_training.network import NORM_EPS, Network, NetworkShape
from demo_training.pretrain import BatchSchedule, RunLog, TokenStream
from edgespec.export.training.optimise import make_optimizers, save_checkpoint, set_rate

STUDENTS = {
    "draft": NetworkShape(4096, 128, 384, num_layers=2, num_heads=2, num_kv_heads=1),
    "medium": NetworkShape(4096, 192, 576, num_layers=5, num_heads=3, num_kv_heads=1),
}
ROW_TEMPERATURES = (1.0, 0.8, 0.3, 0.0)  # of generated rows, in equal parts
INHERITED_STD = 0.05  # of the students' first embedding
PROMPT_LENGTHS = (12, 24, 48, 96, 192)
LOSS_TEMPERATURES = (1.0, 0.6)  # of the compared distributions, by turns: 0.6 weighs the likeliest tokens more


@dataclass(frozen=True)
class DistillPlan:
    """Sizes of a distillation in tokens; `schedule` counts training tokens, generation comes on top."""

    schedule: BatchSchedule
    round_tokens: int = 150_000
    generated_per_round: int = 32_768
    generated_length: int = 512
    pool_rounds: int = 12  # generated text older than this is forgotten: the target has moved on or it was seen enough
    generated_share: float = 0.5
    domain_weights: tuple[tuple[str, float], ...] = (("dialogue", 0.4), ("code", 0.42), ("arithmetic", 0.18))
    cross_entropy_weight: float = 0.1


@torch.compile(dynamic=False)
def head_probs(hidden: Tensor, norm_weight: Tensor, embedding: Tensor, inverse_temperature: Tensor) -> Tensor:
    """Probabilities [batch, length, vocab] of hidden states at a temperature, final norm and head included."""
    x = F.rms_norm(hidden.float(), (hidden.shape[-1],), norm_weight, NORM_EPS).to(torch.bfloat16)
    logits = F.linear(x, embedding.to(torch.bfloat16)).float()
    return torch.softmax(logits * inverse_temperature, dim=-1)


@torch.compile(dynamic=False)
def divergence(
    hidden: Tensor, norm_weight: Tensor, embedding: Tensor, inverse_temperature: Tensor, target_probs: Tensor
) -> tuple[Tensor, Tensor]:
    """(total variation, cross-entropy in nats) to `target_probs` [batch, length, vocab], means over tokens."""
    x = F.rms_norm(hidden.float(), (hidden.shape[-1],), norm_weight, NORM_EPS).to(torch.bfloat16)
    logits = F.linear(x, embedding.to(torch.bfloat16)).float()
    log_probs = torch.log_softmax(logits * inverse_temperature, dim=-1)
    variation = 0.5 * (log_probs.exp() - target_probs).abs().sum(dim=-1).mean()
    return variation, -(target_probs * log_probs).sum(dim=-1).mean()


def mixture_row(
    streams: dict[str, TokenStream], plan: DistillPlan, pool: TokenStream, length: int, rng: np.random.Generator
) -> TokenStream:
    """One window [length] of generated text or of a corpus domain, by the plan's shares."""
    if pool.size >= length and rng.random() < plan.generated_share:
        stream = pool
    else:
        names, weights = zip(*plan.domain_weights, strict=True)
        stream = streams[str(rng.choice(names, p=weights))]
    start = int(rng.integers(0, stream.size - length + 1))
    return stream[start : start + length]


def draw_prompts(
    streams: dict[str, TokenStream], plan: DistillPlan, bos_id: int, rows: int, rng: np.random.Generator
) -> Tensor:
    """Prompts [rows, n] of one random length n; two thirds begin at a document's start, as a chat does."""
    length = int(rng.choice([n for n in PROMPT_LENGTHS if n <= plan.generated_length // 2]))
    names, weights = zip(*plan.domain_weights, strict=True)
    prompts = []
    for _ in range(rows):
        stream = streams[str(rng.choice(names, p=weights))]
        start = int(rng.integers(0, stream.size - 4 * length))
        if rng.random() < 2 / 3:
            ahead = np.flatnonzero(stream[start : start + 4096] == bos_id)
            start = min(start + int(ahead[0]), stream.size - length) if ahead.size else start
        prompts.append(stream[start : start + length])
    return torch.from_numpy(np.stack(prompts).astype(np.int64))


@torch.no_grad()
def inherit_embedding(student: Network, target: Network) -> None:
    """Start from the target's embedding in its principal directions, so that likeness of tokens is not learnt again.

    The embedding is also the head, and most of a student's weights. What all tokens share is left out: it adds the same
    to every score. The size is kept small, or a tied head would begin by repeating its input.
    """
    embedding = target.model.embed_tokens.weight
    centred = embedding - embedding.mean(dim=0)
    _, _, directions = torch.linalg.svd(centred, full_matrices=False)
    projected = centred @ directions[: student.shape.hidden_size].T
    student.model.embed_tokens.weight.copy_(projected * (INHERITED_STD / projected.std()))


class Distiller:
    """All that a distillation carries from step to step; `save` and `load` make it resumable at round boundaries."""

    def __init__(
        self, target: Network, streams: dict[str, TokenStream], bos_id: int, plan: DistillPlan, work: Path, seed: int
    ) -> None:
        torch.manual_seed(seed)
        self.target, self.streams, self.bos_id, self.plan, self.work, self.seed = (
            target.eval(), streams, bos_id, plan, work, seed,
        )  # fmt: skip
        self.students = {name: Network(shape) for name, shape in STUDENTS.items()}
        self.optimizers = {name: make_optimizers(s, plan.schedule) for name, s in self.students.items()}
        self.pool: list[TokenStream] = []
        self.tokens_seen = self.step_index = self.round_index = 0
        for network in (target, *self.students.values()):
            network.compile_layers()

    @property
    def checkpoint(self) -> Path:
        return self.work / "distill.pt"

    def save(self) -> None:
        state = {
            "students": {name: s.state_dict() for name, s in self.students.items()},
            "optimizers": {name: [o.state_dict() for o in pair] for name, pair in self.optimizers.items()},
            "pool": [torch.from_numpy(tokens) for tokens in self.pool],
            "counters": [self.tokens_seen, self.step_index, self.round_index],
        }
        save_checkpoint(state, self.checkpoint)

    def load(self) -> None:
        state = torch.load(self.checkpoint, weights_only=True)
        for name, student in self.students.items():
            student.load_state_dict(state["students"][name])
            for optimizer, saved in zip(self.optimizers[name], state["optimizers"][name], strict=True):
                optimizer.load_state_dict(saved)
        self.pool = [tokens.numpy() for tokens in state["pool"]]
        self.tokens_seen, self.step_index, self.round_index = state["counters"]

    def generate_round(self) -> None:
        """Let the target write this round's text; the oldest rounds leave the pool."""
        plan, rng = self.plan, np.random.default_rng([self.seed, 1, self.round_index])
        rows = 64
        for index in range(max(1, plan.generated_per_round // (rows * plan.generated_length))):
            prompts = draw_prompts(self.streams, plan, self.bos_id, rows, rng)
            temperatures = torch.tensor(ROW_TEMPERATURES).repeat(rows // len(ROW_TEMPERATURES))
            seed = self.seed * 1_000_003 + self.round_index * 1009 + index
            text = generate(self.target, prompts, plan.generated_length, temperatures, seed)
            self.pool.append(text.flatten().numpy().astype(np.int32))
        batches = max(1, plan.generated_per_round // (rows * plan.generated_length))
        self.pool = self.pool[-plan.pool_rounds * batches :]

    def step(self) -> dict[str, float]:
        """One batch for every student; returns each one's total variation distance to the target."""
        schedule, rng = self.plan.schedule, np.random.default_rng([self.seed, 2, self.step_index])
        length = schedule.length_at(self.tokens_seen)
        pool = np.concatenate(self.pool)
        rows = [mixture_row(self.streams, self.plan, pool, length, rng) for _ in range(schedule.batch_tokens // length)]
        batch = torch.from_numpy(np.stack(rows).astype(np.int64))
        cooling = torch.tensor(1.0 / LOSS_TEMPERATURES[self.step_index % len(LOSS_TEMPERATURES)])
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            hidden, _ = self.target.hidden(batch)
        with torch.no_grad():
            wanted = head_probs(hidden, self.target.model.norm.weight, self.target.model.embed_tokens.weight, cooling)
        distances: dict[str, float] = {}
        for name, student in self.students.items():
            with torch.autocast("cpu", dtype=torch.bfloat16):
                hidden, _ = student.hidden(batch)
            variation, entropy = divergence(
                hidden, student.model.norm.weight, student.model.embed_tokens.weight, cooling, wanted
            )
            share = self.plan.cross_entropy_weight
            (share * entropy + (1 - share) * variation).backward()
            torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
            set_rate(self.optimizers[name], schedule.rate_factor(self.tokens_seen))
            for optimizer in self.optimizers[name]:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            distances[name] = variation.item()
        self.step_index += 1
        self.tokens_seen += batch.numel()
        return distances


@torch.no_grad()
def agreement(target: Network, student: Network, stream: TokenStream, length: int = 512, rows: int = 16) -> float:
    """Share of positions of a held-out stream where both would choose the same token greedily."""
    windows = torch.from_numpy(stream[: rows * length].astype(np.int64)).view(rows, length)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        choices = [net.logits(net.hidden(windows)[0]).argmax(dim=-1) for net in (target, student)]
    return float((choices[0] == choices[1]).float().mean())


def refresh_target(target: Network, checkpoint: Path, loaded_at: float) -> tuple[float, int]:
    """Reload the target when its checkpoint is newer than `loaded_at`; returns (time of the file, its tokens)."""
    changed = checkpoint.stat().st_mtime
    state = torch.load(checkpoint, weights_only=True)
    if changed > loaded_at:
        target.load_state_dict(state["network"])
    return changed, int(state["tokens_seen"])


def distill(
    target_shape: NetworkShape,
    streams: dict[str, TokenStream],
    held_out: dict[str, TokenStream],
    bos_id: int,
    plan: DistillPlan,
    work: Path,
    seed: int,
) -> dict[str, Network]:
    """Train the STUDENTS from `work/target.pt`, or go on from `work/distill.pt`; returns them when all tokens are seen.

    The target is read anew at every round, so that a distillation may begin while the target is still learning; the
    log says how many tokens the target had seen.
    """
    distiller = Distiller(Network(target_shape), streams, bos_id, plan, work, seed)
    loaded_at, _ = refresh_target(distiller.target, work / "target.pt", 0.0)
    if distiller.checkpoint.exists():
        distiller.load()
    else:
        for student in distiller.students.values():
            inherit_embedding(student, distiller.target)
    columns = [f"{kind}_{name}" for name in STUDENTS for kind in ("variation", *(f"agreement_{d}" for d in held_out))]
    log = RunLog(work / "distill.csv", ["tokens", "target_tokens", "tokens_per_s", *columns])
    total = plan.schedule.total_tokens
    bar = tqdm(total=total, initial=distiller.tokens_seen, unit="tok", desc="distill")
    running: dict[str, float] = {}
    while distiller.tokens_seen < total:
        loaded_at, target_tokens = refresh_target(distiller.target, work / "target.pt", loaded_at)
        started, start_tokens = time.monotonic(), distiller.tokens_seen
        distiller.generate_round()
        while distiller.tokens_seen < min(total, start_tokens + plan.round_tokens):
            before = distiller.tokens_seen
            for name, distance in distiller.step().items():
                running[name] = 0.95 * running.get(name, distance) + 0.05 * distance
            bar.update(distiller.tokens_seen - before)
            bar.set_postfix({name: f"{value:.3f}" for name, value in running.items()})
        distiller.round_index += 1
        distiller.save()
        values: dict[str, Any] = {f"variation_{name}": round(value, 4) for name, value in running.items()}
        for name, student in distiller.students.items():
            for domain, stream in held_out.items():
                values[f"agreement_{domain}_{name}"] = round(agreement(distiller.target, student, stream), 4)
        rate = round((distiller.tokens_seen - start_tokens) / (time.monotonic() - started))
        log.write(tokens=distiller.tokens_seen, target_tokens=target_tokens, tokens_per_s=rate, **values)
    bar.close()
    return distiller.students
