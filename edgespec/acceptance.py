"""Acceptance rules, lossless but for one: which tokens of a draft stand, and the one token that follows them.

Pure functions of a draft, the target's distributions and a source of choices; no engine, no logits, no text. A rule
asks for the target's distribution of a row only when all rows before it were accepted. Probabilities may be any
number type that numpy holds: the exactness tests run this very code on fractions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import CapabilityError
from edgespec.noise import Stream
from edgespec.types import Distribution, Draft, TokenIds, Verdict

ROOT = -1
_ONE: NDArray[Any] = np.ones(1, np.int64)
_TYPICAL_PROBABILITY, _TYPICAL_SHARE = 0.09, 0.3
TargetAt = Callable[[int, tuple[int, ...]], Distribution]
"""(node, path of accepted nodes ending in it) -> the target's distribution of the token that follows."""


class Choices(Protocol):
    """Where a rule's randomness comes from: `sampling.Sampler`, or an enumerator of all outcomes in tests."""

    def pick(self, distribution: Distribution, position: int, stream: Stream = ...) -> int: ...

    def accept(self, probability: float, position: int, attempt: int = ...) -> bool: ...


Rule = Callable[[Draft, TargetAt, Choices, int], Verdict]


def coupled(draft: Draft, target_at: TargetAt, choices: Choices, position: int) -> Verdict:
    """Walk the tree along the tokens that the target samples itself (Gumbel coupling, arXiv 2408.07978, alg. 1).

    `position` is that of the first drafted token. The emitted tokens are the target's own samples whatever the draft
    holds, so the text depends on seed and target alone; a drafter that reads the same noise agrees more often.
    """
    node = ROOT
    path: tuple[int, ...] = ()
    while True:
        token_id = choices.pick(target_at(node, path), position + len(path))
        child = draft.child_of(node, token_id)
        if child is None:
            return Verdict(path, token_id)
        node, path = child, (*path, child)


def rejection(draft: Draft, target_at: TargetAt, choices: Choices, position: int) -> Verdict:
    """Speculative sampling (Leviathan 2211.17192 alg. 1; Chen 2302.01318 alg. 2), of trees by recursion.

    The children of a node are tried in the order in which they were drawn (SpecInfer 2305.09781, alg. 2; Sequoia
    2402.12374, alg. 2). With r_1 = p, child i stands with probability min(1, r_i(x_i)/q_i(x_i)), and after its refusal
    r_(i+1) is max(r_i - q_i, 0) normalised; when none stands the next token is drawn from what is left, below a node
    without children from p. q_i is what child i was drawn from given the ones before it, so children drawn without
    replacement come with distributions that lack the earlier ones; a deterministic proposal has q = 1 at its token.
    """
    node = ROOT
    path: tuple[int, ...] = ()
    while True:
        remainder, accepted = target_at(node, path), None
        for attempt, child in enumerate(draft.children_of(node)):
            token_id, proposed = int(draft.token_ids[child]), _proposed(draft, child)
            ratio = remainder.prob_of(token_id) / proposed.prob_of(token_id)
            if choices.accept(ratio, position + len(path), attempt):
                accepted = child
                break
            remainder = residual(remainder, proposed)
        if accepted is None:
            return Verdict(path, choices.pick(remainder, position + len(path), Stream.RESIDUAL))
        node, path = accepted, (*path, accepted)


