"""Acceptance rules: exact laws through the production code, on rational numbers."""

from __future__ import annotations

from collections import defaultdict
from fractions import Fraction

import numpy as np
import pytest

from edgespec.config.options import Sampling
from edgespec.sampling import Sampler
from edgespec.sampling.acceptance import block, coupled, rejection, residual, typical
from edgespec.sampling.noise import Stream
from edgespec.types import Distribution, Draft, Verdict
from exact import Enumerator, Law, Prefix, assert_same_law, outcomes, random_law


def emitted_tokens(draft: Draft, verdict: Verdict) -> Prefix:
    return (*(int(draft.token_ids[node]) for node in verdict.accepted_nodes), verdict.next_token_id)


def target_at(draft: Draft, target: Law):
    return lambda node, path: target(tuple(int(draft.token_ids[i]) for i in path))


def sample_chain(choices: Enumerator, law: Law, length: int) -> Draft:
    chosen: list[int] = []
    distributions: list[Distribution] = []
    for _ in range(length):
        distributions.append(law(tuple(chosen)))
        chosen.append(choices.pick(distributions[-1], len(chosen), Stream.DRAFT))
    return Draft.chain(chosen, None, distributions)


@pytest.mark.parametrize("vocabulary, length", [(2, 1), (2, 4), (3, 2), (3, 3), (4, 2), (4, 3)])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("rule", [rejection, block])
def test_a_sampled_draft_is_exact(vocabulary: int, length: int, seed: int, rule) -> None:
    target, drafts = random_law(vocabulary, seed), random_law(vocabulary, seed + 100)

    def trial(choices: Enumerator) -> Prefix:
        draft = sample_chain(choices, drafts, length)
        return emitted_tokens(draft, rule(draft, target_at(draft, target), choices, 0))

    law: dict[Prefix, Fraction] = defaultdict(Fraction)
    for weight, tokens in outcomes(trial):
        law[tokens] += weight
    assert_same_law(law, target, vocabulary, length + 1)


@pytest.mark.parametrize("rule", [coupled, rejection, block])
@pytest.mark.parametrize("tokens", [(0,), (1, 1, 2), (2, 0, 1), (3, 3, 3, 3), ()])
def test_any_deterministic_chain_is_exact(rule, tokens: Prefix) -> None:
    target = random_law(4, seed=7)
    draft = Draft.chain(tokens)
    law: dict[Prefix, Fraction] = defaultdict(Fraction)
    for weight, emitted in outcomes(
        lambda choices: emitted_tokens(draft, rule(draft, target_at(draft, target), choices, 0))
    ):
        law[emitted] += weight
    assert_same_law(law, target, 4, len(tokens) + 1)


@pytest.mark.parametrize("seed", range(20))
def test_coupled_is_exact_for_any_tree(seed: int) -> None:
    rng = np.random.default_rng(seed)
    size = int(rng.integers(1, 10))
    parents = np.array([rng.integers(-1, i) for i in range(size)], np.int32)
    draft = Draft(rng.integers(0, 3, size).astype(np.int32), parents, np.ones(size, np.float32))
    target = random_law(3, seed)
    law: dict[Prefix, Fraction] = defaultdict(Fraction)
    for weight, emitted in outcomes(
        lambda choices: emitted_tokens(draft, coupled(draft, target_at(draft, target), choices, 0))
    ):
        law[emitted] += weight
    assert_same_law(law, target, 3, max(len(tokens) for tokens in law))


def test_dropping_a_sampled_token_afterwards_would_be_caught() -> None:
    """The trap of ALGORITHMS 2: a draft that hides unlikely samples biases rejection, and the enumeration sees it."""
    target, drafts = random_law(3, 1), random_law(3, 101)

    def trial(choices: Enumerator) -> Prefix:
        draft = sample_chain(choices, drafts, 1)
        if drafts(()).prob_of(int(draft.token_ids[0])) < Fraction(1, 3):
            draft = Draft.chain([])
        return emitted_tokens(draft, rejection(draft, target_at(draft, target), choices, 0))

    law: dict[Prefix, Fraction] = defaultdict(Fraction)
    for weight, tokens in outcomes(trial):
        law[tokens] += weight
    with pytest.raises(AssertionError):
        assert_same_law(law, target, 3, 2)


