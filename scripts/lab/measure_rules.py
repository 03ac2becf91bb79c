"""Block verification against the rejection rule on one pair: mean accepted length over the same prompts and seeds.

    python scripts/lab/measure_rules.py [--model demo] [--lengths 4 8] [--seeds N] [--temp T]

Every prompt is answered with every seed under both rules. What a round accepts is mostly chance, so besides the tokens
that were accepted the expectation is taken: given a draft and the distributions of all its rows, how many tokens each
rule accepts on average is a formula, and both rules are compared on every draft that either of them met. Errors are
those of the mean over generations, which are independent, by the delta method for ratios.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

import edgespec
from edgespec import Model, Sampling
from edgespec.acceptance import Choices, Rule, TargetAt, block, rejection
from edgespec.control.base import FixedLength
from edgespec.decode import Run, speculative
from edgespec.engines.sequence import CachedSequence
from edgespec.loading.sample_prompts import PROMPTS
from edgespec.sampling import Sampler
from edgespec.stopping import StopRules
from edgespec.types import Distribution, Draft, Verdict


def expected_of_rejection(drafted: list[int], p: list[Distribution], q: list[Distribution]) -> float:
    """Accepted tokens of a chain on average: the sum over i of the products of min(1, p/q) up to i."""
    ratios = [min(1.0, p[i].prob_of(x) / q[i].prob_of(x)) for i, x in enumerate(drafted)]
    return float(np.cumprod(ratios).sum())


def expected_of_block(drafted: list[int], p: list[Distribution], q: list[Distribution], size: int) -> float:
    """Accepted tokens of a chain on average (arXiv 2403.10444, alg. 2): the last i whose own draw succeeds."""
    reach, chances = 1.0, []
    for i, x in enumerate(drafted):
        reach = min(1.0, reach * p[i].prob_of(x) / q[i].prob_of(x))
        if i + 1 == len(drafted):
            chances.append(reach)
            break
        excess = np.maximum(reach * dense(p[i + 1], size) - dense(q[i + 1], size), 0).sum()
        chances.append(excess / (excess + 1 - reach) if excess + 1 - reach else reach)
    found, later = 0.0, 1.0
    for i in range(len(chances), 0, -1):
        found += i * chances[i - 1] * later
        later *= 1 - chances[i - 1]
    return found


def dense(distribution: Distribution, size: int) -> NDArray[np.float64]:
    found = np.zeros(size)
    found[distribution.token_ids] = distribution.probs
    return found


@dataclass(eq=False)
class Watched:
    """A rule that keeps what was expected of both rules on each draft; to the decoding loop it is the rule itself."""

    rule: Rule
    size: int
    expected: list[tuple[float, float]] = field(default_factory=list)

    def __hash__(self) -> int:
        return hash(self.rule)

    def __eq__(self, other: object) -> bool:
        return other is self.rule or other is self

    def __call__(self, draft: Draft, target_at: TargetAt, choices: Choices, position: int) -> Verdict:
        if draft.num_tokens:
            drafted = draft.token_ids.tolist()
            p = [target_at(node - 1, tuple(range(node))) for node in range(len(drafted))]
            q = list(draft.distributions or ())
            both = expected_of_rejection(drafted, p, q), expected_of_block(drafted, p, q, self.size)
        else:
            both = 0.0, 0.0
        self.expected.append(both)
        return self.rule(draft, target_at, choices, position)


def generate(
    model: Model, rule: Rule, length: int, ids: list[int], sampling: Sampling, tokens: int
) -> tuple[float, float, float, float]:
    """(tokens behind the first, rounds, tokens expected of rejection and of block on the drafts met)."""
    size = model.target.vocabulary.size
    watched = Watched(rule, size)
    run = Run(
        CachedSequence(model.target),
        np.array(ids, np.int32),
        Sampler(sampling, size),
        StopRules(frozenset(), (), tokens),
        logprobs=False,
    )
    for _ in speculative(run, FixedLength(model._pool.drafter("model"), length), watched):
        pass
    by_rule = np.array(watched.expected).sum(axis=0) + run.stats.rounds
    return run.stats.new_tokens - 1, run.stats.rounds, float(by_rule[0]), float(by_rule[1])


def ratio(found: NDArray[np.float64], above: Callable[[NDArray[np.float64]], NDArray[np.float64]]) -> str:
    """Mean over rounds of what `above` picks of the rows [generations, 4], with its standard error."""
    rounds, values = found[:, 1], above(found)
    mean = values.sum() / rounds.sum()
    error = (values - mean * rounds).std(ddof=1) / rounds.mean() / math.sqrt(len(found))
    return f"{mean:+.4f} +- {error:.4f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--lengths", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--seeds", type=int, default=18)
    parser.add_argument("--tokens", type=int, default=192)
    parser.add_argument("--temp", type=float, default=0.8)
    chosen = parser.parse_args()
    with edgespec.load(chosen.model, engine=chosen.engine, drafter="model", reproducible=False) as model:
        prompts = [model.encode_chat([{"role": "user", "content": prompt.text}]) for prompt in PROMPTS]
        for length in chosen.lengths:
            rows: dict[Rule, list[tuple[float, float, float, float]]] = {rejection: [], block: []}
            for seed in range(chosen.seeds):
                for ids in prompts:
                    for rule, kept in rows.items():
                        sampling = Sampling(temperature=chosen.temp, seed=seed)
                        kept.append(generate(model, rule, length, ids, sampling, chosen.tokens))
            by_rejection, by_block = (np.array(kept) for kept in rows.values())
            both = by_rejection + by_block
            print(f"draft length {length}, T={chosen.temp:g}, {len(both)} generations, {both[:, 0].sum():.0f} tokens")
            print(f"  rejection, tokens per round       {ratio(by_rejection, lambda f: f[:, 0])}")
            print(f"  block, tokens per round           {ratio(by_block, lambda f: f[:, 0])}")
            print(f"  rejection, expected of its drafts {ratio(by_rejection, lambda f: f[:, 2])}")
            print(f"  block, expected of its drafts     {ratio(by_block, lambda f: f[:, 3])}")
            print(f"  block - rejection on every draft  {ratio(both, lambda f: f[:, 3] - f[:, 2])}", flush=True)


if __name__ == "__main__":
    main()
