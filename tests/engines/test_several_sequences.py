"""Several generations at once on real engines: each text is the one that it has alone, and passes are shared."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import edgespec
from demo import TEST_THREADS
from edgespec import GenerateOptions, Model, Sampling
from edgespec.types import Batch
from lossless import assert_several_draft_apart

PROMPTS = ("Find me a hotel in Paris.", "def add(a, b):", "Tom has 3 apples and buys 4 more. " * 9, "Book a table")
OPTIONS = GenerateOptions(max_tokens=24, ignore_eos=True)


def opened(engine: Any, **options: Any) -> Model:
    return edgespec.load("demo", engine=engine, threads=TEST_THREADS, context_length=256, **options)


@pytest.mark.parametrize("engine", ["llamacpp", "onnx"])
@pytest.mark.parametrize("drafter", ["model", "suffix", "eagle", "medusa", "hierarchical"])
def test_texts_do_not_depend_on_what_runs_beside_them(engine: str, drafter: str) -> None:
    """Nor do drafts of heads, which read the target's hidden states, or of a draft model with a draft of its own."""
    assert_several_draft_apart("demo", PROMPTS, drafter, engine=engine, context_length=256)


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
        assert model.target.most_branches > 0
    with opened("llamacpp", reproducible=False, parallel=3) as model:
        engine = model.target
        assert engine.most_branches == 0
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
