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
from edgespec.engines.proof import packs_alike
from edgespec.types import Batch

PROMPTS = ("Find me a hotel in Paris.", "def add(a, b):", "Tom has 3 apples and buys 4 more. " * 9, "Book a table")
OPTIONS = GenerateOptions(max_tokens=24, ignore_eos=True)


def opened(engine: Any, **options: Any) -> Model:
    if engine == "onnx":
        pytest.importorskip("onnxruntime", reason="the ONNX engine needs onnxruntime")
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


def test_sharing_passes_is_proved_by_bits_where_it_is_done(reproducible: Model) -> None:
    if reproducible.target.facts.can_pack:
        with reproducible.measuring() as (engine, _):
            assert packs_alike(engine)


@pytest.mark.parametrize("engine", ["llamacpp", "onnx"])
def test_fastest_mode_shares_passes(engine: Any) -> None:
    with opened(engine, reproducible=False, parallel=3) as model:
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
