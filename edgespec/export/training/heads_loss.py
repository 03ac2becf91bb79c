"""The loss between drafts of heads and the target, with a hand-written gradient.

Logits over the vocabulary are most of the cost of training heads, and autograd reads them from memory about fifteen
times per drafted token. Here one row of text is processed at a time, which fits the CPU cache, and only the gradient of
the predicted states is kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class TargetDistributions:
    """The target's distributions at every position of `rows` windows, over the draft vocabulary of m tokens.

    `probs` [rows, length, m]: probabilities of these tokens; `mass` [rows, length]: their sums, below 1 if other tokens
    are likely; `pulled` [rows, length, hidden]: rows of the target's head, weighted by `probs`.
    """

    probs: Tensor
    mass: Tensor
    pulled: Tensor

    def at(self, places: slice) -> TargetDistributions:
        return TargetDistributions(self.probs[:, places], self.mass[:, places], self.pulled[:, places])


@torch.no_grad()
def target_distributions(states: Tensor, head: Tensor, token_ids: Tensor, factor: float) -> TargetDistributions:
    """The target's distributions for its `states` [rows, length, hidden]: softmax of `factor` times the logits.

    `head` [vocabulary, hidden]; `token_ids` [m]: the draft vocabulary. Computed in the type of `head`, sums in float32.
    """
    rows = head[token_ids]
    is_whole = len(token_ids) == len(head)
    probs = states.new_empty((*states.shape[:2], len(token_ids)), dtype=torch.float32)
    pulled = torch.empty_like(states, dtype=torch.float32)
    for row, given in enumerate(states):
        scores = F.linear(given.to(head.dtype), head).float().mul_(factor)
        target_probs = scores.softmax(dim=-1)
        probs[row] = target_probs if is_whole else target_probs[:, token_ids]
        pulled[row] = probs[row].to(head.dtype) @ rows
    return TargetDistributions(probs, probs.sum(dim=-1), pulled)


class DraftLoss(torch.autograd.Function):
    """(loss, total variation) between predicted states and the target, both weighted sums.

    The loss is `share` * cross-entropy + (1 - `share`) * total variation. With q the softmax of z = factor W h, p the
    target's probabilities with sum P, and s the signs of q - p, the gradients with respect to z are P q - p for the
    cross-entropy and q (s - q.s) / 2 for the total variation.
    """

    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        weight: Tensor,
        target: TargetDistributions,
        weights: Tensor,
        factor: float,
        share: float,
    ) -> tuple[Tensor, Tensor]:
        """`states` [rows, n, hidden]; `weight` [m, hidden], whose type is used to compute; `weights` [rows, n]."""
        gradient = torch.empty_like(states, dtype=torch.float32)
        loss = variation = torch.zeros((), device=states.device)
        for row, given in enumerate(states):
            probs, mass, pulled = target.probs[row], target.mass[row], target.pulled[row]
            scores = F.linear(given.to(weight.dtype), weight).float().mul_(factor)
            norm = scores.logsumexp(dim=-1)
            entropy = mass * norm - factor * (given.float() * pulled).sum(dim=-1)
            drafted = scores.sub_(norm[:, None]).exp_()
            signs = (drafted - probs).sign_()
            toward = torch.linalg.vecdot(drafted, signs)
            # tokens outside the draft vocabulary are never drafted
            distance = 0.5 * (toward - torch.linalg.vecdot(probs, signs) + 1.0 - mass)
            loss = loss + (weights[row] * (share * entropy + (1 - share) * distance)).sum()
            variation = variation + (weights[row] * distance).sum()
            half = 0.5 * (1 - share)
            by_score = signs.mul_(half).add_((share * mass - half * toward)[:, None]).mul_(drafted)
            by_state = (by_score.to(weight.dtype) @ weight).float() - share * pulled
            gradient[row] = by_state * (factor * weights[row])[:, None]
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(variation)
        return loss, variation

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return gradient * given[0], None, None, None, None, None
