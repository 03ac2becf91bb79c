"""Measure what the README says of the demo pair: acceptance under each rule, and memory over many generations.

    python scripts/lab/measure_demo.py --prompts FILE [--tokens N] [--draft-length N] [--seeds N]

FILE holds one prompt per line. "greedy match" drafts the draft's most likely token and accepts it when the target
samples the same one, as most runtimes do; the other two rules are edgespec's.
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

import edgespec
from edgespec import GenerateOptions, Model, Sampling
from edgespec.drafters.base import DraftRequest
from edgespec.drafters.model import ModelDrafter
from edgespec.sampling import Sampler
from edgespec.types import Draft

GENERATIONS = 500


class GreedyDrafter(ModelDrafter):
    """Drafts the most likely tokens whatever the temperature."""

    def draft(self, request: DraftRequest) -> Draft:
        greedy = Sampler(Sampling(temperature=0.0), self._engine.vocabulary.size)
        return super().draft(request._replace(sampler=greedy))


def acceptance(
    model: Model, prompts: list[str], temperature: float, options: GenerateOptions, num_seeds: int
) -> tuple[int, int]:
    """(accepted, tried): a token is tried when all before it in its draft were accepted."""
    accepted = tried = 0
    for seed, prompt in enumerate(prompts * (num_seeds if temperature else 1)):
        prompt_ids = model.encode_chat([{"role": "user", "content": prompt}])
        stats = model.generate(prompt_ids, Sampling(temperature=temperature, seed=seed), options).stats
        accepted += stats.accepted_tokens
        tried += stats.drafted_tokens
    return accepted, tried


def resident_bytes() -> int:
    """This process's resident set now (Linux)."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--tokens", type=int, default=64)
    # with one drafted token per round every draft token is tried: the rate is per token, not per chain
    parser.add_argument("--draft-length", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=1, help="runs per prompt at a temperature")
    chosen = parser.parse_args()
    prompts = [line for line in chosen.prompts.read_text(encoding="utf-8").splitlines() if line.strip()]
    base = GenerateOptions(max_tokens=chosen.tokens, drafter="model", draft_length=chosen.draft_length)
    with edgespec.load(chosen.model) as model:
        for temperature in (0.0, 0.8):
            for rule in ("coupled", "rejection"):
                options = dataclasses.replace(base, verify=rule)
                accepted, tried = acceptance(model, prompts, temperature, options, chosen.seeds)
                print(f"T={temperature} {rule:13} {accepted / tried:.4f} of {tried} drafted tokens")
        model._pool.drafters["model"].__class__ = GreedyDrafter
        accepted, tried = acceptance(model, prompts, 0.8, base, chosen.seeds)
        print(f"T=0.8 greedy match  {accepted / tried:.4f} of {tried} drafted tokens")
        sizes = []
        for seed in range(GENERATIONS):
            model.generate(model.encode(prompts[seed % len(prompts)]), Sampling(seed=seed), base)
            sizes.append(resident_bytes())
        print(f"resident after 50 and {GENERATIONS} generations: {sizes[49] / 2**20:.1f}, {sizes[-1] / 2**20:.1f} MiB")
        print(f"peak {model.stats.peak_rss_bytes / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
