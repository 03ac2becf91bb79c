"""A model of tables for several answers at once, whose passes take time on a simulated clock only."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partialmethod
from pathlib import Path

import numpy as np
import pytest

from edgespec import GenerateOptions, Model, Sampling
from edgespec.config.options import LoadOptions
from edgespec.control.auto import AutoController
from edgespec.drafters.model import ModelDrafter
from edgespec.formats.manifest import ModelFile, ModelPair
from edgespec.generation.batching import ContinuousBatch
from edgespec.reports import Stats
from edgespec.types import Batch, Logits
from simulation import Clock
from table_engine import TableEngine

PASS_S, DRAFT_SHARE = 0.016, 0.1
SAMPLING = Sampling(temperature=1.0, seed=5, top_k=0, top_p=1.0, min_p=0.0)


class Costly(TableEngine):
    """A pass over n rows takes `ratios[n]` times `pass_s`. `widths`: of its passes."""

    clock: Clock
    ratios: Mapping[int, float]
    pass_s: float
    widths: list[int]

    def forward(self, batch: Batch) -> Logits:
        self.clock.now_s += self.seconds(batch.width)
        self.widths.append(batch.width)
        return super().forward(batch)

    def seconds(self, width: int) -> float:
        return self.pass_s * float(np.interp(width, list(self.ratios), list(self.ratios.values())))

    def costing(self, clock: Clock, ratios: Mapping[int, float], pass_s: float, weight_bytes: int) -> Costly:
        self.clock, self.ratios, self.pass_s, self.widths = clock, ratios, pass_s, []
        self.facts = replace(self.facts, weight_bytes=weight_bytes, pinned_class=None)  # no checks beside the answers
        return self


def shared_model(
    folder: Path, patch: pytest.MonkeyPatch, ratios: Mapping[int, float], sigma: float, count: int
) -> tuple[Model, Clock]:
    """A model for `count` answers at once with a draft that resembles it the less the larger `sigma` is."""
    clock, path = Clock(), folder / "table.gguf"
    path.write_text(f"{ratios} {sigma}")
    for module in ("generation.run_state", "generation.batching", "generation.decode", "control.threads"):
        patch.setattr(f"edgespec.{module}.perf_counter", clock)
    made = Costly.random(60, spread=3.0, context_length=600, max_batch=96, max_sequences=count)
    draft = made.related(sigma=sigma).costing(clock, ratios, DRAFT_SHARE * PASS_S, 10_000_000)
    target = made.costing(clock, ratios, PASS_S, 100_000_000)
    pair = ModelPair("table", {"target": ModelFile(path), "draft": ModelFile(path)})
    patch.setattr(AutoController, "__init__", partialmethod(AutoController.__init__, clock=clock))
    return Model(LoadOptions(parallel=count), pair, target, {"model": ModelDrafter(draft)}), clock


def rate(
    model: Model,
    clock: Clock,
    count: int,
    options: GenerateOptions,
    texts: int,
    lengths: Sequence[int] = (20, 60, 30),
    ledger: Ledger | None = None,
) -> tuple[float, list[Stats]]:
    """(tokens per second of all of `texts` answers, `count` at once; counters of each). `lengths`: of the prompts."""
    draw, started_s = np.random.default_rng(count), clock()
    model.forget()
    prompts = [draw.integers(0, 60, lengths[place % len(lengths)]).tolist() for place in range(texts)]
    asked = [model.stream(ids, SAMPLING, options) for ids in prompts]
    waiting = list(asked)
    with model.batch() as batch:
        while waiting or batch.num_running:
            while waiting and batch.num_running < count:
                batch.begin(waiting.pop(0))
            batch.step() if ledger is None else ledger.step(batch)
    stats = [each.stats for each in asked]
    return sum(each.new_tokens for each in stats) / (clock() - started_s), stats


class Ledger:
    """How far answers that share passes fall behind plain decoding of the same tokens, pass by pass.

    In plain decoding a token takes its part of the plain pass over all that decode at that moment, and a prompt what
    it adds to it. `share`: of that time, that may be lost. `worst_s`: the most by which more was lost since the first
    pass, by load, which is the number of answers that decode, rounded up to a power of two.
    """

    def __init__(self, target: Costly, share: float) -> None:
        self._target, self._share = target, share
        self._behind_s: dict[int, float] = defaultdict(float)
        self.worst_s: dict[int, float] = defaultdict(float)

    def step(self, batch: ContinuousBatch) -> None:
        """One step of the batch, entered here."""
        target, clock = self._target, self._target.clock
        members = [(each, each.run.stats.new_tokens, each.latest_pass) for each in batch._members]
        started_s, num_passes = clock(), len(target.widths)
        batch.step()
        decoding = [(member, tokens, latest) for member, tokens, latest in members if tokens]
        if not decoding:
            return
        plain_s = 0.0
        if len(target.widths) > num_passes:
            took_part = [(member, tokens) for member, tokens, latest in decoding if member.latest_pass != latest]
            prompt_rows = target.widths[num_passes] - sum(member.latest_rows for member, _ in took_part)
            drafted = sum(member.run.stats.new_tokens - tokens - 1 for member, tokens in took_part)
            plain_s = target.seconds(len(took_part) + prompt_rows)
            plain_s += drafted * target.seconds(len(took_part)) / max(len(took_part), 1)
        load = 1 << (len(decoding) - 1).bit_length()
        self._behind_s[load] += clock() - started_s - (1.0 + self._share) * plain_s
        self.worst_s[load] = max(self.worst_s[load], self._behind_s[load])
