"""What drafts with branches are worth, and what their outcome teaches: a node stands only if its whole path does."""

from __future__ import annotations

from collections.abc import Sequence

from edgespec.control.length import best_length
from edgespec.types import Draft, Verdict


def path_products(draft: Draft, confidences: Sequence[float]) -> list[float]:
    """The probability of every node's whole path, from those of the nodes given their parents."""
    found: list[float] = []
    for parent, confidence in zip(draft.parents.tolist(), confidences, strict=True):
        found.append(confidence * (found[parent] if parent >= 0 else 1.0))
    return found


def best_nodes(
    draft: Draft,
    confidences: Sequence[float],
    pass_s: Sequence[float],
    ahead_s: Sequence[float],
    rate: float,
    most: int,
) -> tuple[int, float]:
    """(first nodes to keep, gain in tokens over a plain round), as `best_length`.

    Of a draft with branches either all nodes are kept, or as much of the main chain, which is listed first, as pays.
    """
    length = draft.main_chain.num_tokens
    kept, gain = best_length(confidences[:length], pass_s, ahead_s, rate, most)
    if length < draft.num_tokens <= most:
        whole = sum(path_products(draft, confidences)) - rate * (pass_s[draft.num_tokens + 1] - pass_s[1])
        if whole > gain:
            return draft.num_tokens, whole
    return kept, gain


def outcomes(draft: Draft, verdict: Verdict) -> list[tuple[int, int, bool]]:
    """(node, its depth, whether it stood) of every node whose parent stood; a chain's end with its first refusal."""
    accepted = set(verdict.accepted_nodes)
    found = []
    for depth, parent in enumerate((-1, *verdict.accepted_nodes)):
        found += [(child, depth, child in accepted) for child in draft.children_of(parent)]
    return found
