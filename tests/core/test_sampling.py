"""Distributions, picks and noise, of which no draw is used twice."""

from __future__ import annotations

import math
from collections import defaultdict

import numpy as np
import pytest
from numpy.typing import NDArray

from edgespec.config.options import Sampling
from edgespec.control.base import FixedLength
from edgespec.drafters.base import Drafter
from edgespec.drafters.hierarchical import HierarchicalDrafter
from edgespec.drafters.lookahead import LookaheadDrafter
from edgespec.drafters.model import ModelDrafter
from edgespec.engines.sequence import CachedSequence
from edgespec.errors import SamplingError
from edgespec.generation.run_state import Run
from edgespec.reports import Stats
from edgespec.sampling.acceptance import RULES
from edgespec.sampling.noise import Noise, Stream
from edgespec.sampling.sampler import Sampler, top_ids
from edgespec.sampling.stopping import StopRules
from edgespec.types import TokenIds
from lossless import ALPHA_1E6, PLAIN, VOCABULARY, chi_square_score, speculative
from table_engine import TableEngine
from tiny_heads import drafter_of as heads_drafter
from tiny_heads import table_heads

NO_HISTORY = np.empty(0, np.int32)


def plain_distribution(row: np.ndarray, settings: Sampling) -> tuple[np.ndarray, np.ndarray]:
    """Reference implementation: temperature, top-k, top-p, min-p by full sorting in float64. Ids, probabilities."""
    weights = np.exp((row.astype(np.float64) - row.max()) / settings.temperature)
    order = np.lexsort((np.arange(row.size), -row))
    if settings.top_k:
        order = order[: settings.top_k]
    if settings.top_p < 1:
        reach = np.cumsum(weights[order])
        order = order[: int(np.argmax(reach >= settings.top_p * reach[-1])) + 1]
    kept = np.sort(order[(weights[order] >= settings.min_p) & (weights[order] > 0)])
    return kept, weights[kept] / weights[kept].sum()


