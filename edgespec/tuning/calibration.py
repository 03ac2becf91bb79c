"""Measures t(width, context) of a target and d(context) of a draft, and fits the controller's cost model to them.

Widths alternate, and contexts are visited in ascending and then in descending order, so that a machine that slows down
meanwhile does not favour one of them. The fit minimises squared relative errors of the medians: absolute errors would
give wide passes too much weight.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median, quantiles
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from edgespec.control.cost import ContextCost, CostCurve
from edgespec.control.draft_cost import DraftCost
from edgespec.control.length import ceiling
from edgespec.control.measure import read, shorten, some_ids
from edgespec.engines.base import Engine
from edgespec.errors import CapabilityError, ConfigError
from edgespec.types import Batch, TokenIds

WIDTHS = (*range(1, 17), 20, 24, 32)
CONTEXTS = (64, 512, 2048)
_READ_WIDTH = 32
_SAME_PRICE = 1.02  # a width is not useful if a wider pass costs at most this factor more
_LEAST_BASE = 0.2  # lower bound of a fitted base cost, as a fraction of the fastest pass of that width
Advance = Callable[[int], None]
Column = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Sample:
    """Timed passes of `width` rows with `context_tokens` cached. `spread`: interquartile range / median."""

    width: int
    context_tokens: int
    median_s: float
    spread: float
    num_passes: int


@dataclass(frozen=True, slots=True)
class Calibration:
    """Cost of a target's passes. `curve`: the fitted cost model; `fit_error`: its median relative error."""

    samples: tuple[Sample, ...]
    curve: CostCurve
    fit_error: float

    @property
    def widths(self) -> tuple[int, ...]:
        return tuple(sorted({sample.width for sample in self.samples}))

    @property
    def contexts(self) -> tuple[int, ...]:
        return tuple(sorted({sample.context_tokens for sample in self.samples}))

    @property
    def middle_context(self) -> int:
        """The context length for which single figures are reported."""
        return self.contexts[len(self.contexts) // 2]

    @property
    def spread(self) -> float:
        """Median spread of all samples: the noise of the machine."""
        return median(sample.spread for sample in self.samples)

    def sample(self, width: int, context_tokens: int) -> Sample:
        return next(s for s in self.samples if (s.width, s.context_tokens) == (width, context_tokens))

    @property
    def useful_widths(self) -> tuple[int, ...]:
        """Widths for which every wider pass costs more. At any other width, a wider pass is free."""
        pass_s, widths = self.curve.table(self.middle_context), self.widths
        # the table is monotonic, so the next width is the cheapest of the wider ones
        ends = [w for w, wider in pairwise(widths) if pass_s[wider] > _SAME_PRICE * pass_s[w]]
        return (*ends, widths[-1])

    def ceiling(self, token_s: float) -> tuple[int, float]:
        """(draft length, speedup): the upper limit for a drafter that takes `token_s` seconds per token."""
        return ceiling(self.curve.table(self.middle_context), token_s, self.widths[-1] - 1)


@dataclass(frozen=True, slots=True)
class DraftCalibration:
    """Cost of a draft model: a drafted token takes `fixed_s` + context * `context_s` seconds; `cost` at mid context."""

    samples: tuple[Sample, ...]
    fixed_s: float
    context_s: float
    cost: DraftCost


def allowed_widths(engine: Engine) -> tuple[int, ...]:
    """Those of WIDTHS that the engine supports."""
    return tuple(width for width in WIDTHS if width <= engine.widest_pass)


def allowed_contexts(engine: Engine, requested: Sequence[int] | None, widest: int) -> tuple[int, ...]:
    """The context lengths to measure, ascending. `requested` None: CONTEXTS, limited to the model's context.

    Raises ConfigError for a length that leaves no room for a pass of `widest` rows.
    """
    room = engine.facts.context_length - widest
    if room < 1:
        raise ConfigError(
            f"a context of {engine.facts.context_length} tokens leaves no room for passes of {widest} rows: give a "
            "larger --ctx-size"
        )
    if requested is None:
        return tuple(sorted({min(context, room) for context in CONTEXTS}))
    for context in requested:
        if not 1 <= context <= room:
            raise ConfigError(f"--contexts {context} is outside 1..{room}, the lengths that fit this model's context")
    return tuple(sorted(set(requested)))


def num_passes(widths: Sequence[int], contexts: Sequence[int], turns: int) -> int:
    """Number of passes that `measure` reports to `advance`."""
    return len(widths) * len(contexts) * 2 * _half(turns)


def measure(
    engine: Engine, widths: Sequence[int], contexts: Sequence[int], turns: int, advance: Advance
) -> tuple[Sample, ...]:
    """Time `turns` (rounded up to even) passes of every width at every context length; all rows give logits.

    The engine's cache must be empty, and is empty afterwards. `advance(n)` is called after n passes. Raises
    CapabilityError for a model that cannot roll back.
    """
    if not engine.facts.can_speculate:
        raise CapabilityError("this model cannot roll back its state: speculation, and so calibration, is not possible")
    most = max(contexts) + max(widths)
    ids = some_ids(engine, most)
    measured: dict[tuple[int, int], list[float]] = defaultdict(list)
    ascending = sorted(contexts)
    try:
        for context in (*ascending, *reversed(ascending)):
            _fill_cache(engine, ids, context)
            engine.forward(Batch.chain(ids[context : context + max(widths)]))  # warm-up: touches pages and buffers
            for turn in range(_half(turns)):
                first = turn % len(widths)
                for width in (*widths[first:], *widths[:first]):
                    measured[width, context].append(_timed_pass(engine, ids, context, width))
                    advance(1)
    finally:
        engine.rollback(0)
    return tuple(_sample(width, context, times) for (width, context), times in sorted(measured.items()))


def fit_target(samples: Sequence[Sample]) -> Calibration:
    """Fit the cost curve t(width, context) = base(width) + context * (f + width * r) to all samples.

    f and r are at least 0, and 0 if only one context length was measured.
    """
    widths = sorted({sample.width for sample in samples})
    times = np.array([sample.median_s for sample in samples])
    contexts = np.array([sample.context_tokens for sample in samples], np.float64)
    rows = np.array([sample.width for sample in samples], np.float64)
    bases = [np.array([float(sample.width == width) for sample in samples]) for width in widths]
    slopes = {"fixed_s": contexts, "row_s": contexts * rows} if np.unique(contexts).size > 1 else {}
    while True:
        coefficients = _least_squares([*bases, *slopes.values()], times)
        slope = dict(zip(slopes, coefficients[len(widths) :].tolist(), strict=True))
        if not slope or min(slope.values()) >= 0:
            break
        effects = {name: seconds * float(slopes[name].mean()) for name, seconds in slope.items()}
        del slopes[min(effects, key=effects.__getitem__)]
    least = {w: _LEAST_BASE * min(s.median_s for s in samples if s.width == w) for w in widths}
    measured = {w: max(float(base), least[w]) for w, base in zip(widths, coefficients, strict=False)}
    context = ContextCost(slope.get("fixed_s", 0.0), slope.get("row_s", 0.0))
    fitted = np.array([measured[s.width] + context.at(s.width, s.context_tokens) for s in samples])
    return Calibration(tuple(samples), CostCurve(measured, context), float(np.median(np.abs(fitted / times - 1))))


def fit_draft(samples: Sequence[Sample], read_width: int) -> DraftCalibration:
    """Fit d(context) = fixed + context * slope to the passes of width 1. Reading a token costs a row of a wide pass."""
    single_row = [sample for sample in samples if sample.width == 1]
    contexts = np.array([sample.context_tokens for sample in single_row], np.float64)
    times = np.array([sample.median_s for sample in single_row])
    columns = [np.ones(len(single_row)), contexts] if np.unique(contexts).size > 1 else [np.ones(len(single_row))]
    fixed_s, context_s = (*_least_squares(columns, times).tolist(), 0.0)[:2]
    if context_s < 0:
        fixed_s, context_s = median(times.tolist()), 0.0
    middle = single_row[len(single_row) // 2]
    read_s = next(s.median_s for s in samples if (s.width, s.context_tokens) == (read_width, middle.context_tokens))
    return DraftCalibration(tuple(samples), fixed_s, context_s, DraftCost(middle.median_s, read_s / read_width))


def draft_widths(engine: Engine) -> tuple[int, ...]:
    """The widths to measure for a draft model: 1 (drafting), and the width in which it reads accepted tokens."""
    return 1, min(_READ_WIDTH, engine.widest_pass)


def padding_cost(samples: Sequence[Sample], low: int) -> Mapping[str, float]:
    """Cost of padding a single-token pass to `low` rows, from `samples` of a model that does not pad."""
    by_width = {sample.width: sample.median_s for sample in samples}
    return {"lone_s": by_width[1], "padded_s": by_width[low], "ratio": by_width[low] / by_width[1]}


def _least_squares(columns: Sequence[Column], times: Column) -> Column:
    """The coefficients that minimise the sum of squared relative errors."""
    scaled = np.stack(columns, axis=1) / times[:, None]
    return np.asarray(np.linalg.lstsq(scaled, np.ones(times.size), rcond=None)[0], np.float64)


def _half(turns: int) -> int:
    return max((turns + 1) // 2, 1)


def _fill_cache(engine: Engine, ids: TokenIds, context: int) -> None:
    """Make the cache hold the first `context` of `ids` [n]; what is cached already is kept."""
    shorten(engine, ids, min(engine.length(), context))
    read(engine, ids[engine.length() : context])


def _timed_pass(engine: Engine, ids: TokenIds, context: int, width: int) -> float:
    shorten(engine, ids, context)
    batch = Batch.chain(ids[context : context + width])
    started_s = perf_counter()
    engine.forward(batch)
    return perf_counter() - started_s


def _sample(width: int, context: int, times: Sequence[float]) -> Sample:
    middle_s = median(times)
    low_s, _, high_s = quantiles(times, n=4, method="inclusive")
    return Sample(width, context, middle_s, (high_s - low_s) / middle_s, len(times))
