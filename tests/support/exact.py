"""Exact enumeration: run production code under every outcome of its random choices, with rational weights."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import numpy as np

from edgespec.sampling.noise import Stream
from edgespec.types import Distribution

Prefix = tuple[int, ...]
Law = Callable[[Prefix], Distribution]


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
