"""What passes cost on this machine: cached, guessed and then learnt from the passes of answers, or measured.

A run measures nothing before its first token (`known_curve`, `known_draft_cost`). Commands that report costs or plan
with them measure (`target_curve`, `draft_cost`), in a second or two. Both are kept between runs.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Annotated

import numpy as np
from msgspec import Meta, Struct

from edgespec.control import constants as c
from edgespec.control.cost import WIDEST, ContextCost, CostCurve
from edgespec.control.draft_cost import DraftCost, guessed_draft_cost
from edgespec.control.prior import PriorCurve, guessed_plain_s
from edgespec.engines.base import Engine
from edgespec.platform import disk_cache
from edgespec.platform.disk_cache import FileVersion, Seconds, file_key, key_of
from edgespec.platform.machine import processor
from edgespec.types import Batch, TokenIds

logger = logging.getLogger("edgespec")
METHOD = 3  # part of the cache key: raise it when the measurement changes
# The end of every step seen in kernels of this kind, and its neighbours; the rest is interpolated. The widths of FINE
# are measured only where there is time for several passes of each: one disturbed pass of two misleads first answers.
COARSE, FINE = (1, 2, 4, 5, 8, 16), (3, 6, 7, 9, 12)
WIDTHS = (*COARSE, *FINE)
_PerTokenS = Annotated[float, Meta(ge=0.0, le=1.0)]  # of context
_KeptTable = Annotated[list[Seconds], Meta(min_length=WIDEST, max_length=WIDEST)]
_LIBRARIES = {"llamacpp": "llama-cpp-python", "onnx": "onnxruntime"}


class _KeptCurve(Struct):
    widths: Annotated[dict[Annotated[int, Meta(ge=1, le=WIDEST)], Seconds], Meta(min_length=1)]
    context: tuple[_PerTokenS, _PerTokenS]


def known_curve(engine: Engine, files: Sequence[Path | FileVersion]) -> CostCurve:
    """The cost curve from an earlier measurement or run, or a guess that the first passes correct; runs no pass."""
    key = cost_key(engine, files)
    low = engine.facts.pinned_class[0] if engine.facts.pinned_class else 1
    known = _kept_curve(key) or PriorCurve.from_json(disk_cache.get("learnt costs", key), low)
    return known or PriorCurve(guessed_plain_s(engine.facts.weight_bytes), low)


def known_draft_cost(engine: Engine, files: Iterable[Path | FileVersion], target: Engine) -> DraftCost:
    """What a draft model's tokens cost, from an earlier measurement or run, or a guess by its size."""
    known = _kept_draft_cost(cost_key(engine, files))
    share = engine.facts.weight_bytes / max(target.facts.weight_bytes, 1)
    guess = guessed_draft_cost(share, engine.facts.name)
    if target.facts.device.startswith("rpc"):  # a pass of it waits for the network, which a draft does not
        guess.scale(guessed_plain_s(target.facts.weight_bytes))
    return known or guess


def target_curve(engine: Engine, files: Sequence[Path | FileVersion]) -> CostCurve:
    """The cost curve of an empty engine, measured once, then cached; the engine is left empty."""
    key = cost_key(engine, files)
    kept = _kept_curve(key)
    if kept is not None and _still_holds(kept, engine):
        return kept
    why = "once" if kept is None else "again, since they have changed"
    logger.info("measuring what passes of %s cost on this machine, %s", Path(file_key(files[0])[0]).name, why)
    costs = quick_costs(engine, COARSE)
    if c.LEAST_TURNS * sum(costs.values()) < 0.75 * c.QUICK_S:
        costs |= quick_costs(engine, FINE, passes=c.LEAST_TURNS * len(FINE))
    curve = CostCurve(_padded(smoothed(dict(sorted(costs.items()))), engine))
    store_curve(key, curve)
    return curve


def _still_holds(curve: CostCurve, engine: Engine) -> bool:
    """Whether a narrow and a wide pass still cost the same: the machine may have been busy when it was measured.

    Short passes are not checked: decoding runs enough of them to correct the curve at once.
    """
    widths = [width for width in (1, c.CHECKED_WIDTH) if width in curve.measured and width <= engine.widest_pass]
    if curve.at(1) < c.LEAST_CHECKED_S or not widths or c.PREFIX + max(widths) > engine.facts.context_length:
        return True
    now = timed_costs(engine, widths, c.PREFIX, lambda done: done >= c.CHECKED_TURNS)
    return all(1 / c.MOST_CHANGE <= now[width] / curve.at(width) <= c.MOST_CHANGE for width in widths)


