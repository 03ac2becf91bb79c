"""Prices: the rate rule against brute force, and where drafts with branches are taken."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest

import edgespec
from edgespec.control.auto import AutoController
from edgespec.control.base import Proposal
from edgespec.control.confidence import outcomes
from edgespec.control.constants import FORESIGHT
from edgespec.control.prices import Prices, RunCosts, best_length, best_nodes, least_ahead, may_pay, path_products
from edgespec.drafters.base import Drafter, DraftRequest
from edgespec.drafters.lookahead import LookaheadDrafter
from edgespec.drafters.model import ModelDrafter
from edgespec.drafters.ngram import NgramDrafter
from edgespec.drafters.tree import TreeDrafter
from edgespec.engines.sequence import CachedSequence, Passes
from edgespec.sampling.acceptance import RULES
from edgespec.types import Batch, Draft, Logits, Verdict
from lossless import PLAIN, VOCABULARY, autoregressive, run_of, speculative
from simulation import known_curve
from table_engine import TableEngine
from tiny_heads import drafter_of, table_heads

#     0 - 1 - 2
#   / 3 - 4
#   \ 5
FORKED = Draft(
    np.arange(6, dtype=np.int32),
    np.array([-1, 0, 1, -1, 3, -1], np.int32),
    np.ones(6, np.float32),
    evidence=tuple((float(i),) for i in range(6)),
)


def test_a_node_is_worth_its_path() -> None:
    assert path_products(FORKED, [0.5, 0.5, 0.5, 0.2, 0.5, 0.1]) == [0.5, 0.25, 0.125, 0.2, 0.1, 0.1]


def test_outcomes_are_those_of_nodes_whose_parents_stood() -> None:
    assert outcomes(FORKED, Verdict((), 9)) == [(0, False), (3, False), (5, False)]
    assert outcomes(FORKED, Verdict((3,), 9)) == [(0, False), (3, True), (5, False), (4, False)]
    assert outcomes(FORKED, Verdict((0, 1, 2), 9))[-2:] == [(1, True), (2, True)]
    assert outcomes(Draft.chain([4, 5, 6]), Verdict((0,), 9)) == [(0, True), (1, False)]


@pytest.mark.parametrize("row_s, kept", [(0.0, 6), (0.04, 6), (0.2, 2), (0.4, 1), (2.0, 0)])
def test_all_of_a_tree_is_kept_or_what_pays_of_its_main_chain(row_s: float, kept: int) -> None:
    pass_s = [1.0 + row_s * (width - 1) for width in range(10)]
    prices, confidences = Prices(pass_s, least_ahead(pass_s), 1.0), [0.6, 0.5, 0.3, 0.3, 0.5, 0.1]
    assert best_nodes(FORKED, confidences, prices, 8)[0] == kept
    chain = Draft.chain([1, 2, 3])
    best = best_length(confidences[:3], prices, 8)
    assert best_nodes(chain, confidences[:3], prices, 8) == best


class Watched(AutoController):
    """Counts the drafts with branches that it proposes."""

    branched = 0

    def proposing(self, request: DraftRequest) -> Passes[Proposal]:
        proposal = yield from super().proposing(request)
        self.branched += not proposal.draft.is_chain
        return proposal


class Timed(TableEngine):
    """A pass takes one second and `row_s` for each further row, on a clock of its own."""

    row_s, now_s = 0.0, 0.0

    def forward(self, batch: Batch) -> Logits:
        self.now_s += 1.0 + self.row_s * (batch.width - 1)
        return super().forward(batch)


def of_a_draft_model(engine: Timed) -> list[Drafter]:
    model = ModelDrafter(engine.related(sigma=0.8))
    return [model, TreeDrafter(model), LookaheadDrafter(), NgramDrafter()]


def of_heads(kind: str) -> Callable[[Timed], list[Drafter]]:
    return lambda engine: [drafter_of(table_heads(kind, engine.related(sigma=0.8)), VOCABULARY)]


MAKERS = {"draft model": of_a_draft_model, "medusa": of_heads("medusa"), "eagle": of_heads("eagle")}


@pytest.mark.parametrize("rule", ["coupled", "typical", "block"])
@pytest.mark.parametrize("row_s, temperature", [(0.0, 0.0), (0.005, 1.0), (0.6, 1.0)])
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_auto_takes_trees_where_rows_are_cheap_and_only_there(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[Timed], list[Drafter]], rule: str, row_s: float, temperature: float
) -> None:
    engine = Timed.random(VOCABULARY, order=1, seed=1, context_length=500)
    engine.row_s = row_s
    for module in ("generation.run_state", "generation.decode"):
        monkeypatch.setattr(f"edgespec.{module}.perf_counter", lambda: engine.now_s)
    curve = known_curve({1: 1.0, 65: 1.0 + 64 * row_s})
    drafters = {each.name: each for each in make(engine)}
    controller = Watched(drafters, RunCosts(curve, {}), clock=lambda: engine.now_s)
    cached = CachedSequence(engine)
    cached.keep_features(True)
    runs = [run_of(cached, replace(PLAIN, temperature=temperature), 400, logprobs=False) for _ in range(2)]
    found = [event.token_id for event in speculative(runs[0], controller, RULES[rule])]
    assert len(found) == 400
    if rule == "coupled":
        assert found == [event.token_id for event in autoregressive(runs[1])]
    if row_s == 0.6 or rule == "block":
        assert controller.branched <= 5, "a few to find out, of hundreds of rounds"
    elif rule == "coupled":  # greedy chains of heads are mostly accepted
        assert controller.branched > (2 if temperature else 0)


@pytest.fixture(scope="module")
def demo() -> Iterator[edgespec.Model]:
    with edgespec.load("demo", engine="llamacpp", threads=1) as model:
        yield model


def test_auto_takes_no_drafter_of_many_rows_however_cheap_rows_are(
    demo: edgespec.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked for once, at a cost of nothing, they kept a draft model away for a whole answer."""
    pool = demo.drafters
    pool.drafter("tree")  # asked for by name before: that changes nothing
    monkeypatch.setattr(pool.costs, "curve", known_curve({1: 1.0, 9: 1.01}))
    assert set(pool.names) == {"suffix", "model"}


