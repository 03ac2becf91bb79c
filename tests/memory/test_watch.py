"""Over the budget the draft model goes, the target and its text stay."""

from __future__ import annotations

import os
import sys

import numpy as np
import pytest

import edgespec
from edgespec.engines.parked import ParkedStates
from edgespec.engines.sequence import CachedSequence
from edgespec.memory.watch import Relief
from edgespec.platform.memory import LEAST_FREE_BYTES, MemoryWatch, own_bytes, return_freed_memory, spare_memory
from table_engine import TableEngine

PROMPT = "The quick brown fox jumps over the lazy dog. The quick brown fox"
OPTIONS = edgespec.GenerateOptions(max_tokens=40, ignore_eos=True)
LOAD = {"reproducible": True, "threads": 1, "context_length": 512}


def test_it_looks_once_a_second() -> None:
    now_s, looks = 0.0, []

    def used() -> int:
        looks.append(now_s)
        return 70

    watch = MemoryWatch(60, used, lambda: now_s, free=lambda: 1 << 30)
    for step in range(400):
        now_s = step / 100
        assert watch.excess() in (0, 10)
    assert looks == [0.0, 1.0, 2.0, 3.0]
    watch.close()
    now_s = 9.0
    assert watch.excess() == 0 and len(looks) == 4


@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
def test_what_a_budget_leaves_is_spare() -> None:
    mib = 1 << 20
    watch = MemoryWatch((own_bytes() or 0) + 200 * mib)
    assert abs((spare_memory() or 0) - 200 * mib) < 8 * mib
    watch.close()
    assert (spare_memory() or 0) > 200 * mib


def test_the_plans_of_others_count_once() -> None:
    first = MemoryWatch(1000, planned_bytes=600, free=lambda: None)
    second = MemoryWatch(None, planned_bytes=100, free=lambda: None)
    assert (first.left_bytes(300), second.left_bytes(300)) == (800, None)
    second.close()
    assert first.left_bytes(300) == 700
    first.close()


def test_a_limit_that_shrinks_while_it_runs_is_noticed() -> None:
    now_s, free = 0.0, 1 << 30
    watch = MemoryWatch(None, lambda: 70, lambda: now_s, free=lambda: free)
    now_s, free = 1.5, 3 << 20
    assert watch.excess() == LEAST_FREE_BYTES - (3 << 20) and watch.why == "more must be free"
    now_s, free = 3.0, 1 << 30
    assert watch.excess() == 0


@pytest.mark.skipif(own_bytes() is None, reason="the system does not tell this process's memory")
@pytest.mark.parametrize("engine", ["llamacpp", "onnx"])
@pytest.mark.parametrize("draft_length", ["auto", 3])
def test_the_draft_goes_and_the_text_stays(engine: str, draft_length: str) -> None:
    options = {**LOAD, "engine": engine, "draft_length": draft_length}
    with edgespec.load("demo", **options) as model:  # type: ignore[arg-type]
        whole = model.generate(PROMPT, options=OPTIONS)
        assert model.drafters.draft_name is not None and not whole.stats.notes
        assert model.memory is not None
        return_freed_memory()
        used = own_bytes()
        assert used is not None
        model.memory.watch.limit_bytes = used - (1 << 20)  # as if something else of ours had grown
        model.memory.watch._next_s = 0.0
        model.forget()
        found = model.generate(PROMPT, options=OPTIONS)
        assert found.token_ids == whole.token_ids
        (note,) = found.stats.notes
        assert "over the budget: draft model released (model" in note
        assert model.drafters.draft_name is None and "model" not in model.drafters.names
        assert (own_bytes() or 0) < used
        again = model.generate(PROMPT, options=OPTIONS)
        assert again.token_ids == whole.token_ids
        named = edgespec.GenerateOptions(max_tokens=40, ignore_eos=True, drafter="model")
        assert model.generate(PROMPT, options=named).token_ids == whole.token_ids


def test_saved_states_go_before_the_draft() -> None:
    with edgespec.load("demo", **LOAD) as model:  # type: ignore[arg-type]
        words = model.encode(PROMPT) * 20
        planned = [model.generate(ids, options=OPTIONS).stats.planned_bytes for ids in (words, words[::-1])]
        parked = model._executor.parked
        assert model.memory is not None
        assert parked.num_bytes and planned == [model.memory.plan.total_bytes + n for n in (0, parked.num_bytes)]
        for ids in (words, words[::-1]):  # takes again what models of other tests gave back to the system
            model.generate(ids, options=OPTIONS)
        return_freed_memory()
        model.memory.watch.limit_bytes = (own_bytes() or 0) - parked.num_bytes // 2
        model.memory.watch._next_s = 0.0
        stats = model.generate(words[::-1], options=OPTIONS).stats
        assert ["saved states of other conversations dropped" in note for note in stats.notes] == [True]
        assert model.drafters.draft_name is not None


def test_with_nothing_left_to_release_it_says_so_once_and_goes_on_releasing_states() -> None:
    now_s, used = 0.0, 100
    watch, parked = MemoryWatch(60, lambda: used, lambda: now_s, free=lambda: None), ParkedStates()
    relief, live = Relief(watch, parked, lambda: ()), CachedSequence(TableEngine.random(10))
    live.feed(np.arange(80, dtype=np.int32) % 10)

    def relieved() -> str:
        nonlocal now_s
        now_s += 2.0
        return relief.relieve(list)

    assert "nothing left to release" in relieved()
    parked.park(live)
    assert parked.num_bytes > 40 and "saved states of other conversations dropped" in relieved()
    assert not parked.num_bytes and not relieved()
    used = 50
    parked.park(live)
    assert not relieved() and parked.num_bytes


@pytest.mark.skipif(own_bytes() is None, reason="the system does not tell this process's memory")
def test_a_second_model_in_the_process_costs_the_first_one_nothing() -> None:
    with edgespec.load("demo", memory="1GiB", **LOAD) as first, edgespec.load("demo", **LOAD):  # type: ignore[arg-type]
        assert first.memory is not None and first.memory.watch.limit_bytes is not None
        first.memory.watch.limit_bytes = (own_bytes() or 0) - (2 << 20)  # what the second one takes is more than that
        first.memory.watch._next_s = 0.0
        assert not first.generate(PROMPT, options=OPTIONS).stats.notes
        assert first.drafters.draft_name is not None


@pytest.mark.parametrize("platform", ["darwin", "linux"])
def test_own_memory_is_known_beyond_linux_too(platform: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("psutil")  # before its import sees another platform than it is on
    monkeypatch.setattr("edgespec.platform.memory.sys.platform", platform)
    before = own_bytes()
    assert before is not None and before > 0
    taken = bytearray(os.urandom(1 << 16) * 1024)
    after = own_bytes()
    assert after is not None and after - before > len(taken) // 2
