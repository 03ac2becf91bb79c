"""Measures t(width, context) of a target and d(context) of a draft thoroughly, and fits the controller's cost model.

The widths take turns, and the contexts are gone through up and down again, so that a machine that slows down meanwhile
favours none of them. Medians are fitted by least squares of relative errors: a wide pass must not outvote a narrow one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median, quantiles
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from edgespec.control.cost import ContextCost, CostCurve
from edgespec.control.length import ceiling
from edgespec.control.run_cost import DraftCost
from edgespec.engines.base import Engine
from edgespec.errors import CapabilityError, ConfigError
from edgespec.types import Batch, TokenIds

WIDTHS = (*range(1, 17), 20, 24, 32)
CONTEXTS = (64, 512, 2048)
_READ_WIDTH = 32
_SAME_PRICE = 1.02  # a wider pass that costs no more than this times a narrower one leaves it no use
_LEAST_BASE = 0.2  # of the fastest pass at a width, that a fit may leave of its cost on an empty cache
Advance = Callable[[int], None]
Column = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Sample:
    """Passes of one width onto one context. `spread`: distance of their quartiles over their median."""

    width: int
    context_tokens: int
    median_s: float
    spread: float
    num_passes: int


@dataclass(frozen=True, slots=True)
class Calibration:
    """What passes of a target cost. `curve` is the fitted model; `fit_error` its median relative error."""

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
        """The context that single figures are given for."""
        return self.contexts[len(self.contexts) // 2]

    @property
    def spread(self) -> float:
        """The median spread of all samples: what the machine did besides."""
        return median(sample.spread for sample in self.samples)

    def sample(self, width: int, context_tokens: int) -> Sample:
        return next(s for s in self.samples if (s.width, s.context_tokens) == (width, context_tokens))

    @property
    def useful_widths(self) -> tuple[int, ...]:
        """Widths at the end of a step: any wider pass costs more. The others are never worth a pass."""
        pass_s, widths = self.curve.table(self.middle_context), self.widths
        # the table never falls, so the next wider pass is the cheapest of the wider ones
        ends = [w for w, wider in pairwise(widths) if pass_s[wider] > _SAME_PRICE * pass_s[w]]
        return (*ends, widths[-1])

    def ceiling(self, token_s: float) -> tuple[int, float]:
        """(draft length, speedup) that no drafter with tokens of `token_s` seconds can exceed here."""
        return ceiling(self.curve.table(self.middle_context), token_s, self.widths[-1] - 1)


@dataclass(frozen=True, slots=True)
class DraftCalibration:
    """What a draft model costs: `token_s` per drafted token at each context, `read_s` per token that it reads."""

    samples: tuple[Sample, ...]
    fixed_s: float
    context_s: float
    cost: DraftCost


def allowed_widths(engine: Engine, widths: Iterable[int] = WIDTHS) -> tuple[int, ...]:
    """Those of `widths` that the engine allows."""
    return tuple(width for width in widths if width <= engine.widest_pass)


def allowed_contexts(engine: Engine, wanted: Sequence[int] | None, widest: int) -> tuple[int, ...]:
    """The contexts to measure at, ascending; None: the usual ones, as far as the model goes.

    Raises ConfigError for a context that does not leave room for a pass of `widest`.
    """
    room = engine.facts.context_length - widest
    if room < 1:
        raise ConfigError(
            f"a context of {engine.facts.context_length} tokens leaves no room for passes of {widest}: give a larger "
            "--ctx-size"
        )
    if wanted is None:
        return tuple(sorted({min(context, room) for context in CONTEXTS}))
    for context in wanted:
        if not 1 <= context <= room:
            raise ConfigError(f"--contexts {context} is outside 1..{room}, what this context leaves room for")
    return tuple(sorted(set(wanted)))


def num_passes(widths: Sequence[int], contexts: Sequence[int], turns: int) -> int:
    """How often `measure` tells that it got on."""
    return len(widths) * len(contexts) * 2 * _half(turns)


def measure(
    engine: Engine, widths: Sequence[int], contexts: Sequence[int], turns: int, advance: Advance
) -> tuple[Sample, ...]:
    """`turns` (made even) passes of every width onto every context; the engine must be empty and is left so.

    All rows give logits, as those of a draft do. `advance(n)` is told of each pass. Raises CapabilityError for a model
    that cannot roll back.
    """
    if not engine.facts.can_rollback:
        raise CapabilityError("this model cannot roll back its state, so only plain decoding is possible: no widths")
    most = max(contexts) + max(widths)
    ids = np.random.default_rng(0).integers(0, engine.vocabulary.size, most).astype(np.int32)
    taken: dict[tuple[int, int], list[float]] = defaultdict(list)
    ascending = sorted(contexts)
    try:
        for context in (*ascending, *reversed(ascending)):
            _hold(engine, ids, context)
            engine.forward(Batch.chain(ids[context : context + max(widths)]))  # pages and buffers are touched
            for turn in range(_half(turns)):
                first = turn % len(widths)
                for width in (*widths[first:], *widths[:first]):
                    taken[width, context].append(_timed_pass(engine, ids, context, width))
                    advance(1)
    finally:
        engine.rollback(0)
    return tuple(_sample(width, context, times) for (width, context), times in sorted(taken.items()))


def fit_target(samples: Sequence[Sample]) -> Calibration:
    """The cost curve that comes nearest to all samples: t(width, context) = base(width) + context * (f + width * r).

    f and r are not negative, and 0 when only one context was measured.
    """
    widths = sorted({sample.width for sample in samples})
    times = np.array([sample.median_s for sample in samples])
    contexts = np.array([sample.context_tokens for sample in samples], np.float64)
    rows = np.array([sample.width for sample in samples], np.float64)
    bases = [np.array([float(sample.width == width) for sample in samples]) for width in widths]
    slopes = {"fixed_s": contexts, "row_s": contexts * rows} if np.unique(contexts).size > 1 else {}
    while True:
        found = _least_squares([*bases, *slopes.values()], times)
        slope = dict(zip(slopes, found[len(widths) :].tolist(), strict=True))
        if not slope or min(slope.values()) >= 0:
            break
        effects = {name: seconds * float(slopes[name].mean()) for name, seconds in slope.items()}
        del slopes[min(effects, key=effects.__getitem__)]
    least = {w: _LEAST_BASE * min(s.median_s for s in samples if s.width == w) for w in widths}
    measured = {w: max(float(base), least[w]) for w, base in zip(widths, found, strict=False)}
    context = ContextCost(slope.get("fixed_s", 0.0), slope.get("row_s", 0.0))
    fitted = np.array([measured[s.width] + context.at(s.width, s.context_tokens) for s in samples])
    return Calibration(tuple(samples), CostCurve(measured, context), float(np.median(np.abs(fitted / times - 1))))


def fit_draft(samples: Sequence[Sample], read_width: int) -> DraftCalibration:
    """d(context) = fixed + context * slope of the passes of width 1; reading is what a row of a wide pass costs."""
    lone = [sample for sample in samples if sample.width == 1]
    contexts = np.array([sample.context_tokens for sample in lone], np.float64)
    times = np.array([sample.median_s for sample in lone])
    columns = [np.ones(len(lone)), contexts] if np.unique(contexts).size > 1 else [np.ones(len(lone))]
    fixed_s, context_s = (*_least_squares(columns, times).tolist(), 0.0)[:2]
    if context_s < 0:
        fixed_s, context_s = median(times.tolist()), 0.0
    middle = lone[len(lone) // 2]
    read_s = next(s.median_s for s in samples if (s.width, s.context_tokens) == (read_width, middle.context_tokens))
    return DraftCalibration(tuple(samples), fixed_s, context_s, DraftCost(middle.median_s, read_s / read_width))


def draft_widths(engine: Engine) -> tuple[int, ...]:
    """A drafted token, and the width in which a draft model reads what it lacks."""
    return 1, min(_READ_WIDTH, engine.widest_pass)


def lone_token_cost(samples: Sequence[Sample], low: int) -> Mapping[str, float]:
    """What padding a lone token to `low` rows costs; `samples` are of a model that does not pad."""
    by_width = {sample.width: sample.median_s for sample in samples}
    return {"lone_s": by_width[1], "padded_s": by_width[low], "ratio": by_width[low] / by_width[1]}


def _least_squares(columns: Sequence[Column], times: Column) -> Column:
    """The coefficients that make the sum of squared relative errors least."""
    scaled = np.stack(columns, axis=1) / times[:, None]
    return np.asarray(np.linalg.lstsq(scaled, np.ones(times.size), rcond=None)[0], np.float64)


def _half(turns: int) -> int:
    return max((turns + 1) // 2, 1)


def _hold(engine: Engine, ids: TokenIds, context: int) -> None:
    """Make the cache hold the first `context` of `ids` [n]; what it holds of them already stays."""
    engine.rollback(min(engine.length(), context))
    step = engine.widest_pass
    while (start := engine.length()) < context:
        engine.forward(Batch.chain(ids[start : min(start + step, context)], last_only=True))


def _timed_pass(engine: Engine, ids: TokenIds, context: int, width: int) -> float:
    engine.rollback(context)
    batch = Batch.chain(ids[context : context + width])
    started_s = perf_counter()
    engine.forward(batch)
    return perf_counter() - started_s


def _sample(width: int, context: int, times: Sequence[float]) -> Sample:
    middle_s = median(times)
    low_s, _, high_s = quantiles(times, n=4, method="inclusive")
    return Sample(width, context, middle_s, (high_s - low_s) / middle_s, len(times))
