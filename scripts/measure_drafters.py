"""What every drafter brings on one pair: acceptance, mean accepted length, and speed over plain decoding of one run.

    python scripts/measure_drafters.py MODEL --prompts FILE [--engine onnx] [--drafters model,suffix,...] [--length N]

FILE holds one JSON object per line: {"domain": ..., "text": ...}. All runs are without the reproducible mode, plain
decoding's best setting; the drafters take turns on every prompt, in an order that rotates, each with a fixed draft
length, `auto` with its own. Time is that of all prompts of a domain, prefill left out; bytes are what the drafter adds.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from pathlib import Path

import edgespec
from edgespec import GenerateOptions, Sampling
from edgespec.types import Stats

PLAIN = "none"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--draft", type=Path)
    parser.add_argument("--medium", type=Path)
    parser.add_argument("--heads", type=Path)
    parser.add_argument("--exit-layer", type=int)
    parser.add_argument("--drafters", type=lambda text: text.split(","), default=["model", "ngram", "suffix", "auto"])
    parser.add_argument("--length", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=40)
    parser.add_argument("--temp", type=float, default=0.0)
    parser.add_argument("--threads", type=int)
    chosen = parser.parse_args()
    prompts = [json.loads(line) for line in chosen.prompts.read_text(encoding="utf-8").splitlines() if line.strip()]
    options = {name: getattr(chosen, name) for name in ("engine", "draft", "medium", "heads", "exit_layer", "threads")}
    with edgespec.load(chosen.model, reproducible=False, context_length=1024, **options) as model:
        found = measured(model, prompts, chosen)
        for domain, by_drafter in found.items():
            for drafter, stats in by_drafter.items():
                tell(domain, drafter, stats, by_drafter[PLAIN], model)


def measured(
    model: edgespec.Model, prompts: list[dict[str, str]], chosen: argparse.Namespace
) -> dict[str, dict[str, list[Stats]]]:
    """The statistics of every run, by domain and drafter."""
    names = [PLAIN, *chosen.drafters]
    found: dict[str, dict[str, list[Stats]]] = defaultdict(lambda: {name: [] for name in names})
    sampling = Sampling(temperature=chosen.temp, seed=1)
    for index, prompt in enumerate(prompts):
        ids = model.encode(prompt["text"], parse_special=True)
        turn = index % len(names)
        for name in names[turn:] + names[:turn]:
            model.forget()
            length = "auto" if name == "auto" else chosen.length
            options = GenerateOptions(
                max_tokens=chosen.tokens, ignore_eos=True, logprobs=False, drafter=name, draft_length=length
            )
            found[prompt["domain"]][name].append(model.generate(ids, sampling, options).stats)
        print(f"\r{index + 1}/{len(prompts)}", end="", file=sys.stderr)
    print(file=sys.stderr)
    return found


def tell(domain: str, drafter: str, runs: list[Stats], plain: list[Stats], model: edgespec.Model) -> None:
    ratio = sum(stats.decode_s for stats in plain) / sum(stats.decode_s for stats in runs)
    drafted = sum(stats.drafted_tokens for stats in runs)
    accepted = sum(stats.accepted_tokens for stats in runs)
    rounds, tokens = sum(stats.rounds for stats in runs), sum(stats.new_tokens - 1 for stats in runs)
    known = model._deciders.drafters[drafter].bytes_used / 2**20 if drafter in model._deciders.drafters else 0.0
    print(
        f"{domain:10} {drafter:12} acceptance {accepted / drafted if drafted else 0:.3f}  mean accepted length "
        f"{tokens / rounds:.2f}  over plain {ratio:.2f}  {known:.1f} MiB"
    )


if __name__ == "__main__":
    main()
