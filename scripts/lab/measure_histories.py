"""What a drafted round costs after histories of 10^3 to 10^6 tokens, and how fast histories are taken in.

    python scripts/lab/measure_histories.py [--tokens 1000 10000 100000 1000000] [--rounds N] [--json FILE]

The text is made: words of a Zipf law, with stretches that are copied from earlier, as in an edited document. For each
drafter that copies, with an empty and a full corpus or cache, it prints microseconds of processor time per token of a
round in which 8 tokens are drafted and 4 arrive, microseconds per token for reading the history, and memory.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from edgespec.config.options import Sampling
from edgespec.corpus.database import joined
from edgespec.corpus.index import SuffixIndex
from edgespec.corpus.learnt import MAX_TOKENS
from edgespec.drafters.base import Drafter, DraftRequest
from edgespec.drafters.cache import CacheDrafter
from edgespec.drafters.ngram import NgramDrafter
from edgespec.drafters.suffix import SuffixDrafter
from edgespec.sampling import Sampler
from edgespec.types import TokenIds

VOCABULARY = 32_000
DRAFTED, ARRIVING = 8, 4


def made_text(num_tokens: int, seed: int) -> TokenIds:
    """Zipf tokens [n] of which about half stand in stretches copied from earlier ones."""
    rng = np.random.default_rng(seed)
    ids = (rng.zipf(1.25, num_tokens) % VOCABULARY).astype(np.int32)
    place = 64
    while place < num_tokens:
        length = int(rng.integers(8, 64))
        source = int(rng.integers(0, place - 32))
        count = min(length, num_tokens - place, place - source)
        ids[place : place + count] = ids[source : source + count]
        place += count + length
    return ids


def measure(drafter: Drafter, history: TokenIds, ahead: TokenIds) -> dict[str, float]:
    """Microseconds per token of rounds behind `history` [n], in which `ahead` [m] arrives, and of reading `history`."""
    sampler = Sampler(Sampling(temperature=0), VOCABULARY)
    text = np.concatenate((history, ahead))
    began_s = time.process_time()
    drafter.begin(history)
    read_s = time.process_time() - began_s
    rounds = []
    for end in range(history.size, text.size, ARRIVING):
        request = DraftRequest(text[:end], DRAFTED, sampler)
        began_s = time.process_time()
        drafter.draft(request)
        rounds.append((time.process_time() - began_s) / ARRIVING)
    return {
        "round_us_per_token": 1e6 * float(np.mean(rounds)),
        "median_us_per_token": 1e6 * float(np.median(rounds)),
        "read_us_per_token": 1e6 * read_s / history.size,
        "mib": drafter.bytes_used / 2**20,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[10**3, 10**4, 10**5, 10**6])
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    whole = made_text(max(chosen.tokens) + chosen.rounds * ARRIVING, 0)
    corpus_ids = joined([made_text(max(chosen.tokens), 1)])
    began_s = time.process_time()
    corpus = SuffixIndex.of(corpus_ids)
    built_s = time.process_time() - began_s
    print(f"corpus: {corpus.num_tokens / built_s:.0f} tokens/s indexed, {corpus.bytes_used / 2**20:.1f} MiB")
    learnt = made_text(MAX_TOKENS, 2)
    makers: dict[str, Callable[[], Drafter]] = {
        "ngram": NgramDrafter,
        "suffix": SuffixDrafter,
        "suffix, corpus": lambda: SuffixDrafter(corpora=[corpus]),
        "cache": lambda: CacheDrafter(VOCABULARY),
        "cache, full": lambda: CacheDrafter(VOCABULARY, [learnt]),
    }
    found = []
    for name, make in makers.items():
        for num_tokens in chosen.tokens:
            ahead = whole[num_tokens : num_tokens + chosen.rounds * ARRIVING]
            figures = {"drafter": name, "tokens": num_tokens, **measure(make(), whole[:num_tokens], ahead)}
            found.append(figures)
            print(
                f"{name:<15} {num_tokens:>8} tokens: {figures['round_us_per_token']:6.1f} us a token in rounds (median "
                f"{figures['median_us_per_token']:5.1f}), {figures['read_us_per_token']:5.2f} us a token to read, "
                f"{figures['mib']:6.1f} MiB",
                flush=True,
            )
    if chosen.json is not None:
        chosen.json.write_text(json.dumps({"corpus_tokens_per_s": corpus.num_tokens / built_s, "rows": found}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
