"""Which widths of a pass give the same bits, found by running the same tokens at every width.

A matrix kernel is chosen by its number of rows, and another kernel adds in another order. The reproducible mode stays
inside one class of widths, so that a token's logits do not depend on what else is in its pass.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from time import perf_counter

import numpy as np

from edgespec.engines.base import Engine, EngineFacts
from edgespec.engines.measurements import recall, remember
from edgespec.errors import CapabilityError
from edgespec.types import Batch, TokenIds

logger = logging.getLogger("edgespec")
WidthClass = tuple[int, int]
Digests = dict[int, bytes]  # position of a token -> digest of its row of logits
METHOD = 2  # raise it when the measurement changes, and what is kept of older ones is forgotten
# From 512 cells on llama.cpp's attention treats a lone row in its own way, and cells are counted in steps of 256.
PREFIX = 272
# Verifying passes are narrow and every width there counts; between the wide ones kernels differ by whole tiles.
EVERY_WIDTH_TO = 16
WIDER = (24, 33, 48, 63)
MAX_PADDED_WIDTH = 4
TYPICAL_ACCEPTANCE = 0.7
TYPICAL_COST_OF_A_ROW = 0.25
WIDE_ENOUGH_FOR_PROMPTS = 32


def pinned_facts(engine: Engine, key: str, *, widest: int, reproducible: bool | None, advice: str) -> EngineFacts:
    """The facts of an empty engine with its width classes and the one to keep to; the engine is left empty.

    `key` names everything that the bits depend on: a measurement under it is kept between runs. `reproducible` None
    takes a class if there is one, True demands it: CapabilityError, with `advice`, when there is none.
    """
    kept = recall("widths", key) if engine.facts.can_rollback else {"classes": [], "seconds": []}
    if kept is None:
        logger.info("finding which widths of a pass give equal bits with this model, once")
        measured, seconds = measure_classes(engine, widest)
        kept = {"classes": measured, "seconds": sorted(seconds.items())}
        remember("widths", key, kept)
    found = tuple((low, high) for low, high in kept["classes"])
    seconds = {int(width): float(taken) for width, taken in kept["seconds"]}
    pinned = choose_class(found)
    if reproducible and pinned is None:
        raise CapabilityError(
            "this model cannot be reproducible on this machine: its narrow passes give other bits at every width "
            f"(classes {list(found)}). {advice}"
        )
    max_batch = engine.facts.max_batch
    if pinned and pinned[1] >= WIDE_ENOUGH_FOR_PROMPTS:
        # With prompts read at pinned widths too, a cache's bits depend on its tokens alone and not on how they came.
        max_batch = min(max_batch, pinned[1])
    padding_cost = seconds[pinned[0]] / seconds[1] if pinned and pinned[0] in seconds else 1.0
    return replace(
        engine.facts, width_classes=found, pinned_class=pinned, max_batch=max_batch, padding_cost=padding_cost
    )


@dataclass(slots=True)
class Passes:
    """What passes of each width gave and took: digests of logits by position, and median seconds."""

    digests: dict[int, Digests] = field(default_factory=dict)
    seconds: dict[int, float] = field(default_factory=dict)

    def run(self, engine: Engine, ids: TokenIds, start: int, width: int) -> None:
        """Score the tokens from `start` on in passes of `width`, as many as are full."""
        found: Digests = {}
        taken: list[float] = []
        for begin in range(start, ids.size - width + 1, width):
            started_s = perf_counter()
            logits = engine.forward(Batch.chain(ids[begin : begin + width]))
            taken.append(perf_counter() - started_s)
            for position, row in enumerate(logits, start=begin):
                found[position] = hashlib.blake2b(row.tobytes(), digest_size=16).digest()
        self.digests[width], self.seconds[width] = found, median(taken)


def measure_classes(engine: Engine, widest: int) -> tuple[tuple[WidthClass, ...], dict[int, float]]:
    """The classes of widths 1..`widest` and the seconds of a pass by width, on sequence 0, empty before and after.

    The same tokens are scored at every width, the narrow ones in several passes: two kernels often round alike, and a
    few rows would not tell them apart. Each width begins on cells that only the first, widest pass filled.
    """
    facts = engine.facts
    prefix = min(PREFIX, facts.context_length - widest)
    ids = np.random.default_rng(0).integers(0, engine.vocabulary.size, prefix + widest).astype(np.int32)
    for start in range(0, prefix, facts.max_batch):
        engine.forward(Batch.chain(ids[start : min(start + facts.max_batch, prefix)], last_only=True))
    passes = Passes()
    passes.run(engine, ids, prefix, widest)
    for width in (*range(1, EVERY_WIDTH_TO + 1), *WIDER):
        if width < widest:
            start = ids.size - min(max(width, EVERY_WIDTH_TO), widest)
            engine.rollback(start)
            passes.run(engine, ids, start, width)
    engine.rollback(0)
    return classes(passes.digests), passes.seconds


def classes(digests: Mapping[int, Digests]) -> tuple[WidthClass, ...]:
    """Runs of measured widths whose rows agree at all positions they share, as intervals; `digests` by width."""
    runs: list[list[int]] = []
    for width in sorted(digests):
        if runs and all(_agree(digests[other], digests[width]) for other in runs[-1]):
            runs[-1].append(width)
        else:
            runs.append([width])
    return tuple((run[0], run[-1]) for run in runs)


def _agree(one: Digests, other: Digests) -> bool:
    return all(one[position] == other[position] for position in one.keys() & other.keys())


def choose_class(found: Sequence[WidthClass]) -> WidthClass | None:
    """The class to keep to: the one whose best width yields most tokens per time, or None.

    A class of one width, or one to which a lone token would have to be padded with many rows, is of no use.

    Acceptance and the cost of a row are nominal numbers: measured ones would choose differently from run to run, and
    with the class the bits would change.
    """

    def tokens_per_cost(pair: WidthClass) -> float:
        return max(_expected_tokens(width) / _nominal_cost(width) for width in range(pair[0], pair[1] + 1))

    usable = [pair for pair in found if pair[0] < pair[1] and pair[0] <= MAX_PADDED_WIDTH]
    return max(usable, key=lambda pair: (tokens_per_cost(pair), -pair[0]), default=None)


def _expected_tokens(width: int) -> float:
    return (1 - TYPICAL_ACCEPTANCE**width) / (1 - TYPICAL_ACCEPTANCE)


def _nominal_cost(width: int) -> float:
    return 1 + TYPICAL_COST_OF_A_ROW * (width - 1)
