"""Trains the head on kept texts: from the best linear prediction of the next state on, at a low rate.

Rates that are usual with Muon destroy that start within a few steps: after 133,000 tokens the first token's total
variation was .595 with .002 and .616 with .006, one run each.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from edgespec.export.training.muon import Muon
from edgespec.formats.files import atomic_file
from head_training.network import Distance, Head
from head_training.texts import Batch, Kept, batch_of, batches

LATER_WEIGHT, STATE_WEIGHT, SHARE = 0.8, 0.1, 0.5
VECTOR_RATE = 0.002
RIDGE, DAMPING, LEAST = 0.03, 1e-3, 1e-6  # as in edgespec.export.training.heads_start
START_TEXTS, MEASURED_DEPTH = 400, 4
Say = Callable[[str], None]


@dataclass(frozen=True)
class Course:
    """`seconds` of training with drafts of `depth` tokens; the matrices' `rate` falls over the last `decay` of them."""

    seconds: float
    depth: int
    rate: float
    decay: float
    tokens: int = 2048  # of a batch, padding included
    warmup: float = 0.02

    def factor(self, progress: float) -> float:
        return min(1.0, progress / self.warmup + 0.02) * max(0.02, min(1.0, (1.0 - progress) / self.decay))


class Trainer:
    """`head_rows` [m, hidden]: rows of the target's head that the loss is over; `all_rows`, `all_ids`: those that a
    draft may have."""

    def __init__(self, head: Head, head_rows: Tensor, all_rows: Tensor, all_ids: Tensor, target_head: Tensor) -> None:
        self.head, self._rows, self._all_rows, self._all_ids = head, head_rows, all_rows, all_ids
        self._target_head, self._width = target_head, head.sizes.hidden

    @torch.no_grad()
    def start(self, texts: Sequence[Kept]) -> None:
        """Set the input matrices and the last norm to the least-squares prediction of the next state."""
        head, width = self.head, self._width
        inputs = head.project.shape[1] + width
        products, answers = torch.zeros(inputs, inputs), torch.zeros(inputs, width)
        squares, count = torch.zeros(width), 0
        for text in texts:
            batch = batch_of([text])
            others, last = batch.features[0, :-1, :-width], batch.features[0, :, -width:]
            pairs = torch.cat((last[:-1], head.embed(batch.ids[0, 1 : len(last)]), others), dim=-1)
            products += pairs.T @ pairs
            answers += pairs.T @ last[1:]
            squares += last[1:].square().sum(dim=0)
            count += len(last) - 1
        sizes = (squares / max(count, 1)).sqrt().clamp(min=LEAST)
        answers /= sizes
        first, rest = slice(0, 2 * width), slice(2 * width, None)
        found = _solved(products[first, first], answers[first])
        head.fc.copy_(found.T)
        head.norm.copy_(sizes)
        left = _solved(products[rest, rest], answers[rest] - products[rest, first] @ found)
        through = head.fc[:, :width]
        damped = through.T @ through + DAMPING * through.square().sum() / width * torch.eye(width)
        head.project[:, : left.shape[0]] = torch.linalg.solve(damped, through.T @ left.T)

    def train(self, texts: Sequence[Kept], course: Course, say: Say, save: Callable[[], None], seed: int) -> None:
        parameters = list(self.head.parameters())
        optimisers: list[torch.optim.Optimizer] = [
            Muon([weight for weight in parameters if weight.ndim == 2], lr=course.rate),
            torch.optim.AdamW(
                [w for w in parameters if w.ndim == 1], lr=VECTOR_RATE, betas=(0.9, 0.95), weight_decay=0
            ),
        ]
        rates = [group["lr"] for optimiser in optimisers for group in optimiser.param_groups]
        rng, begun, said, seen, apart = random.Random(seed), time.monotonic(), time.monotonic(), 0, 0.0
        while time.monotonic() - begun < course.seconds:
            for batch in batches(texts, course.tokens, rng):
                progress = (time.monotonic() - begun) / course.seconds
                if progress >= 1:
                    break
                groups = [group for optimiser in optimisers for group in optimiser.param_groups]
                for group, rate in zip(groups, rates, strict=True):
                    group["lr"] = rate * course.factor(progress)
                count, variation = self._step(batch, course.depth, optimisers)
                seen, apart = seen + count, apart + variation
                if time.monotonic() - said > 60:
                    said = time.monotonic()
                    say(f"{said - begun:.0f} s: {seen} drafts, total variation of first tokens {apart / seen:.4f}")
                    save()

    def _step(self, batch: Batch, depth: int, optimisers: Sequence[torch.optim.Optimizer]) -> tuple[int, float]:
        """Learn from the drafts that begin in the answers; their number, and the first tokens' total variation."""
        first, length = max(0, int(batch.starts.min()) - 1), batch.features.shape[1]
        targets = batch.features[:, first + 1 :, -self._width :]  # the state that step k of a draft predicts, k later
        begins = torch.arange(first, length - 1)[None, :]
        valid = (begins + 1 < batch.lengths[:, None]) & (begins >= batch.starts[:, None] - 1)
        wanted_states = targets[valid]
        count = len(wanted_states)
        if not count:
            return 0, 0.0
        places = torch.full(valid.shape, -1)
        places[valid] = torch.arange(count)
        with torch.no_grad():
            wanted = torch.cat([_probabilities(part, self._rows) for part in wanted_states.split(256)])
        loss, apart = torch.zeros(()), 0.0
        for step, found in enumerate(self.head.drafts(batch.features, batch.ids, first, depth)):
            begin, later = valid[:, : valid.shape[1] - step], places[:, step:]
            chosen = begin & (later >= 0)
            states, place = found[chosen], later[chosen]
            distance, variation = Distance.apply(states, self._rows, wanted[place], SHARE)
            far = F.smooth_l1_loss(states, wanted_states[place], reduction="none").mean(dim=-1).sum()
            loss = loss + LATER_WEIGHT**step * (distance + STATE_WEIGHT * far) / count
            apart += float(variation.detach()) if step == 0 else 0.0
        for optimiser in optimisers:
            optimiser.zero_grad(set_to_none=True)
        loss.backward()
        for optimiser in optimisers:
            optimiser.step()
        return count, apart

    @torch.no_grad()
    def accepted(self, texts: Sequence[Kept], *, is_greedy: bool) -> list[float]:
        """The share of drafts of which the first 1, 2, 3, 4 tokens are accepted, on answers at temperature 0 or others.

        Greedily a token is accepted if it is the text's; else with the probability that the two distributions share.
        """
        reached, count = torch.zeros(MEASURED_DEPTH), 0
        for text in texts:
            if (text.temperature == 0) != is_greedy or len(text.rows) - text.start <= MEASURED_DEPTH:
                continue
            batch, first = batch_of([text]), text.start - 1
            number = len(text.rows) - first - MEASURED_DEPTH
            alive = torch.ones(number)
            for step, found in enumerate(self.head.drafts(batch.features, batch.ids, first, MEASURED_DEPTH)):
                logits = F.linear(found[0, :number].bfloat16(), self._all_rows).float()
                if is_greedy:
                    place = slice(first + 2 + step, first + 2 + step + number)
                    alive = alive * (self._all_ids[logits.argmax(dim=-1)] == batch.ids[0, place])
                else:
                    states = batch.features[0, first + 1 + step : first + 1 + step + number, -self._width :]
                    expected = _probabilities(states, self._target_head)[:, self._all_ids].float()
                    alive = alive * torch.minimum(expected, logits.softmax(dim=-1)).sum(dim=-1)
                reached[step] += alive.sum()
            count += number
        return [round(float(share), 4) for share in reached / max(count, 1)]


def save_weights(path: Path, value: dict[str, Any]) -> None:
    with atomic_file(path, RuntimeError) as temporary:
        torch.save(value, temporary)


def _probabilities(states: Tensor, rows: Tensor) -> Tensor:
    return F.linear(states.to(rows.dtype), rows).float().softmax(dim=-1).bfloat16()


def _solved(products: Tensor, answers: Tensor) -> Tensor:
    found: Tensor = torch.linalg.solve(products + torch.diag(RIDGE * products.diagonal() + LEAST), answers)
    return found
