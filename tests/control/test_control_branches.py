"""The automatic controller and drafts with branches: what they are worth, what they teach, and where they are taken."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest

import edgespec
from edgespec import Sampling
from edgespec.control.confidence import outcomes
from edgespec.control.prices import Prices, RunCosts, best_length, best_nodes, least_ahead, path_products
from edgespec.drafters.base import Drafter
from edgespec.drafters.lookahead import LookaheadDrafter
from edgespec.drafters.model import ModelDrafter
from edgespec.drafters.ngram import NgramDrafter
from edgespec.drafters.tree import TreeDrafter
from edgespec.engines.sequence import CachedSequence
from edgespec.generation.decode import autoregressive, speculative
from edgespec.generation.run_state import Run
from edgespec.sampling.acceptance import RULES
from edgespec.sampling.sampler import Sampler
from edgespec.sampling.stopping import StopRules
from edgespec.types import Draft, Verdict
from lossless import VOCABULARY
from simulation import Timed, Watched, known_curve
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
    sampler = Sampler(Sampling(temperature=temperature, top_k=0, top_p=1.0, min_p=0.0), VOCABULARY)
    runs = [Run(cached, np.array([0, 1], np.int32), sampler, StopRules(frozenset(), (), 400), False) for _ in range(2)]
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
