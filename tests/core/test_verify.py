"""Acceptance rules: exact laws through the production code, on rational numbers. A chain is a tree of one branch."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from edgespec.config.options import Sampling
from edgespec.errors import CapabilityError
from edgespec.sampling.acceptance import block, coupled, rejection, residual, typical
from edgespec.sampling.noise import Stream
from edgespec.sampling.sampler import Sampler
from edgespec.types import Distribution, Draft, Verdict

Prefix = tuple[int, ...]
Law = Callable[[Prefix], Distribution]
GoesOn = Callable[[list[int]], bool]
"""Whether a chain of these tokens gets another."""
# depth up to 3 and width up to 3, with as few further nodes as the number of outcomes allows
SHAPES = [(-1, -1, -1), (-1, 0, -1, 2), (-1, 0, 0, 0), (-1, 0, 1, -1), (-1, -1, 0, 1, 1), (-1, -1, -1, 0, 3)]
FULL = (-1, -1, -1, *(parent for parent in range(12) for _ in range(3)))  # depth 3, width 3: 39 nodes


class Enumerator:
    """A source of choices that replays a script and lists the alternatives it meets beyond it."""

    def __init__(self, script: list[int]) -> None:
        self.script = script
        self.sizes: list[int] = []
        self.weight = Fraction(1)

    def _choose(self, weights: list[Fraction]) -> int:
        at = len(self.sizes)
        if at == len(self.script):
            self.script.append(0)
        self.sizes.append(len(weights))
        self.weight *= weights[self.script[at]]
        return self.script[at]

    def pick(self, distribution: Distribution, position: int, stream: Stream = Stream.TARGET) -> int:
        return int(distribution.token_ids[self._choose(list(distribution.probs))])

    def accept(self, probability: Fraction, position: int, attempt: int = 0) -> bool:
        chance = min(Fraction(1), Fraction(probability))
        return self._choose([chance, 1 - chance]) == 0


def outcomes(trial: Callable[[Enumerator], Any]) -> Iterator[tuple[Fraction, Any]]:
    """(weight, result) of `trial` under every script of choices; weights sum to 1."""
    script: list[int] = []
    while True:
        choices = Enumerator(script)
        result = trial(choices)
        if choices.weight:
            yield choices.weight, result
        script = choices.script[: len(choices.sizes)]
        while script and script[-1] + 1 == choices.sizes[len(script) - 1]:
            script.pop()
        if not script:
            return
        script[-1] += 1


def random_law(vocabulary: int, seed: int) -> Law:
    """A distribution for every prefix: small random fractions, some of them zero."""

    def law(prefix: Prefix) -> Distribution:
        rng = np.random.default_rng([seed, len(prefix), *prefix])
        counts = rng.integers(0, 5, vocabulary)
        counts[rng.integers(vocabulary)] += 1
        ids = np.flatnonzero(counts).astype(np.int32)
        total = int(counts.sum())
        return Distribution(ids, np.array([Fraction(int(counts[i]), total) for i in ids], dtype=object))

    return law


def sequence_probability(law: Law, sequence: Prefix, start: int = 0) -> Fraction:
    """Probability of `sequence[start:]` after `sequence[:start]`."""
    found: Any = np.prod([law(sequence[:i]).prob_of(sequence[i]) for i in range(start, len(sequence))], initial=1)
    return Fraction(found)


def assert_same_law(emitted: dict[Prefix, Fraction], target: Law, vocabulary: int, length: int) -> None:
    """The law of the emitted tokens, continued by the target to `length`, is exactly the target's own."""
    assert sum(emitted.values()) == 1
    for sequence in itertools.product(range(vocabulary), repeat=length):
        mass = sum(
            emitted.get(sequence[:cut], Fraction(0)) * sequence_probability(target, sequence, cut)
            for cut in range(1, length + 1)
        )
        assert mass == sequence_probability(target, sequence), sequence


def tree(token_ids, parents, distributions=None) -> Draft:
    ids = np.array(token_ids, np.int32)
    return Draft(ids, np.array(parents, np.int32), np.ones(ids.size, np.float32), distributions)


def drawn(choices: Enumerator, law: Law, goes_on: GoesOn) -> Draft:
    """A chain that is sampled from the drafts' law for as long as `goes_on(tokens)`."""
    tokens: list[int] = []
    distributions: list[Distribution] = []
    while goes_on(tokens):
        distributions.append(law(tuple(tokens)))
        tokens.append(choices.pick(distributions[-1], 0, Stream.DRAFT))
    return tree(tokens, range(-1, len(tokens) - 1), tuple(distributions))


def chain(length: int) -> GoesOn:
    return lambda tokens: len(tokens) < length


def judged(rule, draft: Draft, target: Law, choices: Enumerator) -> Verdict:
    verdict: Verdict = rule(draft, lambda node, path: target(tuple(int(draft.token_ids[i]) for i in path)), choices, 0)
    return verdict


