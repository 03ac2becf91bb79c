"""Measure the time per round that is neither drafting nor a target pass, on synthetic logits.

    python scripts/lab/measure_overhead.py

The table engine stands in for target and draft, so that a round costs little else. Prints the median over repetitions
and its spread; "with logprobs" is what the Python API does by default.
"""

from __future__ import annotations

import statistics

import numpy as np

from edgespec import Sampling
from edgespec.acceptance import coupled
from edgespec.control.base import FixedLength
from edgespec.decode import Run, speculative
from edgespec.drafters.model import ModelDrafter
from edgespec.engines.sequence import CachedSequence
from edgespec.engines.table import TableEngine
from edgespec.sampling import Sampler
from edgespec.stopping import StopRules

REPETITIONS = 9
SETTINGS = {"T=0": Sampling(temperature=0.0), "T=0.8": Sampling(temperature=0.8, top_k=40, top_p=0.95, min_p=0.05)}


def overhead_ms(
    target: CachedSequence, drafter: ModelDrafter, sampling: Sampling, logprobs: bool
) -> tuple[float, float]:
    """(milliseconds of overhead per round, tokens per round) of one generation."""
    sampler = Sampler(sampling, target.engine.vocabulary.size)
    run = Run(target, np.array([1, 2, 3], np.int32), sampler, StopRules(frozenset(), (), 200), logprobs)
    for _ in speculative(run, FixedLength(drafter, 4), coupled):
        pass
    return run.stats.overhead_s / run.stats.rounds * 1000, run.stats.mean_accepted_length


def main() -> None:
    for size in (4096, 152_064):
        engine = TableEngine.random(size, spread=3.0)
        target, drafter = CachedSequence(engine), ModelDrafter(engine.related(sigma=0.3))
        cells = [(name, logprobs) for name in SETTINGS for logprobs in (False, True)]
        samples: dict[tuple[str, bool], list[float]] = {cell: [] for cell in cells}
        lengths: dict[tuple[str, bool], float] = {}
        for _ in range(REPETITIONS):
            for cell in cells:
                found, lengths[cell] = overhead_ms(target, drafter, SETTINGS[cell[0]], cell[1])
                samples[cell].append(found)
        for (name, logprobs), values in samples.items():
            print(
                f"vocabulary {size:>6}  {name:5}  {'with' if logprobs else 'no  '} logprobs  "
                f"{statistics.median(values):.3f} ms per round ({min(values):.3f}..{max(values):.3f}), "
                f"{lengths[name, logprobs]:.2f} tokens per round"
            )


if __name__ == "__main__":
    main()
