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
from edgespec.sampling.acceptance import block, coupled, rejection, typical
from edgespec.sampling.noise import Stream
from edgespec.types import Distribution, Draft, Verdict
from exact import Enumerator, Law, Prefix, assert_same_law, outcomes, random_law

VOCABULARY, NO_TOKEN = 3, 99
TELLING = 1, 101  # seeds of laws in which a bias shows
# depth up to 3 and width up to 3, with as few further nodes as the number of outcomes allows
SHAPES = [(-1, -1, -1), (-1, 0, -1, 2), (-1, 0, 0, 0), (-1, 0, 1, -1), (-1, -1, 0, 1, 1), (-1, -1, -1, 0, 3)]
FULL = (-1, -1, -1, *(parent for parent in range(12) for _ in range(3)))  # depth 3, width 3: 39 nodes


def tree(token_ids, parents, distributions=None) -> Draft:
    ids = np.array(token_ids, np.int32)
    return Draft(ids, np.array(parents, np.int32), np.ones(ids.size, np.float32), distributions)


def path_tokens(draft: Draft, node: int) -> Prefix:
    found: list[int] = []
    while node >= 0:
        found.append(int(draft.token_ids[node]))
        node = int(draft.parents[node])
    return tuple(reversed(found))


def without(distribution: Distribution, taken: set[int]) -> Distribution | None:
    """The distribution without the tokens that were drawn before; None when nothing is left of it."""
    kept = [place for place, token in enumerate(distribution.token_ids) if int(token) not in taken]
    if not kept:
        return None
    probs = distribution.probs[kept]
    return Distribution(distribution.token_ids[kept], probs / probs.sum())


def drawn_tree(choices: Enumerator, law: Law, grows: Callable[[list[int], list[int]], int | None]) -> Draft:
    """A tree whose children are drawn without replacement; `grows` names the parent of the next node, or None."""
    tokens: list[int] = []
    parents: list[int] = []
    distributions: list[Distribution] = []
    while (parent := grows(tokens, parents)) is not None:
        so_far = tree(tokens, parents)
        taken = {tokens[node] for node in so_far.children_of(parent)}
        path = path_tokens(so_far, parent)
        left = None if NO_TOKEN in path else without(law(path), taken)
        if left is None:  # nothing is left to draw: a node that no target accepts holds the place
            left = Distribution(np.array([NO_TOKEN], np.int32), np.array([Fraction(1)], dtype=object))
        tokens.append(choices.pick(left, 0, Stream.DRAFT))
        parents.append(parent)
        distributions.append(left)
    return tree(tokens, parents, tuple(distributions))


def fixed(shape: Prefix) -> Callable[[list[int], list[int]], int | None]:
    return lambda tokens, parents: shape[len(parents)] if len(parents) < len(shape) else None


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


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("seed", range(2))
def test_children_drawn_without_replacement_are_exact(shape: Prefix, seed: int) -> None:
    target, drafts = random_law(VOCABULARY, seed), random_law(VOCABULARY, seed + 100)
    assert_exact(lambda choices: emitted(rejection, drawn_tree(choices, drafts, fixed(shape)), target, choices), target)


@pytest.mark.parametrize("rule", [coupled, rejection])
@pytest.mark.parametrize("shape", [*SHAPES, FULL])
@pytest.mark.parametrize("seed", range(3))
def test_any_deterministic_tree_is_exact(rule, shape: Prefix, seed: int) -> None:
    """Repeated siblings included: a full tree of random tokens has many."""
    tokens = np.random.default_rng(seed).integers(0, VOCABULARY, len(shape))
    draft, target = tree(tokens, shape), random_law(VOCABULARY, seed)
    assert_exact(lambda choices: emitted(rule, draft, target, choices), target)