def assert_exact(rule, made: Callable[[Enumerator], Draft], target: Law, vocabulary: int = 3) -> None:
    """What a rule emits of these drafts, continued by the target, has the target's own law."""
    law: dict[Prefix, Fraction] = defaultdict(Fraction)

    def trial(choices: Enumerator) -> Prefix:
        draft = made(choices)
        verdict = judged(rule, draft, target, choices)
        return (*(int(draft.token_ids[node]) for node in verdict.accepted_nodes), verdict.next_token_id)

    for weight, tokens in outcomes(trial):
        law[tokens] += weight
    assert_same_law(law, target, vocabulary, max(map(len, law)))


def laws(seed: int, vocabulary: int = 3) -> tuple[Law, Law]:
    """Of the target, and of the drafts."""
    return random_law(vocabulary, seed), random_law(vocabulary, seed + 100)


@pytest.mark.parametrize("vocabulary, length", [(2, 1), (2, 4), (3, 2), (3, 3), (4, 2), (4, 3)])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("rule", [rejection, block])
def test_a_sampled_chain_is_exact(vocabulary: int, length: int, seed: int, rule) -> None:
    target, drafts = laws(seed, vocabulary)
    assert_exact(rule, lambda choices: drawn(choices, drafts, chain(length)), target, vocabulary)


@pytest.mark.parametrize("rule", [coupled, rejection, block])
@pytest.mark.parametrize("tokens", [(0,), (1, 1, 2), (2, 0, 1), (3, 3, 3, 3), ()])
def test_any_deterministic_chain_is_exact(rule, tokens: Prefix) -> None:
    assert_exact(rule, lambda choices: Draft.chain(tokens), random_law(4, seed=7), 4)


@pytest.mark.parametrize("shape", [*SHAPES, FULL])
@pytest.mark.parametrize("seed", range(3))
def test_any_deterministic_tree_is_exact(shape: Prefix, seed: int) -> None:
    """Repeated siblings included: a full tree of random tokens has many."""
    tokens = np.random.default_rng(seed).integers(0, 3, len(shape))
    assert_exact(coupled, lambda choices: tree(tokens, shape), random_law(3, seed))


@pytest.mark.parametrize("rule", [rejection, block])
@pytest.mark.parametrize("seed", range(3))
def test_a_draft_that_ends_where_its_own_tokens_say_is_exact(seed: int, rule) -> None:
    """The controller stops a draft behind a doubtful token, so where it ends depends on the tokens up to there."""
    target, drafts = laws(seed)
    assert_exact(
        rule, lambda choices: drawn(choices, drafts, lambda tokens: len(tokens) < 3 and 1 not in tokens), target
    )


def mean_accepted(rule, seed: int, goes_on: GoesOn) -> Fraction:
    target, drafts = laws(seed)

    def trial(choices: Enumerator) -> int:
        return len(judged(rule, drawn(choices, drafts, goes_on), target, choices).accepted_nodes)

    return sum((weight * accepted for weight, accepted in outcomes(trial)), Fraction(0))


@pytest.mark.parametrize("seed", range(10))
def test_block_accepts_at_least_as_many_tokens_as_rejection(seed: int) -> None:
    assert mean_accepted(block, seed, chain(3)) >= mean_accepted(rejection, seed, chain(3))


@pytest.mark.parametrize(
    ("tokens", "parents", "accepted", "rows"),
    [([5, 4, 5], [-1, 0, 1], (0,), [-1, 0]), ([4, 5, 4, 5, 6], [-1, -1, 0, 1, 3], (1, 3), [-1, 1, 3])],
)
def test_rules_ask_only_for_rows_on_the_accepted_path(tokens, parents, accepted: Prefix, rows: list[int]) -> None:
    is_chain = list(parents) == list(range(-1, len(parents) - 1))
    for rule in (coupled, rejection) if is_chain else (coupled,):
        asked: list[int] = []

        def lazy(node: int, path: tuple[int, ...], asked: list[int] = asked) -> Distribution:
            asked.append(node)
            return Distribution(np.array([5], np.int32), np.ones(1))

        assert rule(tree(tokens, parents), lazy, Sampler(Sampling(), 10), 0) == Verdict(accepted, 5)
        assert asked == rows


def test_residual_of_equal_distributions_is_the_target() -> None:
    same = Distribution(np.array([3, 1], np.int32), np.array([0.5, 0.5]))
    assert residual(same, same) is same


@pytest.mark.parametrize("rule", [rejection, block])
def test_a_rule_that_compares_distributions_says_why_it_takes_no_tree(rule) -> None:
    with pytest.raises(CapabilityError, match="needs a chain but was given a tree; use verify='coupled'"):
        rule(tree([1, 2], [-1, -1]), lambda node, path: random_law(3, 0)(()), Enumerator([]), 0)


@pytest.mark.parametrize(
    ("probs", "token", "stands"),
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


def test_typical_walks_the_likeliest_branch_and_at_temperature_0_only_the_targets_own() -> None:
    law = Distribution(np.array([0, 1, 2], np.int32), np.array([0.3, 0.5, 0.2]))
    draft = tree([0, 1, 2, 1, 0], [-1, -1, 1, 1, 3])
    assert typical(draft, lambda node, path: law, Sampler(Sampling(seed=1), 3), 0).accepted_nodes == (1, 3, 4)
    greedy = Distribution(np.array([7], np.int32), np.ones(1))
    assert typical(draft, lambda node, path: greedy, Sampler(Sampling(temperature=0), 32), 0) == Verdict((), 7)
