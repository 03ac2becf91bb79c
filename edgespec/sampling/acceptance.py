"""Acceptance rules: which tokens of a draft are accepted, and which token follows them. All but `typical` are lossless.

Pure functions of a draft, the target's distributions and a source of random choices. A rule reads the target's
distribution after a node only once that node is accepted, `block` once it may be. Probabilities may have any number
type that numpy holds: the exactness tests run this code on fractions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import CapabilityError
from edgespec.sampling.noise import Stream
from edgespec.types import Distribution, Draft, TokenIds, Verdict

ROOT = -1
_ONE: NDArray[Any] = np.ones(1, np.int64)
_TYPICAL_PROBABILITY, _TYPICAL_SHARE = 0.09, 0.3
TargetAt = Callable[[int, tuple[int, ...]], Distribution]
"""(node, path of accepted nodes that ends in it) -> the target's distribution of the next token."""


class Choices(Protocol):
    """Source of a rule's random choices: `sampling.sampler.Sampler`, or an enumerator of all outcomes in tests."""

    def pick(self, distribution: Distribution, position: int, stream: Stream = ...) -> int: ...

    def accept(self, probability: float, position: int, attempt: int = ...) -> bool: ...


Rule = Callable[[Draft, TargetAt, Choices, int], Verdict]


def coupled(draft: Draft, target_at: TargetAt, choices: Choices, position: int) -> Verdict:
    """Follow the tokens that the target samples itself through the tree (Gumbel coupling, arXiv 2408.07978, alg. 1).

    `position`: that of the first drafted token. All emitted tokens are the target's own samples, so the text depends
    on seed and target only. A drafter that samples with the same noise is accepted more often.
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
    """Speculative sampling of a chain (Leviathan, arXiv 2211.17192, alg. 1; Chen, 2302.01318, alg. 2).

    A token x drawn from q is accepted with probability min(1, p(x)/q(x)); where it is rejected, the next token is drawn
    from max(p - q, 0), normalised, and behind the whole draft from p. A deterministic proposal has q = 1 at its token.
    Raises CapabilityError for a tree with branches.
    """
    _check_chain(draft, "rejection")
    for node in range(draft.num_tokens):
        path = tuple(range(node))
        target, proposed = target_at(node - 1, path), _proposed(draft, node)
        token_id = int(draft.token_ids[node])
        if not choices.accept(target.prob_of(token_id) / proposed.prob_of(token_id), position + node):
            return Verdict(path, choices.pick(residual(target, proposed), position + node, Stream.RESIDUAL))
    path, last = tuple(range(draft.num_tokens)), draft.num_tokens - 1
    return Verdict(path, choices.pick(target_at(last, path), position + draft.num_tokens, Stream.RESIDUAL))


def block(draft: Draft, target_at: TargetAt, choices: Choices, position: int) -> Verdict:
    """Block verification of a chain (arXiv 2403.10444, alg. 2): on average accepts at least as many as `rejection`.

    With p_0 = 1 and p_i = min(1, p_(i-1) p(x_i)/q(x_i)), the first i tokens are a candidate with probability
    Z_i / (Z_i + 1 - p_i), where Z_i is the sum of max(p_i p - q, 0) at the next token; the whole draft is one with
    probability p_n. The longest candidate is accepted, so all positions are tried. The next token is drawn from
    max(p_i p - q, 0), normalised, or from p after the whole draft. The draft's length may depend on its tokens.
    Raises CapabilityError for a tree with branches: the residual of p after a sibling would depend on the block.
    """
    _check_chain(draft, "block")
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
        # reach 1 without excess: target and draft have the same next distribution, so the prefix is accepted for sure
        chance = reach if is_last or not excess + 1 - reach else excess / (excess + 1 - reach)
        # one draw index per node: a later round may test this position again, because of this draw's outcome
        if choices.accept(chance, position + node, node):
            kept = node + 1
            remainder = target if is_last else residual(target, _proposed(draft, node + 1), reach)
    return Verdict(tuple(range(kept)), choices.pick(remainder, position + kept, Stream.RESIDUAL))


def typical(draft: Draft, target_at: TargetAt, choices: Choices, position: int) -> Verdict:
    """Typical acceptance of any tree (Medusa, arXiv 2401.10774, section 3.2). LOSSY: changes the output distribution.

    A token is accepted if p(x) > min(e, d * exp(-H(p))), with H in nats, e = 0.09 and d = 0.3 as in the paper's code.
    Among several children the most likely one is tested. At temperature 0 it equals greedy decoding.
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


def _check_chain(draft: Draft, rule: str) -> None:
    if not draft.is_chain:
        raise CapabilityError(
            f"--verify {rule} needs a chain but was given a tree; use --verify coupled, or a drafter that drafts chains"
        )


def _proposed(draft: Draft, node: int) -> Distribution:
    if draft.distributions is not None:
        return draft.distributions[node]
    return Distribution(draft.token_ids[node : node + 1], _ONE)  # the integer 1 is exact in every number type


def residual(target: Distribution, proposed: Distribution, reach: Any = 1) -> Distribution:
    """max(reach * p - q, 0), normalised; p itself if rounding leaves no mass."""
    excess = _excess(target, proposed, reach)
    kept = excess > 0
    if not kept.any():
        return target
    return Distribution(target.token_ids[kept], excess[kept] / excess[kept].sum())


def _excess(target: Distribution, proposed: Distribution, reach: Any) -> NDArray[Any]:
    """max(reach * p - q, 0) [m] at the token ids [m] of p; it is 0 everywhere else."""
    excess: NDArray[Any] = np.maximum(reach * target.probs - _probs_at(proposed, target.token_ids), 0)
    return excess


def _probs_at(distribution: Distribution, token_ids: TokenIds) -> NDArray[Any]:
    """Probabilities [m] of `token_ids` [m] under a sparse distribution; 0 for tokens that it does not contain."""
    order = np.argsort(distribution.token_ids)
    known = distribution.token_ids[order]
    slots = np.minimum(np.searchsorted(known, token_ids), known.size - 1)
    probs = distribution.probs[order][slots]
    return np.where(known[slots] == token_ids, probs, 0)


RULES: dict[str, Rule] = {"coupled": coupled, "rejection": rejection, "block": block, "typical": typical}
COMPARING = frozenset({rejection, block})  # rules of chains that need the distribution that each token was drafted from