def block(draft: Draft, target_at: TargetAt, choices: Choices, position: int) -> Verdict:
    """Block verification of a chain (arXiv 2403.10444, alg. 2): never accepts fewer tokens than `rejection` on average.

    With p_0 = 1 and p_i = min(1, p_(i-1) p(x_i)/q(x_i)), the first i tokens are a candidate with probability
    Z_i / (Z_i + 1 - p_i), Z_i the sum of max(p_i p - q, 0) at the next token, and p_n for the whole draft; the longest
    candidate stands, so a failure is no end. The token after it is drawn from max(p_i p - q, 0) normalised, or from p.
    Where the draft ends may depend on its tokens, one after which it might have ended included. Raises CapabilityError
    for a tree with branches: what a sibling leaves over of p would depend on how far the block before it reached.
    """
    if not draft.is_chain:
        raise CapabilityError(
            "the block rule judges a draft as one chain and was given a tree; use --verify coupled or rejection for "
            "a drafter with branches, or a drafter without"
        )
    reach: Any = 1
    target = target_at(ROOT, ())
    kept, remainder = 0, target
    for node in range(draft.num_tokens):
        token_id = int(draft.token_ids[node])
        if node == 0:
            remainder = residual(target, _proposed(draft, 0))
        reach = min(1, reach * target.prob_of(token_id) / _proposed(draft, node).prob_of(token_id))
        if not reach:
            break
        target = target_at(node, tuple(range(node + 1)))
        is_last = node + 1 == draft.num_tokens
        excess = 0 if is_last else _excess(target, _proposed(draft, node + 1), reach).sum()
        # reach 1 without excess: target and draft agree on what follows, and the prefix stands for certain
        chance = reach if is_last or not excess + 1 - reach else excess / (excess + 1 - reach)
        # a later round may judge this position anew, and what was seen of this draw decided that it does
        if choices.accept(chance, position + node, node):
            kept = node + 1
            remainder = target if is_last else residual(target, _proposed(draft, node + 1), reach)
    return Verdict(tuple(range(kept)), choices.pick(remainder, position + kept, Stream.RESIDUAL))


def typical(draft: Draft, target_at: TargetAt, choices: Choices, position: int) -> Verdict:
    """Typical acceptance of any tree (Medusa, arXiv 2401.10774, section 3.2): LOSSY, the text is not the target's own.

    A token stands when p(x) > min(e, d * exp(-H(p))), H in nats, e 0.09, d 0.3 as in the paper's code; of several
    children the likeliest. At temperature 0 it accepts what the target picks, and nothing else.
    """
    node = ROOT
    path: tuple[int, ...] = ()
    while True:
        target = target_at(node, path)
        entropy = -float((target.probs * np.log(target.probs)).sum())
        threshold = min(_TYPICAL_PROBABILITY, _TYPICAL_SHARE * math.exp(-entropy))
        likely = [(target.prob_of(int(draft.token_ids[child])), -child) for child in draft.children_of(node)]
        probability, child = max(likely, default=(0.0, 0))
        if probability <= threshold:
            return Verdict(path, choices.pick(target, position + len(path)))
        node, path = -child, (*path, -child)


def _proposed(draft: Draft, node: int) -> Distribution:
    return draft.distributions[node] if draft.distributions is not None else _certain(int(draft.token_ids[node]))


def _certain(token_id: int) -> Distribution:
    """What a deterministic proposal was drawn from; an integer 1 is exact in every number type."""
    return Distribution(np.array([token_id], np.int32), _ONE)


def residual(target: Distribution, proposed: Distribution, reach: Any = 1) -> Distribution:
    """max(reach * p - q, 0), normalised; p itself when rounding leaves nothing."""
    excess = _excess(target, proposed, reach)
    kept = excess > 0
    if not kept.any():
        return target
    return Distribution(target.token_ids[kept], excess[kept] / excess[kept].sum())


def _excess(target: Distribution, proposed: Distribution, reach: Any) -> NDArray[Any]:
    """max(reach * p - q, 0) of the tokens of p; those of q alone have none."""
    excess: NDArray[Any] = np.maximum(reach * target.probs - _probs_at(proposed, target.token_ids), 0)
    return excess


def _probs_at(distribution: Distribution, token_ids: TokenIds) -> NDArray[Any]:
    """Probabilities of `token_ids` [m] under a sparse distribution, 0 where it lacks the token."""
    order = np.argsort(distribution.token_ids)
    known = distribution.token_ids[order]
    slots = np.minimum(np.searchsorted(known, token_ids), known.size - 1)
    probs = distribution.probs[order][slots]
    return np.where(known[slots] == token_ids, probs, 0)


RULES: dict[str, Rule] = {"coupled": coupled, "rejection": rejection, "block": block, "typical": typical}
COMPARING = frozenset({rejection, block})  # rules that need the distribution that a token was drafted from
CHAINS_ONLY = frozenset({block})
LOSSY = frozenset({"typical"})
