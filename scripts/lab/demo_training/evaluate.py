"""What the demo family is worth: held-out loss, acceptance of each student, agreement of each early exit.

Acceptance is measured on-policy: the target writes a continuation of an unseen prompt, and a student is asked, along
that very text, for its next token. This is the chance that one more draft token is accepted given that all before it
were; longer drafts multiply such chances.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from demo_training.generation import generate
from demo_training.network import Network
from edgespec.config.options import Sampling
from edgespec.sampling import Sampler
from edgespec.sampling.noise import Stream

TEMPERATURE = 0.8
SAMPLED_ROWS = 2  # continuations at TEMPERATURE per prompt, beside the greedy one


@dataclass(frozen=True)
class Continuation:
    """What the target wrote after one prompt: `token_ids` [n], prompt included, and where its own part begins."""

    token_ids: Tensor
    start: int
    is_greedy: bool


@dataclass(frozen=True)
class Acceptance:
    """Shares of the target's own tokens, all in 0..1.

    `greedy`: same argmax along greedy text; `reply`: the same, up to the end of the first turn; at T=0.8 along
    sampled text `coupled`: same pick under shared noise; `rejection`: sum of min(p, q); `greedy_match`: the chance
    that the target samples the student's argmax.
    """

    greedy: float
    reply: float
    coupled: float
    rejection: float
    greedy_match: float
    num_tokens: int


def write_continuations(
    target: Network, prompts: Sequence[Sequence[int]], length: int, bos_id: int, seed: int
) -> list[Continuation]:
    """One greedy and SAMPLED_ROWS sampled continuations of up to `length` tokens per prompt, cut at a new document."""
    temperatures = torch.tensor([0.0] + [TEMPERATURE] * SAMPLED_ROWS)
    written = []
    for index, prompt in enumerate(prompts):
        rows = torch.tensor([list(prompt)] * temperatures.numel())
        text = generate(target, rows, len(prompt) + length, temperatures, seed + index)
        for row, temperature in zip(text, temperatures.tolist(), strict=True):
            ends = (row[len(prompt) :] == bos_id).nonzero()
            end = len(prompt) + int(ends[0]) if ends.numel() else row.numel()
            if end > len(prompt):
                written.append(Continuation(row[:end], len(prompt), temperature == 0.0))
    return written


@torch.no_grad()
def own_logits(network: Network, continuation: Continuation, exit_layer: int | None = None) -> NDArray[np.float32]:
    """Scores [generated tokens, vocab] that precede each token of the target's own part, float32."""
    hidden, early = network.hidden(continuation.token_ids[None, :-1], exit_layer=exit_layer)
    chosen = hidden if early is None else early
    return np.asarray(network.logits(chosen[0, continuation.start - 1 :]).float().numpy())


def _sampled_shares(
    sampler: Sampler, target_logits: NDArray[np.float32], student_logits: NDArray[np.float32], first_position: int
) -> tuple[list[bool], list[float], list[float]]:
    """(coupled picks equal, sum of min(p, q), target's probability of the student's argmax) for every row."""
    equal, overlap, match = [], [], []
    nothing = np.empty(0, np.int32)
    for row, (ours, theirs) in enumerate(zip(target_logits, student_logits, strict=True)):
        target, student = sampler.distribution(ours, nothing), sampler.distribution(theirs, nothing)
        position = first_position + row
        equal.append(sampler.pick(target, position, Stream.TARGET) == sampler.pick(student, position, Stream.TARGET))
        dense = np.zeros((2, ours.size))
        dense[0, target.token_ids], dense[1, student.token_ids] = target.probs, student.probs
        overlap.append(float(dense.min(axis=0).sum()))
        match.append(float(dense[0, int(theirs.argmax())]))
    return equal, overlap, match


def _share(values: Sequence[float]) -> float:
    return round(float(np.mean(values)), 4)


def acceptance(
    target: Network, student: Network, continuations: Sequence[Continuation], turn_end_id: int
) -> Acceptance:
    """Acceptance of `student` along what `write_continuations` gave."""
    greedy: list[bool] = []
    reply: list[bool] = []
    coupled: list[bool] = []
    rejection: list[float] = []
    greedy_match: list[float] = []
    for index, continuation in enumerate(continuations):
        ours, theirs = own_logits(target, continuation), own_logits(student, continuation)
        if continuation.is_greedy:
            same = (ours.argmax(axis=1) == theirs.argmax(axis=1)).tolist()
            own = continuation.token_ids[continuation.start :].tolist()
            greedy += same
            reply += same[: own.index(turn_end_id) + 1 if turn_end_id in own else len(own)]
        else:
            sampler = Sampler(
                Sampling(temperature=TEMPERATURE, top_k=0, top_p=1.0, min_p=0.0, seed=index), ours.shape[1]
            )
            equal, overlap, match = _sampled_shares(sampler, ours, theirs, continuation.start)
            coupled, rejection, greedy_match = coupled + equal, rejection + overlap, greedy_match + match
    return Acceptance(
        greedy=_share(greedy),
        reply=_share(reply),
        coupled=_share(coupled),
        rejection=_share(rejection),
        greedy_match=_share(greedy_match),
        num_tokens=len(greedy) + len(coupled),
    )


def early_exit_agreement(target: Network, continuations: Sequence[Continuation]) -> list[float]:
    """Share of greedy text on which the head after layer 1, 2, ... (all but the last) chooses the target's token."""
    greedy = [c for c in continuations if c.is_greedy]
    full = np.concatenate([own_logits(target, c).argmax(axis=1) for c in greedy])
    return [
        round(float((np.concatenate([own_logits(target, c, layer).argmax(axis=1) for c in greedy]) == full).mean()), 4)
        for layer in range(1, target.shape.num_layers)
    ]
