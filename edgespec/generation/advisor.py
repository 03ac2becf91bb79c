"""Gathers what was measured in each answer of a model, and says what would make it faster.

A loaded model gives one piece of advice at most, and each is given once per model on a machine: what was said is kept
in the cache folder.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from statistics import median

from edgespec.config.options import GenerateOptions, LoadOptions
from edgespec.config.values import DrafterName
from edgespec.control.advice import Evidence, advice
from edgespec.control.length import ceiling
from edgespec.control.measure import file_curve
from edgespec.control.pool import DrafterPool
from edgespec.engines.base import Engine
from edgespec.engines.conditions import Conditions
from edgespec.errors import EdgespecError
from edgespec.formats.manifest import ModelPair
from edgespec.installation import quoted
from edgespec.loading.registry import resolve
from edgespec.platform import disk_cache
from edgespec.platform.machine import physical_cores
from edgespec.reports import RoundRecord, Stats

OnRound = Callable[[RoundRecord], None]
_KIND = "advice"
LEAST_S = 5.0  # shortest decoding that gets advice: nobody waited for shorter answers
_CONTEXT_STEP = 256  # tokens of context, within which passes of equal width take equally long
_LEAST_PASSES, _MOST_PASSES, _MOST_KEYS = 8, 64, 256
_LONGEST_DRAFT = 16


class Advisor:
    """Watches the answers of one loaded model.

    `conditions`: reads the machine's state.
    """

    def __init__(
        self,
        options: LoadOptions,
        pair: ModelPair,
        target: Engine,
        pool: DrafterPool,
        conditions: Callable[[], Conditions] = Conditions.now,
    ) -> None:
        self.least_s = LEAST_S
        self._options, self._pair, self._target, self._pool = options, pair, target, pool
        self._read = conditions
        self._before = conditions()
        self._is_done = False
        self._drafted, self._accepted = Counter[str](), Counter[str]()  # by drafter, since the load
        self._fixed_length: int | None = None
        self._usual: dict[tuple[int, int], float] = {}  # seconds of passes of earlier answers, by width and context
        self._passes: dict[tuple[int, int], list[float]] = defaultdict(list)  # of this answer

    def watching(self, request: GenerateOptions, on_round: OnRound | None) -> OnRound:
        """A function to call after every round of a new answer; it calls `on_round`."""
        self._passes.clear()
        length = self._options.draft_length if request.draft_length is None else request.draft_length
        self._fixed_length = length if isinstance(length, int) and length else None
        if on_round is None:
            return self._observe

        def both(record: RoundRecord) -> None:
            self._observe(record)
            on_round(record)

        return both

    def _observe(self, record: RoundRecord) -> None:
        if record.drafter is not None:
            self._drafted[record.drafter] += record.drafted_tokens
            self._accepted[record.drafter] += record.accepted_tokens
        if not record.is_disturbed:
            taken = self._passes[record.width, record.position // _CONTEXT_STEP]
            if len(taken) < _MOST_PASSES:
                taken.append(record.verify_s)

    def judged(self, stats: Stats) -> str:
        """One line of advice on a finished answer; empty where there is none, or where it was given before."""
        slowdown = self._slowdown()
        if self._is_done or stats.decode_s < self.least_s:
            return ""
        before, self._before = self._before, self._read()
        try:
            found = advice(self._evidence(stats, before, self._before, slowdown), self._was_given)
            if found is None:
                return ""
            self._is_done = True
            disk_cache.mark(_KIND, self._key(found.cause), self._pair.target)
        except OSError:  # a model file was deleted meanwhile, and its identity is the key
            return ""
        return found.text

    def _was_given(self, cause: str) -> bool:
        return disk_cache.is_marked(_KIND, self._key(cause))

    def _key(self, cause: str) -> str:
        return disk_cache.key_of(_KIND, cause, disk_cache.file_key(self._pair.target))

    def _slowdown(self) -> float:
        """Seconds of this answer's passes over those of equal ones before; 1 where there were none."""
        ratios = []
        for key, taken in self._passes.items():
            if len(taken) < _LEAST_PASSES:
                continue
            now_s = sorted(taken)[len(taken) // 4]
            usual_s = self._usual.get(key)
            if usual_s is not None:
                ratios.append(now_s / usual_s)
            if usual_s is not None or len(self._usual) < _MOST_KEYS:
                self._usual[key] = now_s if usual_s is None else min(now_s, usual_s)
        return median(ratios) if ratios else 1.0

    def _evidence(self, stats: Stats, before: Conditions, now: Conditions, slowdown: float) -> Evidence:
        options, pool = self._options, self._pool
        engine, cores = self._target, physical_cores()
        threads = engine.facts.threads if pool.threads is None else pool.threads.threads
        is_busy = threads < engine.facts.threads or (now.load or 0.0) > threads + 0.7
        draft = pool.draft_name
        # What other programs slow down says nothing of this engine, nor of heat.
        other, gain = (None, 1.0) if is_busy else self._other_engine()
        share, most = self._draft_cost()
        return Evidence(
            model=quoted(str(options.model)),
            passes=stats.target_passes,
            disk_reads=_risen(before.disk_reads, now.disk_reads),
            stalled=now.stalled,
            throttled=_risen(before.throttled, now.throttled),
            clock=now.clock,
            on_battery=now.on_battery,
            saves_power=now.saves_power,
            slowdown=1.0 if is_busy else slowdown,
            threads=engine.facts.threads if options.threads is not None else threads,
            cores=cores,
            gives_threads=options.threads is not None,
            gives_memory=options.memory is not None,
            context_length=engine.facts.context_length,
            fixed_length=self._fixed_length,
            drafted=stats.drafted_tokens,
            accepted=stats.accepted_tokens,
            loss=self._loss(stats),
            model_drafted=self._drafted[draft] if draft else 0,
            model_accepted=self._accepted[draft] if draft else 0,
            draft_share=share,
            ceiling=most,
            idle_share=self._idle_share(draft),
            other_engine=other,
            other_gain=gain,
        )

    def _loss(self, stats: Stats) -> float | None:
        """Time per token over that of a plain pass; None while no plain pass was timed."""
        curve = self._pool.cost_curve
        if not curve.is_scaled or stats.new_tokens < 2:
            return None
        return stats.decode_s / (stats.new_tokens - 1) / curve.at(1, stats.prompt_tokens)

    def _draft_cost(self) -> tuple[float | None, float | None]:
        """Once timed: (a drafted token's time over a plain pass, the speedup if all tokens were accepted)."""
        curve, name = self._pool.cost_curve, self._pool.draft_name
        cost = self._pool.draft_costs.get(name) if name else None
        if cost is None or not cost.is_observed or cost.is_relative or not curve.is_sure_of_plain():
            return None, None
        most = min(_LONGEST_DRAFT, self._target.most_draft_tokens)
        pass_s = [0.0, *(curve.at(width) for width in range(1, most + 2))]
        return cost.token_s / pass_s[1], ceiling(pass_s, cost.token_s, most)[1]

    def _idle_share(self, draft: DrafterName | None) -> float | None:
        """What a drafted token is taken to cost, in plain passes, if the user named the draft model."""
        cost = self._pool.draft_costs.get(draft) if draft else None
        if cost is None or (self._options.draft is None and self._options.drafter != draft):
            return None
        return cost.token_s / (1.0 if cost.is_relative else self._pool.cost_curve.at(1))

    def _other_engine(self) -> tuple[str | None, float]:
        """The engine that ran the same model fastest on this machine, and how much faster than this one; or None."""
        own = self._pool.cost_curve
        if not own.is_scaled:
            return None, 1.0
        found: dict[str, float] = {}
        for name in self._pair.engines:
            if name != self._pair.files["target"].engine:
                try:
                    files = resolve(self._options.model, engine=name, check_hashes=False).paths("target")
                    curve = file_curve(files)
                except (EdgespecError, OSError):
                    continue
                if curve is not None:
                    found[name] = own.at(1) / curve.at(1)
        best = max(found, key=lambda name: found[name], default=None)
        return best, found[best] if best else 1.0


def _risen(before: int | None, now: int | None) -> int:
    return 0 if before is None or now is None else max(now - before, 0)