# -- the rate rule against brute force


def random_passes(rng: random.Random, widest: int = 40) -> list[float]:
    times = [0.0, 0.05]
    while len(times) <= widest:
        times.append(times[-1] + rng.choice((0.0, 0.001, 0.05)) * rng.random())
    return times


def gain_of(count: int, confidences: list[float], extra_s: float, rate: float) -> float:
    """Expected tokens of a round over a plain one, term by term."""
    expected, reach = 0.0, 1.0
    for confidence in confidences[:count]:
        reach *= confidence
        expected += reach
    return expected - rate * extra_s


def test_best_length_is_what_brute_force_finds() -> None:
    rng = random.Random(0)
    for _ in range(500):
        passes = random_passes(rng)
        confidences = [rng.random() ** 0.3 for _ in range(rng.randrange(0, 16))]
        rate, most = rng.uniform(5.0, 60.0), rng.randrange(0, 20)
        gains = [
            gain_of(count, confidences, passes[1 + count] - passes[1], rate)
            for count in range(min(len(confidences), most) + 1)
        ]
        length, gain = best_length(confidences, Prices(passes, least_ahead(passes), rate), most)
        assert gain == pytest.approx(max(gains), abs=1e-12)
        assert gains[length] == pytest.approx(gain, abs=1e-12)


def test_more_may_pay_where_some_number_of_further_tokens_does() -> None:
    rng = random.Random(1)
    for _ in range(500):
        passes = random_passes(rng)
        rate, token_s, reach = rng.uniform(5.0, 60.0), rng.uniform(0.0, 0.005), rng.random()
        start, confidence = rng.randrange(0, 8), rng.random() ** 0.3
        most = start + rng.randrange(0, 16)
        gains = [0.0]
        for count in range(1, min(FORESIGHT, most - start) + 1):
            extra_s = passes[1 + start + count] - passes[1 + start] + count * token_s
            gains.append(reach * gain_of(count, [confidence] * count, 0.0, 0.0) - rate * extra_s)
        prices = Prices(passes, least_ahead(passes), rate)
        assert may_pay(start, reach, confidence, prices, token_s, most) == (max(gains) > 0)


def test_the_least_that_further_rows_take_is_what_brute_force_finds() -> None:
    rng = random.Random(2)
    for _ in range(50):
        passes = random_passes(rng)
        for width, least_s in enumerate(least_ahead(passes)):
            wider = [(passes[other] - passes[width]) / (other - width) for other in range(width + 1, len(passes))]
            assert least_s == pytest.approx(min(wider, default=math.inf))


def test_confidences_are_asked_for_no_further_than_they_can_pay() -> None:
    passes, asked = [0.0, *(1.0 + 0.2 * k for k in range(40))], []

    def confidences() -> Iterator[float]:
        for _ in range(30):
            asked.append(0.3)
            yield 0.3

    assert best_length(confidences(), Prices(passes, least_ahead(passes), 1.0), 30)[0] == 1
    assert len(asked) == 2  # 0.3 is more than the 0.2 that a further row takes, 0.09 is less
