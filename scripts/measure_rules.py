"""Mean accepted length of acceptance rules on one pair, compared over the same prompts and seeds.

    python scripts/measure_rules.py [--model demo] [--rules rejection block] [--lengths 4 8] [--seeds N] [--temp T]

Every prompt is answered with every seed by every rule at every draft length. A generation is the unit of the error: the
difference of two rules is that of their ratios tokens / rounds, its standard error by the delta method over paired
generations, so that what is hard or easy about a prompt counts for neither.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import edgespec
from edgespec import GenerateOptions, Model, Sampling
from edgespec.prompts import PROMPTS

Counts = NDArray[np.float64]
"""[generations, 4]: tokens behind the first one, rounds, drafted tokens, accepted tokens."""


def counts(
    model: Model, prompts: list[list[int]], num_seeds: int, temperature: float, options: GenerateOptions
) -> Counts:
    """One row per prompt and seed."""
    rows = []
    for seed in range(num_seeds):
        for ids in prompts:
            stats = model.generate(ids, Sampling(temperature=temperature, seed=seed), options).stats
            rows.append((stats.new_tokens - 1, stats.rounds, stats.drafted_tokens, stats.accepted_tokens))
    return np.array(rows, np.float64)


def ratio_and_influence(found: Counts) -> tuple[float, Counts]:
    """(tokens per round, by how much each generation [n] moves it)."""
    tokens, rounds = found[:, 0], found[:, 1]
    ratio = float(tokens.sum() / rounds.sum())
    return ratio, (tokens - ratio * rounds) / rounds.mean()


def paired_difference(one: Counts, other: Counts) -> tuple[float, float]:
    """(difference of tokens per round, its standard error) of two rules over the same generations."""
    (first, of_first), (second, of_second) = ratio_and_influence(one), ratio_and_influence(other)
    moved = of_first - of_second
    return first - second, float(moved.std(ddof=1) / math.sqrt(moved.size))


def tell(name: str, found: Counts) -> None:
    ratio, moved = ratio_and_influence(found)
    error = float(moved.std(ddof=1) / math.sqrt(moved.size))
    tokens, _, drafted, accepted = found.sum(axis=0)
    print(
        f"  {name:10} {ratio:.4f} +- {error:.4f} tokens a round, {accepted / drafted:.4f} accepted, {tokens:.0f} tokens"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--engine", default="auto")
    parser.add_argument(
        "--rules", nargs="+", default=["rejection", "block"], help="the others are compared with the first"
    )
    parser.add_argument("--lengths", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--prompts", type=Path, help="one prompt a line; the built-in ones otherwise")
    parser.add_argument("--seeds", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=192)
    parser.add_argument("--temp", type=float, default=0.8)
    chosen = parser.parse_args()
    texts = [prompt.text for prompt in PROMPTS]
    if chosen.prompts is not None:
        texts = [line for line in chosen.prompts.read_text(encoding="utf-8").splitlines() if line.strip()]
    with edgespec.load(chosen.model, engine=chosen.engine, drafter="model", reproducible=False) as model:
        prompts = [model.encode_chat([{"role": "user", "content": text}]) for text in texts]
        for length in chosen.lengths:
            print(f"draft length {length}, T={chosen.temp:g}, {len(prompts)} prompts, {chosen.seeds} seeds")
            found = {}
            for rule in chosen.rules:
                options = GenerateOptions(
                    max_tokens=chosen.tokens, verify=rule, draft_length=length, ignore_eos=True, logprobs=False
                )
                found[rule] = counts(model, prompts, chosen.seeds, chosen.temp, options)
                tell(rule, found[rule])
            for rule in chosen.rules[1:]:
                gap, error = paired_difference(found[rule], found[chosen.rules[0]])
                print(
                    f"  {rule} - {chosen.rules[0]}: {gap:+.4f} +- {error:.4f}, {gap / error:+.1f} standard errors",
                    flush=True,
                )


if __name__ == "__main__":
    main()
