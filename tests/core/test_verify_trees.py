"""Acceptance rules on drafts with branches: exact laws through the production code, on rational numbers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest

from edgespec.config.options import Sampling
from edgespec.errors import CapabilityError
from edgespec.sampling import Sampler
from edgespec.sampling.acceptance import Rule, block, coupled, rejection, typical
from edgespec.types import Distribution, Draft, Verdict
from exact import Enumerator, Law, Prefix, assert_same_law, outcomes, random_law

VOCABULARY = 3
# depth up to 3 and width up to 3, with as few further nodes as the number of outcomes allows
SHAPES = [(-1, -1, -1), (-1, 0, -1, 2), (-1, 0, 0, 0), (-1, 0, 1, -1), (-1, -1, 0, 1, 1), (-1, -1, -1, 0, 3)]
FULL = (-1, -1, -1, *(parent for parent in range(12) for _ in range(3)))  # depth 3, width 3: 39 nodes


def tree(token_ids, parents, distributions=None) -> Draft:
    ids = np.array(token_ids, np.int32)
    return Draft(ids, np.array(parents, np.int32), np.ones(ids.size, np.float32), distributions)


def law_of(trial: Callable[[Enumerator], Prefix]) -> dict[Prefix, Fraction]:
    law: dict[Prefix, Fraction] = defaultdict(Fraction)
    for weight, tokens in outcomes(trial):
        law[tokens] += weight
    return law


def emitted(rule, draft: Draft, target: Law, choices: Enumerator) -> Prefix:
    verdict = rule(draft, lambda node, path: target(tuple(int(draft.token_ids[each]) for each in path)), choices, 0)
    return (*(int(draft.token_ids[node]) for node in verdict.accepted_nodes), verdict.next_token_id)


def assert_exact(trial: Callable[[Enumerator], Prefix], target: Law) -> None:
    law = law_of(trial)
    assert_same_law(law, target, VOCABULARY, max(map(len, law)))


@pytest.mark.parametrize("shape", [*SHAPES, FULL])
@pytest.mark.parametrize("seed", range(3))
def test_any_deterministic_tree_is_exact(shape: Prefix, seed: int) -> None:
    """Repeated siblings included: a full tree of random tokens has many."""
    tokens = np.random.default_rng(seed).integers(0, VOCABULARY, len(shape))
    draft, target = tree(tokens, shape), random_law(VOCABULARY, seed)
    assert_exact(lambda choices: emitted(coupled, draft, target, choices), target)


@pytest.mark.parametrize("rule", [rejection, block])
def test_a_rule_that_compares_distributions_says_why_it_takes_no_tree(rule: Rule) -> None:
    with pytest.raises(CapabilityError, match="needs a chain but was given a tree; use verify='coupled'"):
        rule(tree([1, 2], [-1, -1]), lambda node, path: random_law(3, 0)(()), Enumerator([]), 0)


def test_typical_walks_to_the_end_of_the_likeliest_branch() -> None:
    law = Distribution(np.array([0, 1, 2], np.int32), np.array([0.3, 0.5, 0.2]))
    draft = tree([0, 1, 2, 1, 0], [-1, -1, 1, 1, 3])
    assert typical(draft, lambda node, path: law, Sampler(Sampling(seed=1), 3), 0).accepted_nodes == (1, 3, 4)


def test_rules_ask_for_rows_on_the_accepted_path_only() -> None:
    asked: list[int] = []

    def lazy(node: int, path: tuple[int, ...]) -> Distribution:
        asked.append(node)
        return Distribution(np.array([5], np.int32), np.ones(1))

    verdict = coupled(tree([4, 5, 4, 5, 6], [-1, -1, 0, 1, 3]), lazy, Sampler(Sampling(), 10), 0)
    assert verdict == Verdict((1, 3), 5)
    assert asked == [-1, 1, 3]
