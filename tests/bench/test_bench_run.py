"""Benchmark runs on table engines: empty caches, alternating order, report."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from typing import Any

import pytest

from bench_table import table_model
from edgespec.bench.prompts import BenchPrompt
from edgespec.bench.report import report_of, table_lines
from edgespec.bench.runner import Measurement, Task, Trial, first_divergence, run_trials, tasks_of
from edgespec.config.options import GenerateOptions, Sampling
from edgespec.runtime import Model
from shared_passes import shared_model

OPTIONS = GenerateOptions(max_tokens=24)
SAMPLING = Sampling(temperature=0.0)
PROMPTS = [BenchPrompt("letters", "abcabcabc"), BenchPrompt("others", "hgfedc"), BenchPrompt("letters", "kkk")]


@pytest.fixture
def model(tmp_path):
    with table_model(tmp_path, drafter="model", draft_length=3) as loaded:
        yield loaded


def tasks(model: Model, repeat: int = 2, prompts: list[BenchPrompt] = PROMPTS) -> list[Task]:
    return tasks_of(prompts, lambda prompt: prompt.encode(model), SAMPLING, repeat)


def trials(model: Model, repeat: int = 2) -> list[Trial]:
    return list(run_trials(model, OPTIONS, tasks(model, repeat)))


def report(model: Model, found: list[Trial]) -> dict[str, Any]:
    return report_of(model, SAMPLING, OPTIONS, found, len(found))


# running


def test_every_prompt_is_decoded_both_ways_on_empty_caches(model):
    found = trials(model, repeat=2)
    assert len(found) == 2 * len(PROMPTS)
    for trial in found:
        assert trial.standard.stats.reused_tokens == trial.speculative.stats.reused_tokens == 0
        assert trial.standard.stats.drafted_tokens == 0 < trial.speculative.stats.drafted_tokens
        assert trial.standard.token_ids == trial.speculative.token_ids
        assert trial.standard.stats.new_tokens == trial.speculative.stats.new_tokens == OPTIONS.max_tokens
        assert len(trial.speculative.rounds) == trial.speculative.stats.rounds


def test_both_modes_alternate_in_running_first(model):
    found = trials(model, repeat=2)
    firsts = Counter((trial.task.index, trial.order[0]) for trial in found)
    assert set(firsts.values()) == {1}
    assert len(firsts) == 2 * len(PROMPTS)


def test_stopping_between_generations_leaves_complete_trials(model):
    asked = []

    def is_over() -> bool:
        asked.append(None)
        return len(asked) > 9

    found = list(run_trials(model, OPTIONS, tasks(model), is_over))
    assert 0 < len(found) < 2 * len(PROMPTS)
    assert all(trial.standard.stats.new_tokens == OPTIONS.max_tokens for trial in found)


def test_a_cancelled_generation_counts_for_nothing(model):
    iterator = run_trials(model, OPTIONS, tasks(model))
    assert next(iterator).speculative.stats.finish_reason == "length"
    original, calls = model.target.forward, []

    def forward(batch: Any) -> Any:
        calls.append(None)
        if len(calls) == 5:
            model.cancel()
        return original(batch)

    model.target.forward = forward  # type: ignore[method-assign]
    assert list(iterator) == []


# report


def test_the_report_is_strict_json_and_adds_up(model):
    found = json.loads(json.dumps(report(model, trials(model)), allow_nan=False))
    assert found["complete"]
    assert found["num_trials"] == sum(one["num_trials"] for one in found["domains"].values()) == 6
    assert found["num_identical"] == found["num_prompts"] == 3
    total = found["total"]
    assert total["standard"]["num_tokens"] == total["speculative"]["num_tokens"] == 6 * 24
    assert 0 < total["acceptance_rate"] <= 1


def test_different_tokens_are_reported(model):
    first, *others = trials(model, repeat=1)
    wrong = dataclasses.replace(first, speculative=dataclasses.replace(first.speculative, token_ids=(1,)))
    found = report(model, [wrong, *others])
    assert found["num_identical"] == 2
    assert "texts: DIFFERENT from plain decoding, 2 of 3 prompts" in list(table_lines(found))


def test_flat_pass_costs_give_a_speedup(tmp_path, monkeypatch):
    """Passes that cost the same at any width: speculation must gain, whoever decides."""
    prompts = [BenchPrompt("letters", "abcdef"[i:] + "abc") for i in range(5)]
    model, _ = shared_model(tmp_path, monkeypatch, {1: 1.0, 96: 1.0}, sigma=0.5, count=1)
    with model:
        options = GenerateOptions(max_tokens=48)
        found = report(model, list(run_trials(model, options, tasks(model, 1, prompts))))
    assert found["total"]["verdict"] == "gains"
    assert any(line.startswith("speculation is faster") for line in table_lines(found))
    assert found["num_identical"] == len(prompts)


# verify


def test_verify_sees_a_log_probability_that_differs_where_it_may_not(model):
    result = model.generate("abcabcabc", SAMPLING, dataclasses.replace(OPTIONS, logprobs=True))
    plain = Measurement(result.stats, tuple(result.token_ids), tuple(result.logprobs))
    assert first_divergence(plain, plain, exact=True) is None
    logprobs = (*plain.logprobs[:3], plain.logprobs[3] - 1e-6)
    changed = dataclasses.replace(plain, token_ids=plain.token_ids[:4], logprobs=logprobs)
    found = first_divergence(plain, changed, exact=True)
    assert found is not None and found.position == 3 and found.plain_token_id == found.drafted_token_id
    assert first_divergence(plain, changed, exact=False).position == 4
