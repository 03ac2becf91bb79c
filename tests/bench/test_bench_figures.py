"""Statistics of a benchmark: spreads, verdicts, calibration, lengths. Computed by hand, no model."""

from __future__ import annotations

import pytest

from edgespec.bench.prompts import BenchPrompt
from edgespec.bench.report import Spread, Summary
from edgespec.bench.runner import Measurement, Task, Trial
from edgespec.config.options import Sampling
from edgespec.reports import Stats

TASK = Task(BenchPrompt("a", "b"), (1,), Sampling())


def measurement(tokens: int = 11, seconds: float = 1.0, prefill_s: float = 0.5, **stats: int) -> Measurement:
    given = Stats(new_tokens=tokens, wall_s=prefill_s + seconds, prefill_s=prefill_s, **stats)
    return Measurement(given)


def trial(
    plain_s: float, speculative_s: float, tokens: int = 11, again_s: float | None = None, drafted: int = 5
) -> Trial:
    speculative = measurement(tokens, speculative_s, drafted_tokens=drafted)
    again = None if again_s is None else measurement(tokens, again_s)
    return Trial(TASK, ("standard", "speculative"), measurement(tokens, plain_s), speculative, again=again)


def test_a_spread_is_the_median_with_its_quartiles():
    assert Spread.of([]) is None
    assert Spread.of([2.0]) == Spread(2.0, 2.0, 2.0)
    assert Spread.of([1.0, 2.0, 3.0, 4.0, 9.0]) == Spread(3.0, 2.0, 4.0)


@pytest.mark.parametrize(
    ("pairs", "verdict"),
    [
        ([(2.0, 1.0)] * 3, "gains"),
        ([(1.0, 2.0)] * 3, "loses"),
        ([(1.0, 1.01)] * 3, "even"),  # less than is noticeable
        ([(2.0, 1.0), (2.0, 1.0), (1.0, 2.0), (1.0, 2.0)], "even"),  # as often faster as slower
        ([(2.0, 1.0)] * 2, "unknown"),  # two runs say nothing of the spread
    ],
)
def test_a_verdict_needs_more_than_noise(pairs, verdict):
    assert Summary(trial(*pair) for pair in pairs).verdict == verdict


def test_a_difference_that_plain_decoding_has_from_itself_is_no_verdict():
    quiet, noisy = ([trial(1.0, 0.9, again_s=again_s)] * 3 for again_s in (1.01, 1.2))
    assert Summary(quiet).verdict == "gains" and Summary(noisy).verdict == "even"
    noise = Summary(noisy).to_json()["noise"]
    assert noise["median"] == pytest.approx(1 / 1.2) and Summary([trial(1.0, 0.9)]).noise is None


def test_without_a_draft_there_is_no_ratio():
    figures = Summary([trial(1.0, 0.8, drafted=0)] * 3).to_json()
    assert figures["verdict"] == "undrafted"
    assert {figures[name] for name in ("speedup", "whole_answer_speedup")} == {None}


def test_whole_answers_and_the_median_weigh_differently():
    summary = Summary([trial(1.0, 0.5), trial(1.0, 0.5), trial(100.0, 200.0)])
    assert summary.speedup is not None
    assert summary.speedup.median == pytest.approx(2.0)
    assert summary.whole_speedup == pytest.approx(103.5 / 202.5)


def test_an_answer_of_one_token_has_no_rate():
    summary = Summary([trial(0.0, 0.0, tokens=1)])
    assert summary.speedup is None
    assert summary.to_json()["standard"]["tokens_per_second"] is None
    assert summary.verdict == "unknown"


def test_acceptance_is_of_all_runs_and_none_without_a_draft():
    drafted = [measurement(drafted_tokens=10, accepted_tokens=5, rounds=5) for _ in range(2)]
    trials = [Trial(TASK, (), measurement(), run) for run in drafted]
    summary = Summary(trials)
    assert summary.speculative.acceptance_rate == 0.5
    assert summary.mean_accepted_length == 2.0
    assert Summary([trial(1.0, 1.0, drafted=0)]).speculative.acceptance_rate is None