@pytest.mark.parametrize("size", [5, 100, 4096, 152_064])
@pytest.mark.parametrize(
    "settings",
    [
        Sampling(),
        Sampling(top_k=0, top_p=1, min_p=0, temperature=1.2),
        Sampling(top_k=0, top_p=0.9, min_p=0),
        Sampling(top_k=0, top_p=0.999, min_p=0, temperature=5.0),
        Sampling(top_k=1000, top_p=1, min_p=0),
        Sampling(top_k=0, top_p=1, min_p=0.1),
        Sampling(temperature=1e-6),
    ],
)
def test_fast_truncation_equals_the_reference(size: int, settings: Sampling) -> None:
    row = np.random.default_rng(size).normal(0, 3, size).astype(np.float32)
    row[:: max(size // 7, 1)] = row[0]  # ties
    found = Sampler(settings, size).distribution(row, NO_HISTORY)
    ids, probs = plain_distribution(row, settings)
    order = np.argsort(found.token_ids)
    assert np.array_equal(found.token_ids[order], ids)
    assert found.probs.sum() == pytest.approx(1, abs=1e-12)
    np.testing.assert_allclose(found.probs[order], probs, rtol=1e-9)


@pytest.mark.parametrize("settings", [Sampling(top_k=0, top_p=1, min_p=0), Sampling(top_k=0), Sampling()])
def test_a_draft_row_that_lacks_the_padding_of_the_targets_vocabulary(settings: Sampling) -> None:
    row = np.random.default_rng(3).normal(0, 3, 500).astype(np.float32)
    found, expected = (Sampler(settings, size).distribution(row, NO_HISTORY) for size in (640, 500))
    assert np.array_equal(found.token_ids, expected.token_ids)
    assert np.array_equal(found.probs, expected.probs)


@pytest.mark.parametrize("settings", [Sampling(top_k=0, top_p=1, min_p=0), Sampling(temperature=0.0), Sampling()])
def test_ids_of_a_draft_beyond_the_targets_vocabulary_are_left_out(settings: Sampling) -> None:
    row = np.arange(640, dtype=np.float32)  # its likeliest ids are those
    sampler = Sampler(settings, 500)
    assert sampler.distribution(row, NO_HISTORY).token_ids.max() < 500
    assert sampler.likeliest(row, NO_HISTORY, 5).token_ids.tolist() == [499, 498, 497, 496, 495]


def test_temperature_zero_is_argmax_and_ties_go_to_the_lowest_id() -> None:
    row = np.array([0, 7, 3, 7], np.float32)
    found = Sampler(Sampling(temperature=0), 4).distribution(row, NO_HISTORY)
    assert found.token_ids.tolist() == [1]
    assert found.probs.tolist() == [1.0]
    assert Sampling(top_k=-1) == Sampling(top_k=0)


@pytest.mark.parametrize("top_k", [0, 3])
def test_no_probability_to_keep_is_the_likeliest_token_alone(top_k: int) -> None:
    row = np.array([1.0, 3.0, 3.0, 2.0], np.float32)
    found = Sampler(Sampling(temperature=2.0, top_k=top_k, top_p=0), 4).distribution(row, NO_HISTORY)
    assert (found.token_ids.tolist(), found.probs.tolist()) == ([1], [1.0])


@pytest.mark.parametrize("temperature", [5e-324, 1e-310, 1e-250, 1e-60])
@pytest.mark.parametrize("settings", [{"top_k": 0, "top_p": 1.0}, {"top_k": 0}, {"top_k": 3}])
def test_the_lowest_temperatures_are_greedy_without_an_overflow(temperature: float, settings: dict) -> None:
    row = np.array([-3.0, 2.0, 1e30, -np.inf, 1e30, 1.0], np.float32)
    with np.errstate(all="raise", under="ignore"):
        found = Sampler(Sampling(temperature=temperature, min_p=0.0, **settings), 6).distribution(row, NO_HISTORY)
    assert found.token_ids.tolist() == [2, 4]
    assert found.probs.tolist() == [0.5, 0.5]


@pytest.mark.parametrize("count", [1, 3, 40, 64, 500, 5000])
def test_top_ids_equals_a_full_sort(count: int) -> None:
    row = np.random.default_rng(count).integers(0, 50, 4999).astype(np.float32)
    expected = sorted(range(row.size), key=lambda i: (-row[i], i))[:count]
    assert top_ids(row, count).tolist() == expected


def test_penalties_and_bias_follow_llama_cpp() -> None:
    settings = Sampling(
        repeat_penalty=2.0, frequency_penalty=0.5, presence_penalty=0.25, logit_bias={3: -math.inf}, temperature=0
    )
    sampler = Sampler(settings, 4)
    row = np.array([4.0, -1.0, 1.0, 100.0], np.float32)
    adjusted = sampler._adjusted(row, np.array([0, 0, 1], np.int32))
    assert adjusted.tolist() == [4 / 2 - 2 * 0.5 - 0.25, -1 * 2 - 0.5 - 0.25, 1.0, -math.inf]
    assert row[3] == 100.0, "the engine's row must not be written to"


def test_a_draft_without_the_ids_that_pad_the_target_takes_bias_and_penalties_of_its_own() -> None:
    settings = Sampling(repeat_penalty=2.0, logit_bias={1: 1.0, 9: 5.0}, temperature=0)
    adjusted = Sampler(settings, 10)._adjusted(np.array([4.0, 1.0, 1.0], np.float32), np.array([0, 9], np.int32))
    assert adjusted.tolist() == [2.0, 2.0, 1.0]


def test_a_penalty_window_forgets_older_tokens_and_of_minus_one_none() -> None:
    def likeliest(row: list[float], history: list[int], window: int) -> int:
        sampler = Sampler(Sampling(repeat_penalty=2.0, penalty_window=window, temperature=0), 3)
        return int(sampler.distribution(np.array(row, np.float32), np.array(history, np.int32)).token_ids[0])

    assert [likeliest([3, 2, 2], history, 2) for history in ([0, 1, 1], [1, 0])] == [0, 2]
    assert [likeliest([3, 2, 1], [0] + [2] * 100, window) for window in (64, -1)] == [0, 1]
    with pytest.raises(SamplingError, match="at least -1"):
        Sampling(penalty_window=-2)


@pytest.mark.parametrize("offset", [0.0, 60.0, -60.0, 90.0, -90.0, 5000.0])
def test_log_prob_is_log_softmax(offset: float) -> None:
    row = np.random.default_rng(0).normal(0, 4, 5000).astype(np.float32) + np.float32(offset)
    wide = row.astype(np.float64) - row.max()
    exact = wide - np.log(np.exp(wide).sum())
    assert Sampler(Sampling(), 5000).log_prob(row, 17) == pytest.approx(exact[17], abs=1e-4)


def test_noise_is_a_function_of_its_counter_alone() -> None:
    noise = Noise(42)
    ids = np.array([5, 9, 100_000], np.int32)
    draws = noise.exponential(Stream.TARGET, 3, ids)
    assert noise.exponential(Stream.TARGET, 3, ids[1:]).tolist() == draws[1:].tolist()
    for other in (
        Noise(43).exponential(Stream.TARGET, 3, ids),
        noise.exponential(Stream.DRAFT, 3, ids),
        noise.exponential(Stream.TARGET, 4, ids),
    ):
        assert not np.any(other == draws)


def test_noise_has_the_right_law() -> None:
    ids = np.arange(2000, dtype=np.int32)
    draws = np.concatenate([Noise(seed).exponential(Stream.TARGET, seed, ids) for seed in range(200)])
    counts = np.histogram(1 - np.exp(-draws), bins=50, range=(0, 1))[0]
    assert chi_square_score(counts, np.full(50, draws.size / 50), counts.size - 1) < ALPHA_1E6
    assert abs(np.corrcoef(draws[:-1], draws[1:])[0, 1]) < 0.01
    uniforms = [Noise(seed).uniform(Stream.ACCEPT, position) for seed in range(100) for position in range(1000)]
    counts = np.histogram(uniforms, bins=50, range=(0, 1))[0]
    assert chi_square_score(counts, np.full(50, len(uniforms) / 50), counts.size - 1) < ALPHA_1E6


# -- no random draw is used twice: noise that decided one round must not appear in a later one


class CountedNoise(Noise):
    """Notes the rounds in which each draw is looked at; `stats` count them."""

    stats = Stats()

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.seen: defaultdict[tuple[Stream, int, int], set[int]] = defaultdict(set)

    def uniform(self, stream: Stream, position: int, index: int = 0) -> float:
        self.seen[stream, position, index].add(self.stats.rounds)
        return super().uniform(stream, position, index)

    def exponential(self, stream: Stream, position: int, token_ids: TokenIds, index: int = 0) -> NDArray[np.float64]:
        self.seen[stream, position, index].add(self.stats.rounds)
        return super().exponential(stream, position, token_ids, index)


def drafter_of(name: str, target: TableEngine) -> Drafter:
    if name in ("medusa", "eagle"):
        known = TableEngine.random(VOCABULARY, order=1, seed=1)
        return heads_drafter(table_heads(name, known), VOCABULARY)
    model = ModelDrafter(target.related(sigma=1.0))
    medium = HierarchicalDrafter(ModelDrafter(target.related(sigma=1.0)), target.related(sigma=0.5))
    return {"model": model, "lookahead": LookaheadDrafter(), "hierarchical": medium}[name]


@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize("name", ["model", "medusa", "eagle", "lookahead", "hierarchical"])
def test_no_random_draw_is_used_twice(name: str, rule: str) -> None:
    target = TableEngine.random(VOCABULARY, seed=1, context_length=400)
    sampler = Sampler(PLAIN, VOCABULARY)
    sampler.noise = noise = CountedNoise(3)
    cached = CachedSequence(target)
    cached.keep_features(name in ("medusa", "eagle"))
    run = Run(cached, np.array([0, 1], np.int32), sampler, StopRules(frozenset(), (), 300), False)
    noise.stats = run.stats
    list(speculative(run, FixedLength(drafter_of(name, target), 8), RULES[rule]))
    own = {draw: rounds for draw, rounds in noise.seen.items() if draw[0] is not Stream.TARGET}
    assert {draw[0] for draw in own} >= {Stream.ACCEPT, Stream.RESIDUAL}
    assert max(map(len, own.values())) == 1


def test_draws_of_one_position_are_different_numbers() -> None:
    noise, ids = Noise(5), np.arange(4, dtype=np.int32)
    drawn = [noise.uniform(Stream.ACCEPT, 7, index) for index in range(1000)]
    assert len(set(drawn)) == 1000
    assert np.mean(drawn) == pytest.approx(0.5, abs=0.04)
    rows = np.array([noise.exponential(Stream.DRAFT, 7, ids, index) for index in range(4000)])
    assert np.abs(np.corrcoef(rows.T) - np.eye(4)).max() < 0.08
    assert abs(np.corrcoef(rows[:-1, 0], rows[1:, 0])[0, 1]) < 0.08
    assert noise.uniform(Stream.ACCEPT, 7) == noise.uniform(Stream.ACCEPT, 7, 0)
