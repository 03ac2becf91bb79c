"""What is kept under a budget is the best by the order of docs/memory.md, so never worse under a larger one."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from edgespec.config.options import LoadOptions
from edgespec.errors import CapabilityError
from edgespec.formats.gguf.header import keeping_headers
from edgespec.formats.manifest import ModelPair
from edgespec.loading.requirements import resolve_pair, without_drafts
from edgespec.memory.fit import COMFORTABLE_CONTEXT, Fitted, fit
from edgespec.memory.plan import Plan, Room, planned
from llama_headers import LLAMA_8B, LLAMA_70B, write_header

BUDGETS = 60
CONTEXTS = (None, 2048, 1024, 512)
Kept = tuple[bool, int, bool, bool, int]


def kept(fits: bool, options: LoadOptions, context: int, *, has_draft: bool) -> Kept:
    """The order of the documentation, the most important first."""
    return fits, min(context, COMFORTABLE_CONTEXT), has_draft, options.cache_type_k is None, context


def kept_of(found: Fitted) -> Kept:
    has_draft = found.pair.draft is not None
    return kept(found.verdict.fit == "fits", found.options, found.plan.context_length, has_draft=has_draft)


def all_choices(given: dict[str, Any], pair: ModelPair) -> Iterator[tuple[LoadOptions, ModelPair]]:
    caches: tuple[dict[str, Any], ...] = {}, {"cache_type_k": "q8_0", "cache_type_v": "q8_0"}
    if pair.files["target"].engine == "onnx":
        caches = ({},)
    for context, cache, is_alone in itertools.product(CONTEXTS, caches, (False, True)):
        options = LoadOptions(**{**given, "context_length": context, **cache})
        yield without_drafts(options, pair) if is_alone else (options, pair)


@pytest.fixture(params=["demo, llama.cpp", "demo, ONNX", "70B and 8B"])
def given(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    """Options of a pair."""
    if request.param.startswith("demo"):
        return {"model": "demo", "engine": "onnx" if "ONNX" in request.param else "llamacpp"}
    target, draft = tmp_path / "70b.gguf", tmp_path / "8b.gguf"
    write_header(target, LLAMA_70B), write_header(draft, LLAMA_8B)
    return {"model": str(target), "draft": draft}


def budgets(plans: list[Plan]) -> list[int]:
    """From below the least that can be loaded to plenty, and on both sides of what each plan needs."""
    low, high = int(0.8 * min(plan.own_bytes for plan in plans)), int(1.1 * max(plan.total_bytes for plan in plans))
    even = (low + (high - low) * step // (BUDGETS - 1) for step in range(BUDGETS))
    needs = (need for plan in plans for need in (plan.own_bytes, plan.working_bytes))
    return sorted({*even, *(need - less for need in needs for less in (0, 1))})


@keeping_headers()
def test_the_best_that_fits_is_kept(given: dict[str, Any]) -> None:
    """Against every combination, one by one."""
    pair = resolve_pair(LoadOptions(**given))
    plans = [(*choice, planned(*choice)) for choice in all_choices(given, pair)]
    outcomes: list[Kept | None] = []
    for budget in budgets([plan for *_, plan in plans]):
        room = Room(budget, ())
        possible = [
            kept(verdict == "fits", options, plan.context_length, has_draft=chosen.draft is not None)
            for options, chosen, plan in plans
            if (verdict := room.verdict(plan).fit) != "refused"
        ]
        try:
            found = kept_of(fit(LoadOptions(**given, memory=budget), pair, room))
        except CapabilityError:
            found = None
        assert found == max(possible, default=None), budget
        outcomes.append(found)
    assert outcomes == sorted(outcomes, key=lambda each: (each is not None, each or ()))
    assert outcomes[0] is None and outcomes[-1] == max(found for found in outcomes if found is not None)
    assert len(set(outcomes)) > 6