def smoothed(costs: dict[int, float]) -> dict[int, float]:
    """Times by width, shrunk towards the straight line through them as far as noise explains it (Stein 1956).

    A kink due to noise would look like the end of a step and limit drafts. Steps of real kernels are several times as
    high as the noise left in a few passes, and remain. So does the first width, since all others are relative to it.
    """
    if len(costs) < 3:
        return costs
    widths, seconds = np.array(list(costs), np.float64), np.array(list(costs.values()))
    line = np.polynomial.Polynomial.fit(widths, seconds, 1, w=1.0 / seconds)(widths)
    off = seconds / line - 1.0
    drawn = line * (1.0 + off * off * off / (off * off + c.MEASURED_NOISE**2))
    stays = (line <= 0) | (widths == widths[0])
    return dict(zip(costs, np.where(stays, seconds, drawn).tolist(), strict=True))


def _padded(costs: dict[int, float], engine: Engine) -> dict[int, float]:
    """Widths below the pinned class are padded to it and cost the same pass, so their times are pooled."""
    low = engine.facts.pinned_class[0] if engine.facts.pinned_class else 1
    same = [seconds for width, seconds in costs.items() if width <= low]
    return {width: median(same) if width <= low else seconds for width, seconds in costs.items()}


def draft_cost(engine: Engine, files: Iterable[Path | FileVersion]) -> DraftCost:
    """Seconds per drafted and per read token of an empty draft model, measured once, then cached."""
    key = cost_key(engine, files)
    kept = _kept_draft_cost(key)
    if kept is None:
        read_width = min(c.READ_WIDTH, engine.widest_pass)
        costs = quick_costs(engine, (1, read_width), passes=8)
        kept = DraftCost(costs[1], costs[read_width] / read_width)
        store_draft_cost(key, kept)
    return kept


