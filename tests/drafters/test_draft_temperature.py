"""A draft temperature other than the target's: the same text, and drafts at that temperature."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from click.testing import CliRunner

import edgespec
from edgespec import Sampling
from edgespec.cli.main import cli
from edgespec.drafters.base import DraftRequest
from edgespec.drafters.model import DraftTemperature, ModelDrafter
from edgespec.drafters.tree import TreeDrafter
from edgespec.errors import ConfigError
from edgespec.sampling import Sampler
from table_engine import TableEngine


def test_a_factor_of_one_and_a_greedy_target_leave_the_sampler_alone() -> None:
    warm, greedy = Sampler(Sampling(temperature=0.8), 10), Sampler(Sampling(temperature=0.0), 10)
    assert DraftTemperature(1.0).sampler(warm) is warm
    assert DraftTemperature(0.5).sampler(greedy) is greedy
    half = DraftTemperature(0.5)
    made = half.sampler(warm)
    assert made.sampling == dataclasses.replace(warm.sampling, temperature=0.4)
    assert half.sampler(warm) is made
    other = Sampler(Sampling(temperature=0.8, seed=5), 10)
    assert half.sampler(other).sampling.seed == 5


@pytest.mark.parametrize("factor", [0.5, 1.5])
def test_a_draft_carries_the_distributions_that_it_was_sampled_from(factor: float) -> None:
    draft = TableEngine.random(10, seed=2)
    sampling = Sampling(temperature=0.8, top_k=6, top_p=0.9, min_p=0.02, seed=3)
    drafter = ModelDrafter(draft, temperature=factor)
    context = np.array([1, 2, 3], np.int32)
    found = drafter.draft(DraftRequest(context, 5, Sampler(sampling, 10), needs_distributions=True))
    tempered = Sampler(dataclasses.replace(sampling, temperature=0.8 * factor), 10)
    text = context.tolist()
    assert found.distributions is not None
    for token_id, distribution in zip(found.token_ids.tolist(), found.distributions, strict=True):
        expected = tempered.distribution(draft.row(text), np.array(text, np.int32))
        assert np.array_equal(distribution.token_ids, expected.token_ids)
        assert np.array_equal(distribution.probs, expected.probs)
        text.append(token_id)


@pytest.mark.parametrize("factor", [0.5, 1.5])
def test_a_tree_is_drawn_at_the_drafts_temperature(factor: float) -> None:
    """Its main chain is that of the model alone, and its nodes carry what they were drawn from."""
    engine = TableEngine.random(10, seed=2)
    sampling = Sampling(temperature=0.8, top_k=6, top_p=0.9, min_p=0.02, seed=3)
    request = DraftRequest(np.array([1, 2, 3], np.int32), 12, Sampler(sampling, 10), max_branches=4)
    tree = TreeDrafter(ModelDrafter(engine, temperature=factor)).draft(request).main_chain
    alone = ModelDrafter(engine, temperature=factor).draft(request.at_most(tree.num_tokens))
    assert tree.token_ids.tolist() == alone.token_ids.tolist()
    compared = request._replace(needs_distributions=True)
    drawn = TreeDrafter(ModelDrafter(engine, temperature=factor)).draft(compared)
    tempered = Sampler(dataclasses.replace(sampling, temperature=0.8 * factor), 10)
    expected = tempered.distribution(engine.row([1, 2, 3]), np.array([1, 2, 3], np.int32))
    assert drawn.distributions is not None
    for token_id, prob in zip(expected.token_ids.tolist(), expected.probs.tolist(), strict=True):
        assert drawn.distributions[0].prob_of(token_id) == pytest.approx(prob)


@pytest.mark.parametrize("factor", [0.0, -1.0, float("nan"), float("inf"), 21, "hot", "auto", None])
def test_a_factor_that_is_none_is_refused(factor: object) -> None:
    with pytest.raises(ConfigError, match=r"draft_temperature must be a number from 0.05 to 20"):
        edgespec.load("demo", draft_temperature=factor)


@pytest.mark.parametrize("flag", ["--draft-temp", "--draft-temperature"])
def test_the_command_line_takes_a_number(flag: str) -> None:
    for wrong, said in (("auto", "'auto' is not a number"), ("30", "from 0.05 to 20")):
        found = CliRunner().invoke(cli, ["generate", "demo", "-p", "x", flag, wrong])
        assert found.exit_code == 2 and said in " ".join(found.output.split())