@pytest.mark.parametrize("seed", range(3))
def test_a_tree_that_grows_by_what_it_holds_already_is_exact(seed: int) -> None:
    """Best first: whether a node gets a child, and a sibling after it, depends on the tokens before."""
    target, drafts = random_law(VOCABULARY, seed), random_law(VOCABULARY, seed + 100)

    def grows(tokens: list[int], parents: list[int]) -> int | None:
        if len(tokens) < 2:
            return len(tokens) - 1
        if len(tokens) == 2:
            return -1 if tokens[1] == 0 else 1
        if len(tokens) == 3:
            return 2 if tokens[2] == tokens[0] else -1
        return None

    assert_exact(lambda choices: emitted(rejection, drawn_tree(choices, drafts, grows), target, choices), target)


def biased(draft: Draft) -> Draft:
    """The second child is dropped where it is token 2: what the rule must never be given."""
    return draft.first(1) if draft.token_ids[1] == 2 else draft


def misled(draft: Draft) -> Draft:
    """The second child's distribution still holds the first one."""
    assert draft.distributions is not None
    return tree(draft.token_ids, draft.parents, (draft.distributions[0],) * 2)


@pytest.mark.parametrize("spoil", [biased, misled])
def test_what_would_bias_the_text_is_seen(spoil: Callable[[Draft], Draft]) -> None:
    target, drafts = random_law(VOCABULARY, TELLING[0]), random_law(VOCABULARY, TELLING[1])
    assert drafts(()).token_ids.size == VOCABULARY
    with pytest.raises(AssertionError):
        assert_exact(
            lambda choices: emitted(rejection, spoil(drawn_tree(choices, drafts, fixed((-1, -1)))), target, choices),
            target,
        )


@pytest.mark.parametrize("seed", range(5))
def test_a_second_child_is_accepted_more_often_than_none(seed: int) -> None:
    target, drafts = random_law(VOCABULARY, seed), random_law(VOCABULARY, seed + 100)

    def mean_accepted(shape: Prefix) -> Fraction:
        def trial(choices: Enumerator) -> int:
            draft = drawn_tree(choices, drafts, fixed(shape))
            verdict = rejection(draft, lambda node, path: target(path_tokens(draft, node)), choices, 0)
            return len(verdict.accepted_nodes)

        return sum((weight * accepted for weight, accepted in outcomes(trial)), Fraction(0))

    assert mean_accepted((-1,)) <= mean_accepted((-1, -1)) <= mean_accepted((-1, -1, -1))


def test_the_attempts_of_one_position_are_independent() -> None:
    """Two siblings of which each stands with one half: both are refused a quarter of the time."""
    half = Distribution(np.array([0, 1, 2], np.int32), np.array([0.5, 0.25, 0.25]))
    draft = tree([0, 1], [-1, -1])
    verdicts = [rejection(draft, lambda node, path: half, Sampler(Sampling(seed=seed), 4), 7) for seed in range(4000)]
    refused = np.mean([verdict.next_token_id == 2 and not verdict.accepted_nodes for verdict in verdicts])
    assert refused == pytest.approx(0.25, abs=0.03)  # four standard deviations


def test_the_block_rule_says_why_it_takes_no_tree() -> None:
    with pytest.raises(CapabilityError, match="needs a chain but was given a tree; use verify='coupled' or rejection"):
        block(tree([1, 2], [-1, -1]), lambda node, path: random_law(3, 0)(()), Enumerator([]), 0)


def test_typical_walks_to_the_end_of_the_likeliest_branch() -> None:
    law = Distribution(np.array([0, 1, 2], np.int32), np.array([0.3, 0.5, 0.2]))
    draft = tree([0, 1, 2, 1, 0], [-1, -1, 1, 1, 3])
    assert typical(draft, lambda node, path: law, Sampler(Sampling(seed=1), 3), 0).accepted_nodes == (1, 3, 4)


def test_rules_ask_for_rows_on_the_accepted_path_only() -> None:
    asked: list[int] = []

    def lazy(node: int, path: tuple[int, ...]) -> Distribution:
        asked.append(node)
        return Distribution(np.array([5], np.int32), np.ones(1))

    for rule in (coupled, rejection):
        asked.clear()
        verdict = rule(tree([4, 5, 4, 5, 6], [-1, -1, 0, 1, 3]), lazy, Sampler(Sampling(), 10), 0)
        assert verdict == Verdict((1, 3), 5)
        assert asked == [-1, 1, 3]