def exit_cost(engine: Engine) -> DraftCost:
    """Seconds per token of an early exit that shares an empty target's cache, so that it reads nothing itself."""
    ids = some_ids(engine, c.PREFIX + 1 + c.EXIT_PASSES)
    taken = []
    try:
        read(engine, ids[: c.PREFIX])
        found = engine.early_exit()
        found.follow(ids[: c.PREFIX + 1])
        for token in range(c.PREFIX, ids.size):
            started_s = perf_counter()
            found.feed(ids[token : token + 1])
            taken.append(perf_counter() - started_s)
    finally:
        engine.rollback(0)
    return DraftCost(sorted(taken[1:])[(len(taken) - 1) // 4])


def quick_costs(engine: Engine, widths: Sequence[int], passes: int = c.LEAST_PASSES) -> dict[int, float]:
    """Seconds by width, the widths taking turns: about `passes` passes, or more while c.QUICK_S is not over."""
    fitting = [w for w in widths if w <= engine.widest_pass and c.PREFIX + w <= engine.facts.context_length]
    if not fitting:
        return {}
    deadline_s = perf_counter() + c.QUICK_S
    turns = max(passes // len(fitting), 1)

    def is_enough(done: int) -> bool:
        return (done >= turns and perf_counter() > deadline_s) or done >= c.MOST_TURNS

    return timed_costs(engine, fitting, c.PREFIX, is_enough)


def timed_costs(
    engine: Engine, widths: Sequence[int], context_tokens: int, is_enough: Callable[[int], bool]
) -> dict[int, float]:
    """Lower quartile of the seconds of a verifying pass by width, until `is_enough(turns done)`.

    `context_tokens`: tokens cached before. The engine must be empty, and is left empty. All rows give logits, as in
    verification.
    """
    ids = some_ids(engine, context_tokens + max(widths))
    taken: dict[int, list[float]] = defaultdict(list)
    try:
        read(engine, ids[:context_tokens])
        engine.forward(Batch.chain(ids[context_tokens : context_tokens + max(widths)]))  # pages and buffers are touched
        done = 0
        while not done or not is_enough(done):
            for width in widths:
                shorten(engine, ids, context_tokens)
                started_s = perf_counter()
                engine.forward(Batch.chain(ids[context_tokens : context_tokens + width]))
                taken[width].append(perf_counter() - started_s)
            done += 1
    finally:
        engine.rollback(0)
    # The lower quartile, of two the lower one: disturbances only make a pass longer.
    return {width: sorted(times)[len(times) // 4] for width, times in taken.items()}


def some_ids(engine: Engine, count: int) -> TokenIds:
    """Any tokens [count], always the same: multiplicative hashes (Knuth, section 6.4) of their places.

    Without numpy.random, whose import takes a while, and swallows a Ctrl-C that comes meanwhile.
    """
    hashes = np.arange(1, count + 1, dtype=np.uint64) * 2_654_435_761 % 2**32
    return (hashes * engine.vocabulary.size >> np.uint64(32)).astype(np.int32)


def read(engine: Engine, ids: TokenIds) -> None:
    """Append `ids` [n] to the cache, in as few passes as possible."""
    for start in range(0, ids.size, engine.widest_pass):
        engine.forward(Batch.chain(ids[start : start + engine.widest_pass], last_only=True))


def shorten(engine: Engine, ids: TokenIds, to_length: int) -> None:
    """Make the cache, which holds the first of `ids` [n], hold `to_length` of them.

    A model with a running state that cannot be rolled back so far reads them again.
    """
    if engine.facts.can_rollback or to_length == engine.length():
        engine.rollback(to_length)
    else:
        engine.rollback(0)
        read(engine, ids[:to_length])


def cost_key(engine: Engine, files: Iterable[Path | FileVersion]) -> str:
    """A key of everything that the time of a pass depends on: files, library, machine, device, threads, cache."""
    facts = engine.facts
    return key_of(
        METHOD,
        [file_key(file) for file in files],
        (facts.name, _library_version(facts.name), processor()),
        (facts.device, facts.threads, facts.kv_bytes_per_token, facts.pinned_class),
        *((facts.placement,) if facts.placement else ()),
    )


def store_curve(key: str, curve: CostCurve) -> bool:
    """Store a curve for later runs, one that began with a guess separately, so that it continues to learn.

    Whether it was: there may be nothing to store yet, or no place.
    """
    if isinstance(curve, PriorCurve):
        kept = curve.to_json()
        return bool(kept) and disk_cache.put("learnt costs", key, kept)
    context = curve.context.fixed_s, curve.context.row_s
    return disk_cache.put("costs", key, _KeptCurve(curve.refined(), context))


def store_draft_cost(key: str, cost: DraftCost) -> None:
    disk_cache.put("draft costs", key, [cost.token_s, cost.read_s])


def store_file_curve(files: Sequence[Path | FileVersion], curve: CostCurve) -> None:
    """Store the latest curve of a model under its files alone, for plans that are made without loading it."""
    if not isinstance(curve, PriorCurve) or curve.is_scaled:
        table = curve.table(0)
        disk_cache.put("file curves", _file_curve_key(files), [table[width] for width in range(1, WIDEST + 1)])


def file_curve(files: Sequence[Path | FileVersion]) -> CostCurve | None:
    """The latest curve of a model on this machine, however it was loaded; None where it has not run."""
    kept = disk_cache.get(
        "file curves", _file_curve_key(files), Annotated[list[Seconds], Meta(min_length=WIDEST, max_length=WIDEST)]
    )
    return None if kept is None else CostCurve(dict(enumerate(kept, start=1)))


def _file_curve_key(files: Sequence[Path | FileVersion]) -> str:
    return key_of(METHOD, [file_key(file) for file in files], processor())


def _kept_draft_cost(key: str) -> DraftCost | None:
    """What `store_draft_cost` stored under `key`; None without."""
    kept = disk_cache.get("draft costs", key, tuple[Seconds, Seconds])
    return None if kept is None else DraftCost(*kept)


def _kept_curve(key: str) -> CostCurve | None:
    """What `store_curve` stored under `key`; None without."""
    kept: _KeptCurve | None = disk_cache.get("costs", key, _KeptCurve)
    return None if kept is None else CostCurve(kept.widths, ContextCost(*kept.context))


def _library_version(engine_name: str) -> str:
    from importlib.metadata import PackageNotFoundError, version  # 5 ms that only a first load needs

    try:
        return version(_LIBRARIES[engine_name])
    except (KeyError, PackageNotFoundError):
        return ""
