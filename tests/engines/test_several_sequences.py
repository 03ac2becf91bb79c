"""Several generations at once on real engines: each text is the one that it has alone, and passes are shared."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import edgespec
from demo import TEST_THREADS
from edgespec import GenerateOptions, Model, Sampling
from edgespec.types import Batch

PROMPTS = ("Find me a hotel in Paris.", "def add(a, b):", "Tom has 3 apples and buys 4 more. " * 9, "Book a table")
OPTIONS = GenerateOptions(max_tokens=24, ignore_eos=True)


def opened(engine: Any, **options: Any) -> Model:
    return edgespec.load("demo", engine=engine, threads=TEST_THREADS, context_length=256, **options)


@pytest.fixture(scope="module", params=["llamacpp", "onnx"])
def reproducible(request: pytest.FixtureRequest) -> Iterator[Model]:
    with opened(request.param, reproducible=True, parallel=3) as model:
        yield model


@pytest.mark.parametrize("drafter", ["none", "model", "suffix"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_reproducible_texts_do_not_depend_on_what_runs_beside_them(
    reproducible: Model, drafter: Any, temperature: float
) -> None:
    sampling = Sampling(temperature=temperature, seed=11)
    alone = []
    for prompt in PROMPTS:
        reproducible.forget()
        alone.append(reproducible.generate(prompt, sampling, replace(OPTIONS, drafter="none")))
    reproducible.forget()
    options = replace(OPTIONS, drafter=drafter, draft_length=4)
    found = reproducible.generate_all(PROMPTS, sampling, options)
    assert [(result.token_ids, result.logprobs) for result in found] == [
        (result.token_ids, result.logprobs) for result in alone
    ]
    assert drafter == "none" or sum(result.stats.drafted_tokens for result in found) > 0


def test_texts_of_a_stock_export_take_turns() -> None:
    with opened("onnx", parallel=2) as model:
        assert not model.target.facts.can_pack
        texts = model.generate_all(PROMPTS[:2], Sampling(), OPTIONS)
        assert all(result.stats.new_tokens == OPTIONS.max_tokens for result in texts)


def test_fastest_mode_shares_passes() -> None:
    with opened("llamacpp", reproducible=False, parallel=3) as model:
        assert model.target.facts.can_pack
        passes: list[int] = []
        forward = model.target.forward

        def counting(batch: Batch) -> Any:
            passes.append(np.unique(batch.sequences).size)
            return forward(batch)

        model.target.forward = counting  # type: ignore[method-assign]
        found = model.generate_all(PROMPTS[:3], Sampling(), replace(OPTIONS, drafter="none"))
        assert max(passes) == 3 and len(passes) < sum(result.stats.target_passes for result in found) / 2
        model.target.forward = forward  # type: ignore[method-assign]
        # Bits may differ from those of a pass alone, and by no more than that.
        for prompt, result in zip(PROMPTS, found, strict=False):
            model.forget()
            alone = model.generate(prompt, Sampling(), GenerateOptions(max_tokens=1, drafter="none"))
            assert result.logprobs[0] == pytest.approx(alone.logprobs[0], abs=0.05)


def test_on_the_processor_texts_have_cells_of_their_own_unless_trees_are_asked_for() -> None:
    """What other chats hold is then not read with each token of this one: eight full ones cost it a fifth."""
    with opened("llamacpp", reproducible=False, parallel=3, drafter="tree") as model:
        assert model.target.facts.max_branches > 0
    with opened("llamacpp", reproducible=False, parallel=3) as model:
        engine = model.target
        assert engine.facts.max_branches == 0
        rows = Batch.chain(range(40, 70))
        alone = engine.forward(rows).copy()
        engine.rollback(0)
        for other in (1, 2):
            engine.forward(Batch.chain(range(10, 210), sequence=other, last_only=True))
        assert np.array_equal(engine.forward(rows), alone)


@pytest.mark.parametrize("draft_length", [1, 4])
def test_drafts_of_several_texts_are_accepted_as_alone(draft_length: int) -> None:
    """Rows of different numbers become several passes inside llama.cpp, whose results are those of their own rows."""
    options = replace(OPTIONS, drafter="model", draft_length=draft_length)
    with opened("llamacpp", reproducible=False, parallel=4) as model:
        drafting = [model.stream(prompt, Sampling(), options) for prompt in PROMPTS[:2]]
        plain = [model.stream(prompt, Sampling(), replace(OPTIONS, drafter="none")) for prompt in PROMPTS[2:]]
        with model.batch() as batch:
            together = batch.results([drafting[0], plain[0], drafting[1], plain[1]])
        accepted = [result.stats.accepted_tokens for result in together[::2]]
        alone = []
        for prompt in PROMPTS[:2]:
            model.forget()
            alone.append(model.generate(prompt, Sampling(), options).stats.accepted_tokens)
        assert sum(alone) > 10 and sum(accepted) > 0.8 * sum(alone)


# -- drafters with state: heads, which read the target's hidden states, and a draft model with a draft of its own


@pytest.fixture(params=["llamacpp", "onnx"])
def with_heads(request: pytest.FixtureRequest) -> Any:
    return lambda drafter, **options: opened(request.param, drafter=drafter, parallel=3, **options)


@pytest.mark.parametrize("drafter", ["eagle", "medusa", "hierarchical"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafters_with_state_change_none_of_several_texts(with_heads: Any, drafter: Any, temperature: float) -> None:
    """All of four answers draft, or two, so that passes hold rows whose states are wanted and others."""
    sampling = Sampling(temperature=temperature, seed=3)
    with with_heads(drafter, reproducible=True) as model:
        alone = []
        for prompt in PROMPTS:
            model.forget()
            alone.append(model.generate(prompt, sampling, replace(OPTIONS, drafter="none")))
        model.forget()
        for drafting in (PROMPTS, PROMPTS[:2]):
            generations = [
                model.stream(prompt, sampling, replace(OPTIONS, drafter=drafter, draft_length=4))
                if prompt in drafting
                else model.stream(prompt, sampling, replace(OPTIONS, drafter="none"))
                for prompt in PROMPTS
            ]
            with model.batch() as batch:
                found = batch.results(generations)
            assert [(result.token_ids, result.logprobs) for result in found] == [
                (result.token_ids, result.logprobs) for result in alone
            ]
            assert all(result.stats.drafted_tokens for result in found[: len(drafting)])
            assert sum(result.stats.accepted_tokens for result in found) > 0


def test_heads_of_several_texts_accept_as_much_as_alone(with_heads: Any) -> None:
    """So each text's head reads its own states: those of another text would predict other tokens."""
    options = replace(OPTIONS, drafter="eagle", draft_length=3)
    with with_heads("eagle", reproducible=False) as model:
        alone = []
        for prompt in PROMPTS:
            model.forget()
            alone.append(model.generate(prompt, Sampling(), options).stats)
        model.forget()
        together = [result.stats for result in model.generate_all(PROMPTS, Sampling(), options)]
        accepted = [sum(stats.accepted_tokens for stats in found) for found in (alone, together)]
        assert accepted[0] > 20 and accepted[1] > 0.8 * accepted[0]
