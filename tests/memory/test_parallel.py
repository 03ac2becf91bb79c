"""Contexts for several answers at once, as planned and as loaded."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from typing import Any

import pytest

import edgespec
from edgespec.config.options import LoadOptions
from edgespec.engines.llamacpp.library import library
from edgespec.engines.llamacpp.settings import CELLS_MULTIPLE
from edgespec.engines.model_use import WIDEST
from edgespec.errors import ConfigError
from edgespec.loading.requirements import resolve_pair
from edgespec.memory.fit import MOST_SEQUENCES, fit
from edgespec.memory.plan import Room, planned
from needs import NEEDS_KERNELS

OPTIONS = LoadOptions("demo", context_length=1024, drafter="model")


@pytest.mark.parametrize("engine", ["llamacpp", "onnx"])
def test_each_answer_has_a_cache_of_its_own_in_the_plan(engine: Any) -> None:
    options = replace(OPTIONS, engine=engine)
    pair = resolve_pair(options)
    one, four = (planned(replace(options, parallel=count), pair) for count in (1, 4))
    for alone, several in zip(one.models, four.models, strict=True):
        assert several.footprint.cache == pytest.approx(4 * alone.footprint.cache, rel=0.2)
    assert any("for each of 4 answers" in part.name for part in four.parts)


def cells_of(options: LoadOptions) -> int:
    """Cells that are planned for the target."""
    one = replace(options, parallel=1, context_length=CELLS_MULTIPLE - WIDEST)
    caches = [planned(each, resolve_pair(each)).models[0].footprint.cache for each in (options, one)]
    return round(CELLS_MULTIPLE * caches[0] / caches[1])


@pytest.mark.parametrize("drafter", ["lookahead", "suffix"])
@pytest.mark.parametrize("reproducible", [True, False])
def test_the_planned_cells_are_those_of_the_load(drafter: Any, reproducible: bool) -> None:
    """In reproducible mode each sequence has cells of its own, even if trees would share them."""
    options = replace(
        OPTIONS, engine="llamacpp", drafter=drafter, draft=None, threads=1, parallel=3, context_length=500
    )
    options = replace(options, reproducible=reproducible)
    with edgespec.load(**dataclasses.asdict(options)) as model:
        assert model.target.facts.own_cells == (reproducible or drafter == "suffix")
        loaded = library().llama_n_ctx(model.target._context)  # type: ignore[attr-defined]
    assert cells_of(options) == loaded


@NEEDS_KERNELS
def test_there_is_room_for_as_many_answers_as_fit_with_full_texts() -> None:
    options = replace(OPTIONS, parallel="auto")
    pair = resolve_pair(options)
    plans = [planned(replace(options, parallel=count), pair) for count in range(1, 5)]
    for count, plan in enumerate(plans, 1):
        budget = plan.total_bytes
        found = fit(replace(options, memory=budget), pair, Room(budget, ()))
        assert found.options.parallel == count and found.plan == plan and not found.given_up
    assert fit(options, pair, Room(1 << 40, ())).options.parallel == MOST_SEQUENCES == len(plans)
    with edgespec.load(**dataclasses.asdict(options)) as model:
        assert model.target.facts.max_sequences == model.options.parallel == MOST_SEQUENCES


def test_one_answer_at_a_time_where_more_would_take_memory_at_once() -> None:
    options = replace(OPTIONS, engine="llamacpp", parallel="auto")
    assert fit(options, resolve_pair(options), Room(1 << 40, ())).options.parallel == 1


@pytest.mark.parametrize("given", [0, 65, "4", True])
def test_a_wrong_number_is_refused(given: Any) -> None:
    with pytest.raises(ConfigError, match="parallel must be"):
        LoadOptions("demo", parallel=given)
