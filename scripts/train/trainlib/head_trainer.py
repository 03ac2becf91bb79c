"""Trains the head on kept texts, from the best linear prediction of the next state on.

The target reads each batch again: its states of all texts would be 5 KB for a token.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from trainlib.head_network import Distance, EagleHead, Heads
from trainlib.head_texts import Batch, Batches, Texts
from trainlib.llama import Llama
from trainlib.optimise import Schedule, make_optimizers, update

LATER_WEIGHT, SHARE = 0.8, 0.5
VECTOR_RATE = 0.002
RIDGE, DAMPING, LEAST = 0.03, 1e-3, 1e-6  # shares of squares that are added, against chance in few texts
START_TEXTS, MEASURED_DEPTH, MEASURED_TEXTS = 400, 4, 16
BETWEEN_REPORTS = 30  # seconds
Say = Callable[[str], None]


@dataclass(frozen=True)
class Course:
    """`seconds` of training with drafts of `depth` tokens; the matrices' `rate` falls over the last `decay` of them.

    `state_weight`: of the distance from the state that the target has; EAGLE-3 found that it limits what much text can
    teach.
    """

    seconds: float
    depth: int
    rate: float
    decay: float
    tokens: int = 2048  # of a batch, padding included
    state_weight: float = 0.1
    warmup: float = 0.02

    def factor(self, progress: float) -> float:
        return min(1.0, progress / self.warmup + 0.02) * max(0.02, min(1.0, (1.0 - progress) / self.decay))


class _Drafts:
    """Where the drafts of a batch begin: with the pair before an answer's first token, and each one behind it."""

    def __init__(self, batch: Batch) -> None:
        self.count = int((batch.lengths - batch.starts).max())
        self._begins = batch.starts[:, None] - 1 + torch.arange(self.count, device=batch.ids.device)
        self._lengths, self._last = batch.lengths[:, None], batch.ids.shape[1] - 1

    def reach(self, tokens: int) -> Tensor:
        """Which of them [texts, count] have so many tokens of their text behind them."""
        return self._begins + tokens < self._lengths

    def behind(self, tokens: int) -> Tensor:
        return (self._begins + tokens).clamp(max=self._last)


