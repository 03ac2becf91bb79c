"""Total tokens per second of 1, 2, 4 and 8 chats at once, with speculation and without, interleaved.

python scripts/lab/measure_concurrency.py demo --repeats 5
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Sequence
from statistics import median
from time import perf_counter

import edgespec
from edgespec import GenerateOptions, Model, Sampling
from edgespec.types import Stats

ASKED = (
    "Find me a hotel in Paris for two nights.",
    "I need a bus from Fresno to San Jose on the 5th.",
    "Tom has 12 apples and gives 5 to Ann. How many are left?",
    "Write a Python function that adds the squares of a list.",
    "Please book a table for four at an Italian restaurant tonight.",
    "What will the weather be in Oakland tomorrow?",
    "A train travels 60 miles in 2 hours. What is its speed?",
    "Write a Python function that reverses a string.",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--reproducible", action="store_true", default=None)
    parser.add_argument("--no-reproducible", action="store_false", dest="reproducible")
    parser.add_argument("--counts", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--context", type=int, default=1024)
    given = parser.parse_args()
    with edgespec.load(
        given.model,
        engine=given.engine,
        reproducible=given.reproducible,
        parallel=max(given.counts),
        context_length=given.context,
    ) as model:
        print(model, "shares passes" if model.target.facts.can_pack else "passes in turn")
        measure(model, given.counts, given.repeats, given.max_tokens)


def measure(model: Model, counts: Sequence[int], repeats: int, max_tokens: int) -> None:
    """Print tokens per second and ratios; the first of the repeats warms up and does not count."""
    prompts = [model.encode_chat([{"role": "user", "content": text}]) for text in ASKED]
    rates: dict[tuple[int, str], list[float]] = defaultdict(list)
    ratios: dict[int, list[float]] = defaultdict(list)
    totals: dict[tuple[int, str], Stats] = defaultdict(Stats)
    for repeat in range(repeats + 1):
        for count in counts:
            seen = {}
            for drafter in ("none", "auto") if repeat % 2 else ("auto", "none"):
                # Different prompts for few chats in each repeat, the same ones in both modes.
                chosen = [prompts[(repeat * count + place) % len(prompts)] for place in range(count)]
                options = GenerateOptions(max_tokens=max_tokens, ignore_eos=True, drafter=drafter, logprobs=False)
                model.forget()
                started_s = perf_counter()
                found = model.generate_all(chosen, Sampling(), options)
                seconds = perf_counter() - started_s
                seen[drafter] = sum(result.stats.new_tokens for result in found) / seconds
                for result in found:
                    totals[count, drafter].drafted_tokens += result.stats.drafted_tokens
                    totals[count, drafter].accepted_tokens += result.stats.accepted_tokens
            if repeat:
                for drafter, rate in seen.items():
                    rates[count, drafter].append(rate)
                ratios[count].append(seen["auto"] / seen["none"])
    one = median(rates[counts[0], "auto"])
    print("chats  without  with  with/without (each)  over one chat  drafted  accepted")
    for count in counts:
        each = " ".join(f"{ratio:.2f}" for ratio in sorted(ratios[count]))
        without, with_drafts = median(rates[count, "none"]), median(rates[count, "auto"])
        stats = totals[count, "auto"]
        print(
            f"{count:5}  {without:7.1f}  {with_drafts:6.1f}  {median(ratios[count]):.3f} ({each})  "
            f"{with_drafts / one:.2f}  {stats.drafted_tokens}  {stats.acceptance_rate:.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
