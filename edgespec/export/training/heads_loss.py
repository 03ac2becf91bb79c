"""How far drafts of heads are from what the target says, with a gradient that is written out by hand.

Scores over a vocabulary are nearly all that training heads costs, and autograd walks over them about fifteen times a
drafted token, from memory. Here one row of text at a time goes through, which stays in a processor's cache, and what
is left of it is the gradient of the predicted states.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Wanted:
    """The target at every position of `rows` windows, over the draft vocabulary of m tokens.

    `probs` [rows, length, m], which lack what lies outside that vocabulary, `mass` [rows, length] their sums, `pulled`
    [rows, length, hidden] the rows of the target's head weighed by them.
    """

    probs: Tensor
    mass: Tensor
    pulled: Tensor

    def at(self, places: slice) -> Wanted:
        return Wanted(self.probs[:, places], self.mass[:, places], self.pulled[:, places])


@torch.no_grad()
def wanted_of(states: Tensor, head: Tensor, token_ids: Tensor, factor: float) -> Wanted:
    """What `states` [rows, length, hidden] of the target say: softmax of `factor` times its `head`'s scores.

    `head` [vocabulary, hidden], of which `token_ids` [m] may be drafted. In the type of `head`, sums in float32.
    """
    rows = head[token_ids]
    is_whole = len(token_ids) == len(head)
    probs = states.new_empty((*states.shape[:2], len(token_ids)), dtype=torch.float32)
    pulled = torch.empty_like(states, dtype=torch.float32)
    for row, given in enumerate(states):
        scores = F.linear(given.to(head.dtype), head).float().mul_(factor)
        said = scores.softmax(dim=-1)
        probs[row] = said if is_whole else said[:, token_ids]
        pulled[row] = probs[row].to(head.dtype) @ rows
    return Wanted(probs, probs.sum(dim=-1), pulled)


class DraftLoss(torch.autograd.Function):
    """(loss, total variation), both summed by weight, of predicted states to what the target says there.

    The loss is `share` of cross-entropy and the rest total variation. With q the softmax of z = factor W h, p the
    target's probabilities of mass P, and s the signs of q - p, the gradients by z are P q - p of the cross-entropy, and
    q (s - q.s) / 2 of the distance.
    """

    @staticmethod
    def forward(
        ctx: Any, states: Tensor, weight: Tensor, wanted: Wanted, weights: Tensor, factor: float, share: float
    ) -> tuple[Tensor, Tensor]:
        """`states` [rows, n, hidden], `weight` [m, hidden] in the type to compute in, `weights` [rows, n]."""
        gradient = torch.empty_like(states, dtype=torch.float32)
        loss = variation = torch.zeros((), device=states.device)
        for row, given in enumerate(states):
            probs, mass, pulled = wanted.probs[row], wanted.mass[row], wanted.pulled[row]
            scores = F.linear(given.to(weight.dtype), weight).float().mul_(factor)
            norm = scores.logsumexp(dim=-1)
            entropy = mass * norm - factor * (given.float() * pulled).sum(dim=-1)
            drafted = scores.sub_(norm[:, None]).exp_()
            signs = (drafted - probs).sign_()
            toward = torch.linalg.vecdot(drafted, signs)
            # what lies outside the draft vocabulary is missed for certain
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
