"""Speed of a pair at fixed draft lengths over plain decoding of the same engine, as ratios in one run.

    python scripts/lab/measure_pair.py MODEL --prompts FILE [--engine onnx] [--draft FILE] [--lengths 1-8] [--tokens N]

FILE holds one JSON object per line: {"domain": ..., "text": ...}. Plain decoding runs without the reproducible mode,
which is its best setting; the drafts run in both modes. Settings take turns within every prompt, in an order that
rotates, and a figure is the median over prompts of the ratio to the plain run of the same prompt. The time of the
target's prefill is left out on both sides; the draft model's is part of drafting. Before that, what a pass costs by
its width, through the engine.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from pathlib import Path
from statistics import median
from time import perf_counter

import numpy as np

import edgespec
from edgespec import GenerateOptions, Model, Sampling
from edgespec.engines.base import Engine
from edgespec.types import Batch

WIDTHS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16)
COST_CONTEXT, COST_REPEATS = 256, 9


def cost_of_widths(engine: Engine) -> dict[int, float]:
    """Median ms of a pass by its width, at a context of COST_CONTEXT tokens; the widths take turns."""
    ids = np.random.default_rng(0).integers(0, min(engine.vocabulary.size, 4096), COST_CONTEXT + 64).astype(np.int32)
    engine.rollback(0)
    for start in range(0, COST_CONTEXT, 32):
        engine.forward(Batch.chain(ids[start : start + 32], last_only=True))
    taken = defaultdict(list)
    for _ in range(COST_REPEATS):
        for width in WIDTHS:
            started = perf_counter()
            engine.forward(Batch.chain(ids[COST_CONTEXT : COST_CONTEXT + width]))
            taken[width].append(1e3 * (perf_counter() - started))
            engine.rollback(COST_CONTEXT)
    engine.rollback(0)
    return {width: median(times) for width, times in taken.items()}


def seconds_per_token(model: Model, prompt_ids: list[int], options: GenerateOptions, temperature: float) -> float:
    stats = model.generate(prompt_ids, Sampling(temperature=temperature), options).stats
    return (stats.wall_s - stats.prefill_s) / stats.new_tokens


def measure(models: dict[str, Model], prompts: list[dict[str, str]], chosen: argparse.Namespace) -> None:
    settings = [("fast", 0), *((mode, length) for mode in models for length in chosen.lengths)]
    ratios: dict[tuple[str, str, int], list[float]] = defaultdict(list)
    for index, prompt in enumerate(prompts):
        ids = models["fast"].encode(prompt["text"], parse_special=True)
        taken = {}
        turn = index % len(settings)
        for mode, length in settings[turn:] + settings[:turn]:
            options = GenerateOptions(
                max_tokens=chosen.tokens,
                ignore_eos=True,
                logprobs=False,
                drafter="model" if length else "none",
                draft_length=length,
            )
            taken[mode, length] = seconds_per_token(models[mode], ids, options, chosen.temp)
        for mode, length in settings[1:]:
            ratios[prompt["domain"], mode, length].append(taken["fast", 0] / taken[mode, length])
        print(f"\r{index + 1}/{len(prompts)}", end="", file=sys.stderr)
    print(file=sys.stderr)
    for domain in dict.fromkeys(prompt["domain"] for prompt in prompts):
        for mode in models:
            cells = [f"{length}: {median(ratios[domain, mode, length]):.2f}" for length in chosen.lengths]
            print(f"{domain:10} {mode:12} " + "  ".join(cells))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--draft", type=Path)
    parser.add_argument("--lengths", type=_lengths, default=list(range(1, 9)), help="such as 1-8 or 2,4,6")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--temp", type=float, default=0.0)
    parser.add_argument("--threads", type=int)
    chosen = parser.parse_args()
    prompts = [json.loads(line) for line in chosen.prompts.read_text(encoding="utf-8").splitlines() if line.strip()]
    common = {"engine": chosen.engine, "draft": chosen.draft, "threads": chosen.threads, "context_length": 1024}
    with (
        edgespec.load(chosen.model, reproducible=False, **common) as fast,
        edgespec.load(chosen.model, reproducible=True, **common) as exact,
    ):
        facts = exact.target.facts
        print(
            f"{fast.pair.name}: {facts.name} on {facts.device}, {facts.threads} threads, classes {facts.width_classes}"
        )
        costs = cost_of_widths(fast.target)
        cells = [f"{width}: {cost / costs[1]:.2f}" for width, cost in costs.items()]
        print(f"one token {costs[1]:.1f} ms; cost by width " + "  ".join(cells))
        measure({"fast": fast, "reproducible": exact}, prompts, chosen)


def _lengths(text: str) -> list[int]:
    first, _, last = text.partition("-")
    return list(range(int(first), int(last) + 1)) if last else [int(part) for part in text.split(",")]


if __name__ == "__main__":
    main()