class Trainer:
    """`scored_ids` [m]: tokens that the loss is over; `all_ids`: those that a draft may have."""

    def __init__(self, head: Heads, target: Llama, scored_ids: Tensor, all_ids: Tensor) -> None:
        self.head, self._target, self._all_ids = head, target, all_ids
        self._target_head, self._width = target.weights.head, head.config.hidden_size
        self._rows, self._all_rows = (self._target_head[ids].bfloat16() for ids in (scored_ids, all_ids))

    @torch.no_grad()
    def start(self, texts: Texts, chosen: Sequence[int]) -> None:
        """Set the input matrices and the last norm to the least-squares prediction of the next state."""
        head, width, device = self.head, self._width, self._target.device
        if not isinstance(head, EagleHead):
            return  # Medusa's begin as the state itself
        inputs, batches = (head.num_inputs + 2) * width, Batches(texts, device)
        products, answers = torch.zeros(inputs, inputs, device=device), torch.zeros(inputs, width, device=device)
        squares, count = torch.zeros(width, device=device), 0
        for place in chosen:
            ids = batches.of([place]).ids
            features = self._target.read(ids[:, :-1])[0][0]
            others, last = features[:-1, :-width], features[:, -width:]
            pairs = torch.cat((last[:-1], head.embed(ids[0, 1 : len(last)]), others), dim=-1)
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
        if not head.num_inputs:
            return
        left = _solved(products[rest, rest], answers[rest] - products[rest, first] @ found)
        through = head.fc[:, :width]
        damping = DAMPING * through.square().sum() / width * torch.eye(width, device=device)
        head.project[:, : left.shape[0]] = torch.linalg.solve(through.T @ through + damping, through.T @ left.T)

    def train(self, texts: Texts, course: Course, say: Say, save: Callable[[], None], seed: int) -> None:
        rates = Schedule(1, matrix_rate=course.rate, embedding_rate=VECTOR_RATE)
        optimisers = make_optimizers(self.head, rates)
        rng, batches, begun = random.Random(seed), Batches(texts, self._target.device), time.monotonic()
        said, steps, seen, apart = begun, 0, torch.zeros(()), torch.zeros(())
        while time.monotonic() - begun < course.seconds:
            for batch in batches.epoch(course.tokens, rng):
                progress = (time.monotonic() - begun) / course.seconds
                if progress >= 1:
                    break
                number, variation = self._step(batch, course)
                if number:
                    update(self.head, optimisers, course.factor(progress), math.inf)
                steps, seen, apart = steps + 1, seen + number, apart + variation
                if time.monotonic() - said > BETWEEN_REPORTS:
                    said = time.monotonic()
                    about = f"total variation of first tokens {float(apart / seen):.4f}"
                    say(f"{said - begun:.0f} s: {steps} steps, {float(seen):.0f} drafts, {about}")
                    seen, apart = torch.zeros(()), torch.zeros(())
                    save()

    def _step(self, batch: Batch, course: Course) -> tuple[int, Tensor | float]:
        """Gradients of the drafts that begin in the answers; their number, and the first tokens' total variation."""
        features = self._target.read(batch.ids[:, :-1])[0]
        drafts = _Drafts(batch)
        valid = drafts.reach(2)
        wanted_states = self._states(features, drafts, 1)[valid]
        count = len(wanted_states)
        if not count:
            return 0, 0.0
        places = torch.full(valid.shape, -1, device=features.device)
        places[valid] = torch.arange(count, device=features.device)
        with torch.no_grad():
            wanted = torch.cat([_probabilities(part, self._rows) for part in wanted_states.split(4096)])
        loss, apart = torch.zeros((), device=features.device), torch.zeros((), device=features.device)
        for step, found in enumerate(self._drafted(features, batch, drafts, course.depth)):
            later = F.pad(places[:, step:], (0, step), value=-1)  # what step k of a draft predicts, k later
            chosen = valid & (later >= 0)
            states, place = found[chosen], later[chosen]
            distance, variation = Distance.apply(states, self._rows, wanted[place], SHARE)
            if course.state_weight:
                far = F.smooth_l1_loss(states, wanted_states[place], reduction="none").mean(dim=-1).sum()
                distance = distance + course.state_weight * far
            loss = loss + LATER_WEIGHT**step * distance / count
            if step == 0:
                apart = variation.detach()
        loss.backward()
        return count, apart.cpu()

    def _drafted(self, features: Tensor, batch: Batch, drafts: _Drafts, depth: int) -> Iterator[Tensor]:
        return self.head.drafts(features, batch.ids, batch.starts - 1, drafts.count, depth)

    def _states(self, features: Tensor, drafts: _Drafts, behind: int) -> Tensor:
        """The target's states [texts, count, hidden] so many tokens behind where drafts begin."""
        places = drafts.behind(behind).clamp(max=features.shape[1] - 1)
        found: Tensor = features[..., -self._width :].gather(1, places[..., None].expand(-1, -1, self._width))
        return found

    @torch.no_grad()
    def accepted(self, texts: Texts, *, is_greedy: bool, depth: int = MEASURED_DEPTH) -> list[float]:
        """The share of drafts of which the first 1, 2, ... tokens are accepted, on answers at temperature 0 or others.

        Greedily a token is accepted if it is the text's; else with the probability that the two distributions share.
        """
        device = self._target.device
        reached, count, batches = torch.zeros(depth, device=device), 0, Batches(texts, device)
        fits = ((texts.temperatures == 0) == is_greedy) & (texts.lengths - texts.starts > depth + 2)
        for begin in range(0, int(fits.sum()), MEASURED_TEXTS):
            batch = batches.of(np.flatnonzero(fits)[begin : begin + MEASURED_TEXTS].tolist())
            features, drafts = self._target.read(batch.ids[:, :-1])[0], _Drafts(batch)
            inside = drafts.reach(depth + 2)
            alive = torch.ones(int(inside.sum()), device=device)
            for step, found in enumerate(self._drafted(features, batch, drafts, depth)):
                logits = F.linear(found[inside].bfloat16(), self._all_rows).float()
                if is_greedy:
                    likeliest = self._all_ids[logits.argmax(dim=-1)]
                    alive = alive * (likeliest == batch.ids.gather(1, drafts.behind(2 + step))[inside])
                else:
                    states = self._states(features, drafts, 1 + step)[inside]
                    expected = _probabilities(states, self._target_head)[:, self._all_ids].float()
                    alive = alive * torch.minimum(expected, logits.softmax(dim=-1)).sum(dim=-1)
                reached[step] += alive.sum()
            count += len(alive)
        return [round(float(share), 4) for share in reached / max(count, 1)]


def _probabilities(states: Tensor, rows: Tensor) -> Tensor:
    return F.linear(states.to(rows.dtype), rows).float().softmax(dim=-1).bfloat16()


def _solved(products: Tensor, answers: Tensor) -> Tensor:
    found: Tensor = torch.linalg.solve(products + torch.diag(RIDGE * products.diagonal() + LEAST), answers)
    return found
