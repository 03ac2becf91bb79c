"""A draft that fails: its cache stays consistent, and the answer continues without it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import edgespec
from bench_table import table_model
from edgespec import GenerateOptions, Model, Sampling
from edgespec.drafters.base import Drafter, DraftRequest
from edgespec.drafters.hierarchical import HierarchicalDrafter
from edgespec.drafters.mapped import MappedSequence, VocabularyMap
from edgespec.drafters.model import ModelDrafter
from edgespec.drafters.tree import TreeDrafter
from edgespec.engines.sequence import CachedSequence
from edgespec.errors import EngineError
from edgespec.sampling.sampler import Sampler
from edgespec.types import Batch, Logits
from table_engine import Struck

VOCABULARY = 10
OPTIONS = GenerateOptions(max_tokens=40, ignore_eos=True)


def mapped(engine: Struck) -> Drafter:
    return ModelDrafter(engine, MappedSequence(engine, VocabularyMap(engine.vocabulary, engine.vocabulary)))


DRAFTERS: dict[str, Callable[[Struck], Drafter]] = {
    "model": ModelDrafter,
    "tree": lambda engine: TreeDrafter(ModelDrafter(engine)),
    "mapped": mapped,
    "hierarchical medium": lambda engine: HierarchicalDrafter(ModelDrafter(engine.related(0.3)), engine),
    "hierarchical small": lambda engine: HierarchicalDrafter(ModelDrafter(engine), engine.related(0.3)),
}


def caches_of(drafter: Drafter) -> list[CachedSequence]:
    assert isinstance(drafter, ModelDrafter)
    own = drafter.cache._inner if isinstance(drafter.cache, MappedSequence) else drafter.cache
    return [own, *(caches_of(drafter._small) if isinstance(drafter, HierarchicalDrafter) else ())]


@pytest.mark.parametrize("strikes_at", [1, 2, 3])
@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, EngineError])
@pytest.mark.parametrize("name", DRAFTERS)
def test_whatever_strikes_a_draft_its_cache_holds_what_it_knows(
    name: str, error: type[BaseException], strikes_at: int
) -> None:
    engine = Struck.random(VOCABULARY, context_length=64)
    drafter = DRAFTERS[name](engine)
    sampler = Sampler(Sampling(seed=3), VOCABULARY)

    def ask(length: int) -> list[int]:
        text = np.arange(length, dtype=np.int32) % VOCABULARY
        return drafter.draft(DraftRequest(text, 6, sampler, max_branches=4)).token_ids.tolist()

    wanted = [ask(length) for length in (8, 30, 44)]
    drafter.reset_engine()
    ask(8)
    engine.strike(strikes_at, error)
    with pytest.raises(error):
        ask(30)
    engine.strike(0)
    for cache in caches_of(drafter):
        assert cache.engine.length() == cache.length, "tokens that nobody knows of"
    assert ask(30) == wanted[1]
    assert ask(44) == wanted[2]


# -- the answer goes on


@pytest.fixture(params=["fixed", "auto"])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Model]:
    """A table whose passes take 5 ms: speculation pays even on a busy machine, so `auto` asks for its draft model."""
    length = 4 if request.param == "fixed" else "auto"
    drafter = "model" if request.param == "fixed" else "auto"
    with table_model(tmp_path, 0.005, drafter=drafter, draft_length=length) as made:
        made.prepare()
        yield made


def breaking(model: Model, action: Callable[[Logits], Logits], times: int = 10**9) -> None:
    """Let the draft model's next passes, but the first four, go through `action`."""
    engine = model.drafters.drafters["model"].engine
    assert engine is not None
    forward, calls = engine.forward, iter(range(10**9))

    def broken(batch: Batch) -> Logits:
        logits, call = forward(batch), next(calls)
        return action(logits) if 4 <= call < 4 + times else logits

    engine.forward = broken  # type: ignore[method-assign]


def failing(logits: Logits) -> Logits:
    raise EngineError("the draft's file is gone")


@pytest.mark.parametrize("action", [failing, lambda logits: np.full_like(logits, np.nan)], ids=["fails", "nan"])
def test_an_answer_continues_without_a_failed_draft(model: Model, action: Callable[[Logits], Logits]) -> None:
    options = GenerateOptions(max_tokens=150, ignore_eos=True)
    for cost in model.drafters.costs.drafts.values():  # by the guess, a draft as large as its target would not be asked
        cost.token_s, cost.read_s, cost.is_relative = 1e-6, 1e-7, False
    plain = model.generate("abc", Sampling(seed=1), GenerateOptions(max_tokens=150, ignore_eos=True, drafter="none"))
    model.forget()
    breaking(model, action)
    found = model.generate("abc", Sampling(seed=1), options)
    assert found.token_ids == plain.token_ids and found.logprobs == plain.logprobs
    assert any("drafter model failed and is disabled" in note for note in found.stats.notes)
    assert len({note.split()[1] for note in found.stats.notes}) == len(found.stats.notes) <= 2, "each is told once"
    assert plain.stats.notes == []


def test_the_next_answer_uses_the_drafter_again(tmp_path: Path) -> None:
    with table_model(tmp_path, drafter="model", draft_length=4) as model:
        breaking(model, failing, times=1)
        first, second = (model.generate("abc", Sampling(seed=seed), OPTIONS) for seed in (1, 2))
    assert first.stats.notes and 0 < first.stats.drafted_tokens < 8
    assert not second.stats.notes and second.stats.drafted_tokens > 30


def test_the_command_line_says_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from edgespec.cli.main import cli

    load = edgespec.runtime.load

    def loaded(*given: object, **options: object) -> Model:
        model = load(*given, **options)  # type: ignore[arg-type]
        breaking(model, failing)
        return model

    monkeypatch.setattr("edgespec.cli.session.load", loaded)
    arguments = ["chat", "demo", "--drafter", "model", "--draft-length", "3", "-n", "12", "--seed", "1"]
    done = CliRunner().invoke(cli, arguments, input="Hello there.\nAnd again.\n")
    assert done.exit_code == 0, done.output
    assert done.stderr.count("drafter model failed and is disabled") == 1
