"""Long check of the first promise: the same token ids for every drafter and draft length as without one.

    python scripts/check_reproducible.py --prompts FILE [--model NAME] [--engine NAME] [--tokens N] [--runs-per-cell N]

FILE holds one prompt per line. Every prompt is decoded plainly at each temperature, with one of 20 seeds, then again
with drafters and lengths (1..12, auto) that rotate, so that all combinations meet all temperatures. Prints the number
of tokens compared and of tokens that differ; exit code 1 when any does.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from pathlib import Path

import edgespec
from edgespec import GenerateOptions, Sampling

TEMPERATURES = (0.0, 0.8, 1.2)
NUM_SEEDS = 20
DRAFTERS = ("model", "ngram", "suffix", "cache", "auto")
# Automatic lengths are decided by the clock, so every run of them is another test: they stand in between often.
COMBINATIONS = [
    pair for n in range(1, 13) for pair in (*((name, n) for name in DRAFTERS[:-1]), (DRAFTERS[n % 5], "auto"))
]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--draft", type=Path)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--runs-per-cell", type=int, default=4)
    chosen = parser.parse_args()
    prompts = [line for line in chosen.prompts.read_text(encoding="utf-8").splitlines() if line.strip()]
    rotation = itertools.cycle(COMBINATIONS)
    compared = different = 0
    with edgespec.load(
        chosen.model, engine=chosen.engine, draft=chosen.draft, reproducible=True, never_slower=1.0
    ) as model:
        for index, (prompt, temperature) in enumerate(itertools.product(prompts, TEMPERATURES)):
            sampling = Sampling(temperature=temperature, seed=index % NUM_SEEDS)
            prompt_ids = model.encode_chat([{"role": "user", "content": prompt}])
            plain = model.generate(prompt_ids, sampling, GenerateOptions(max_tokens=chosen.tokens, drafter="none"))
            for drafter, length in itertools.islice(rotation, chosen.runs_per_cell):
                options = GenerateOptions(max_tokens=chosen.tokens, drafter=drafter, draft_length=length)
                found = model.generate(prompt_ids, sampling, options)
                compared += max(len(plain.token_ids), len(found.token_ids))
                if found.token_ids != plain.token_ids:
                    pairs = itertools.zip_longest(plain.token_ids, found.token_ids)
                    different += sum(ours != theirs for ours, theirs in pairs)
                    print(f"differs: T={temperature} seed={sampling.seed} {drafter} {length}: {prompt[:60]!r}")
            if sys.stderr.isatty():
                print(f"\r{index + 1}/{len(prompts) * len(TEMPERATURES)}", end="", file=sys.stderr)
    print(f"{len(prompts)} prompts, {compared} tokens compared, {different} differ")
    return int(different > 0)


if __name__ == "__main__":
    sys.exit(main())