def test_rules_ask_only_for_rows_behind_accepted_ones() -> None:
    asked: list[int] = []

    def lazy(node: int, path: tuple[int, ...]) -> Distribution:
        asked.append(node)
        return Distribution(np.array([5], np.int32), np.ones(1))

    for rule in (coupled, rejection):
        asked.clear()
        verdict = rule(Draft.chain([5, 4, 5]), lazy, Sampler(Sampling(), 10), 0)
        assert verdict == Verdict((0,), 5)
        assert asked == [-1, 0]


def test_residual_of_equal_distributions_is_the_target() -> None:
    same = Distribution(np.array([3, 1], np.int32), np.array([0.5, 0.5]))
    assert residual(same, same) is same


@pytest.mark.parametrize("rule", [rejection, block])
@pytest.mark.parametrize("seed", range(3))
def test_a_draft_that_ends_where_its_own_tokens_say_is_exact(seed: int, rule) -> None:
    """The controller stops a draft behind a doubtful token, so where it ends depends on the tokens up to there."""
    target, drafts = random_law(3, seed), random_law(3, seed + 100)

    def trial(choices: Enumerator) -> Prefix:
        draft = sample_chain(choices, drafts, 3)
        length = next((i + 1 for i, token in enumerate(draft.token_ids) if token == 1), 3)
        draft = draft.first(length)
        return emitted_tokens(draft, rule(draft, target_at(draft, target), choices, 0))

    law: dict[Prefix, Fraction] = defaultdict(Fraction)
    for weight, tokens in outcomes(trial):
        law[tokens] += weight
    assert_same_law(law, target, 3, 4)


@pytest.mark.parametrize("seed", range(10))
def test_block_accepts_at_least_as_many_tokens_as_rejection(seed: int) -> None:
    target, drafts = random_law(3, seed), random_law(3, seed + 100)

    def mean_accepted(rule) -> Fraction:
        def trial(choices: Enumerator) -> int:
            draft = sample_chain(choices, drafts, 3)
            return len(rule(draft, target_at(draft, target), choices, 0).accepted_nodes)

        return sum((weight * accepted for weight, accepted in outcomes(trial)), Fraction(0))

    assert mean_accepted(block) >= mean_accepted(rejection)


@pytest.mark.parametrize(
    "probs, token, stands",
    [
        ((0.5, 0.5), 0, True),
        ((0.92, 0.08), 1, False),  # below the fixed threshold of .09
        ((0.9, 0.1), 1, True),
        ((0.05,) * 20, 3, True),  # entropy ln 20: the threshold is .3 / 20
    ],
)
def test_typical_accepts_what_is_likely_enough_for_the_entropy(probs, token: int, stands: bool) -> None:
    law = Distribution(np.arange(len(probs), dtype=np.int32), np.array(probs))
    verdict = typical(Draft.chain([token]), lambda node, path: law, Sampler(Sampling(seed=1), 32), 0)
    assert bool(verdict.accepted_nodes) == stands


def test_typical_takes_the_likeliest_branch_and_at_temperature_0_only_the_targets_own() -> None:
    tree = Draft(np.array([1, 2, 5], np.int32), np.array([-1, -1, 1], np.int32), np.ones(3, np.float32))
    law = Distribution(np.array([1, 2, 5], np.int32), np.array([0.2, 0.5, 0.3]))
    assert typical(tree, lambda node, path: law, Sampler(Sampling(seed=1), 32), 0).accepted_nodes == (1, 2)
    greedy = Distribution(np.array([7], np.int32), np.ones(1))
    assert typical(tree, lambda node, path: greedy, Sampler(Sampling(temperature=0), 32), 0) == Verdict((), 7)
