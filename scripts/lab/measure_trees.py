"""Mean accepted length of drafts with branches against chains of as many tokens, on dialogues.

    python scripts/lab/measure_trees.py --prompts FILE [--model NAME] [--tokens N] [--lengths N ...] [--seeds N]
        [--drafters NAME ...] [--chains]

FILE holds one prompt per line. Counts tokens, not time: tokens emitted per verifying pass, the residual or bonus token
included, with the standard error over generations. With --chains heads draft chains where they would draft trees.
"""

from __future__ import annotations

import argparse
import itertools
import math
from pathlib import Path

import edgespec
from edgespec import GenerateOptions, Model, Sampling
from edgespec.config import DRAFTERS, DrafterName, RuleName
from edgespec.drafters.states import StateDrafter

CELLS: tuple[tuple[float, RuleName], ...] = ((0.0, "coupled"), (0.8, "coupled"), (0.8, "rejection"))
MEASURED: tuple[DrafterName, ...] = ("model", "tree", "ngram", "lookahead", "medusa", "eagle")


def accepted_length(
    model: Model, prompts: list[str], temperature: float, options: GenerateOptions, num_seeds: int
) -> tuple[float, float, int]:
    """(tokens per pass, its standard error, tokens) over all generations."""
    counted = []
    for seed, prompt in enumerate(prompts * (num_seeds if temperature else 1)):
        prompt_ids = model.encode_chat([{"role": "user", "content": prompt}])
        stats = model.generate(prompt_ids, Sampling(temperature=temperature, seed=seed), options).stats
        counted.append((stats.new_tokens - 1, stats.rounds))
    tokens, rounds = (sum(column) for column in zip(*counted, strict=True))
    mean = tokens / rounds
    spread = math.sqrt(sum((emitted - mean * passes) ** 2 for emitted, passes in counted)) / rounds
    return mean, spread, tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--engine", default="llamacpp")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--lengths", type=int, nargs="+", default=[8, 16])
    parser.add_argument("--seeds", type=int, default=1, help="runs per prompt at a temperature")
    parser.add_argument("--drafters", nargs="+", choices=DRAFTERS, default=MEASURED)
    parser.add_argument("--chains", action="store_true", help="no trees of heads")
    chosen = parser.parse_args()
    if chosen.chains:
        StateDrafter.grows = lambda self, request: False  # type: ignore[method-assign]
    prompts = [line for line in chosen.prompts.read_text(encoding="utf-8").splitlines() if line.strip()]
    for drafter in chosen.drafters:
        with edgespec.load(chosen.model, engine=chosen.engine, drafter=drafter) as model:
            for (temperature, rule), length in itertools.product(CELLS, chosen.lengths):
                options = GenerateOptions(
                    max_tokens=chosen.tokens, drafter=drafter, draft_length=length, verify=rule, logprobs=False
                )
                mean, error, tokens = accepted_length(model, prompts, temperature, options, chosen.seeds)
                cell = f"T={temperature} {rule:9} {length:2} nodes  {drafter:9}"
                print(f"{cell} {mean:.3f} +- {error:.3f} of {tokens} tokens", flush=True)


if __name__ == "__main__":
    main()
