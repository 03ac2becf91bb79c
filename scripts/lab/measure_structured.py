"""JSON answers to the schemas of `structures` against free text of the same model: tokens per second of processor time.

    .venv/bin/python scripts/lab/measure_structured.py MODEL [--draft-length 4] [--drafter ngram] [--reproducible]

One thread and processor time, prefill left out, the kinds by turns: so a busy machine disturbs the ratios little. Each
ratio is the geometric mean over schemas with its standard error (of its logarithm).
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from typing import Any

import edgespec
from edgespec import GenerateOptions, Model, Sampling
from structures import SCHEMAS

MOST_TOKENS = 400


def rate(model: Model, prompt: str, options: GenerateOptions) -> tuple[float, int, int]:
    """(tokens per processor second behind the first token, such tokens, rounds) of one answer."""
    ids = model.encode_chat([{"role": "user", "content": prompt}])
    with model.stream(ids, Sampling(temperature=0.0), options) as generation:
        next(generation)
        started_s = time.process_time()
        count = sum(1 for _ in generation)
        return count / (time.process_time() - started_s), count, generation.stats.rounds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--drafter", default="ngram")
    parser.add_argument("--draft-length", type=int, default=4)
    parser.add_argument("--reproducible", action="store_true")
    parser.add_argument("--schemas", type=int, default=len(SCHEMAS), help="how many")
    given = parser.parse_args()
    drafting: dict[str, Any] = {"drafter": given.drafter, "draft_length": given.draft_length, "logprobs": False}
    ratios: dict[str, list[float]] = {"JSON / free text, both plain": [], "JSON drafted / free text plain": []}
    ratios |= {"JSON / free text, both drafted": [], "JSON drafted / JSON plain": []}
    tokens = rounds = 0
    with edgespec.load(given.model, reproducible=given.reproducible, threads=1) as model:
        for _, what, schema in SCHEMAS[: given.schemas]:
            structured, free = f"Write {what} as JSON.", f"Tell me about {what}."
            drafted = GenerateOptions(max_tokens=MOST_TOKENS, json_schema=schema, **drafting)
            json_drafted, count, num_rounds = rate(model, structured, drafted)
            free_drafted, *_ = rate(model, free, GenerateOptions(max_tokens=count, ignore_eos=True, **drafting))
            plain: dict[str, Any] = {"drafter": "none", "logprobs": False}
            free_plain, *_ = rate(model, free, GenerateOptions(max_tokens=count, ignore_eos=True, **plain))
            json_plain, *_ = rate(
                model, structured, GenerateOptions(max_tokens=MOST_TOKENS, json_schema=schema, **plain)
            )
            found = (
                json_plain / free_plain,
                json_drafted / free_plain,
                json_drafted / free_drafted,
                json_drafted / json_plain,
            )
            for name, ratio in zip(ratios, found, strict=True):
                ratios[name].append(math.log(ratio))
            tokens, rounds = tokens + count, rounds + num_rounds
    print(f"{given.model}: {given.schemas} schemas, {tokens} tokens in {rounds} rounds")
    for name, logs in ratios.items():
        error = statistics.stdev(logs) / math.sqrt(len(logs)) if len(logs) > 1 else math.inf
        print(f"{name:32} {math.exp(statistics.mean(logs)):.2f} +- {error:.2f}")


if __name__ == "__main__":
    main()
