"""Benchmark runs on table engines, their statistics and explanations, and the prompts."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from bench_table import table_model
from edgespec.bench import prompts as sources
from edgespec.bench.prompts import choose, encode, random_text
from edgespec.bench.report import Side, Summary, report_of, table_lines
from edgespec.bench.runner import BenchTrial, Measurement, Task, first_divergence, run_trials, runs, tasks_of
from edgespec.bench.sweep import Costs, balance, expected_speedup, threshold
from edgespec.config.options import GenerateOptions, Sampling
from edgespec.errors import PromptError, UsageError
from edgespec.loading.drafts import Prompt
from edgespec.reports import Stats
from edgespec.runtime import Model
from shared_passes import shared_model
from table_engine import LetterVocabulary

OPTIONS = GenerateOptions(max_tokens=24)
SAMPLING = Sampling(temperature=0.0)
ASKED = [Prompt("letters", "abcabcabc"), Prompt("others", "hgfedc"), Prompt("letters", "kkk")]


@pytest.fixture
def model(tmp_path):
    with table_model(tmp_path, drafter="model", draft_length=3) as loaded:
        yield loaded


def tasks(model: Model, repeat: int = 2, prompts: list[Prompt] = ASKED) -> list[Task]:
    return tasks_of(prompts, partial(encode, model, True), SAMPLING, repeat)


def trials(model: Model, repeat: int = 2) -> list[BenchTrial]:
    return list(run_trials(model, OPTIONS, tasks(model, repeat)))


def report(model: Model, found: list[BenchTrial]) -> dict[str, Any]:
    return report_of(model, SAMPLING, OPTIONS, found, len(found))


# running


def test_every_prompt_is_decoded_both_ways_on_empty_caches(model):
    found = trials(model, repeat=2)
    assert len(found) == 2 * len(ASKED)
    for trial in found:
        assert trial.standard.stats.reused_tokens == trial.speculative.stats.reused_tokens == 0
        assert trial.standard.stats.drafted_tokens == 0 < trial.speculative.stats.drafted_tokens
        assert trial.standard.token_ids == trial.speculative.token_ids
        assert trial.standard.stats.new_tokens == trial.speculative.stats.new_tokens == OPTIONS.max_tokens
        assert len(trial.speculative.rounds) == trial.speculative.stats.rounds


def test_both_modes_alternate_in_running_first(model):
    sides = {"standard": replace(OPTIONS, drafter="none"), "speculative": OPTIONS}
    found = list(runs(model, tasks(model, repeat=2), lambda task: sides, lambda: False))
    firsts = Counter((task.index, side) for task, side, _ in found[::2])
    assert set(firsts.values()) == {1}
    assert len(firsts) == 2 * len(ASKED)


def test_stopping_between_generations_leaves_complete_trials(model):
    asked = []

    def is_over() -> bool:
        asked.append(None)
        return len(asked) > 9

    found = list(run_trials(model, OPTIONS, tasks(model), is_over))
    assert 0 < len(found) < 2 * len(ASKED)
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
    prompts = [Prompt("letters", "abcdef"[i:] + "abc") for i in range(5)]
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


# -- statistics of a benchmark: spreads, verdicts, calibration, lengths. Computed by hand, no model


TASK = Task(Prompt("a", "b"), (1,), Sampling())


def measurement(tokens: int = 11, seconds: float = 1.0, prefill_s: float = 0.5, **stats: int) -> Measurement:
    given = Stats(new_tokens=tokens, wall_s=prefill_s + seconds, prefill_s=prefill_s, **stats)
    return Measurement(given)


def trial(
    plain_s: float, speculative_s: float, tokens: int = 11, again_s: float | None = None, drafted: int = 5
) -> BenchTrial:
    speculative = measurement(tokens, speculative_s, drafted_tokens=drafted)
    again = None if again_s is None else measurement(tokens, again_s)
    return BenchTrial(TASK, measurement(tokens, plain_s), speculative, again=again)


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
    trials = [BenchTrial(TASK, measurement(), run) for run in drafted]
    summary = Summary(trials)
    assert summary.speculative.acceptance_rate == 0.5
    assert summary.mean_accepted_length == 2.0
    assert Summary([trial(1.0, 1.0, drafted=0)]).speculative.acceptance_rate is None


# -- expected speedups and what would have to change, by hand on made-up costs


ROUND_S = [0.0, 0.1, *(0.12 + 0.02 * extra for extra in range(15))]
COSTS = Costs(0.1, ROUND_S, 0.01, acceptance=0.8)


def test_with_flat_costs_it_is_leviathans_formula() -> None:
    for length in (1, 4, 8):
        by_hand = (1 - 0.8 ** (length + 1)) / (0.2 * (1 + length * 0.1))
        assert replace(COSTS, round_s=[0.1] * 17).expected(length) == pytest.approx(by_hand)
        assert COSTS.expected(length) == pytest.approx(expected_speedup(0.8, length, ROUND_S, 0.01))
        assert 1 < replace(COSTS, drafting=0.5).expected(length) < COSTS.expected(length)


def test_drafting_pays_from_where_it_says() -> None:
    share = COSTS.pays_from
    assert share is not None and 0 < share < 0.8
    for rate, gains in ((share, True), (share - 1e-3, False)):
        assert (replace(COSTS, acceptance=rate).best()[0] > 1) == gains
    dear = replace(COSTS, round_s=[0.1 * width for width in range(17)])
    assert dear.pays_from is None and "would not pay off even if" in threshold(dear)
    assert f"drafting pays off above {share:.0%} acceptance" in threshold(COSTS)
    assert "a pass over 4 tokens costs 1.60 plain ones, a drafted token 0.10" in threshold(COSTS)


def test_the_balance_is_exact() -> None:
    """13 tokens: plainly 0.1 s each; with speculation three rounds of 4 tokens, each of 0.2 s."""
    plain = Side([Measurement(Stats(new_tokens=13, prefill_s=1.0, wall_s=2.2, rounds=12))])
    counts = {"rounds": 3, "drafted_tokens": 9, "accepted_tokens": 9}
    times = {"prefill_s": 1.0, "wall_s": 1.6, "verify_s": 0.45, "draft_s": 0.09}
    drafted = Side([Measurement(Stats(new_tokens=13, **counts, **times))])
    assert balance(plain, drafted) == (
        "faster: a round emitted 4.00 tokens (100% of 9 draft tokens accepted) in the time of 2.00 plain tokens: "
        "target pass 1.50, drafting 0.30, other 0.20"
    )


# -- the benchmark's prompts: sources, selection by seed, refused input


VOCABULARY = LetterVocabulary(12, end_id=11)


def prompts_of(domain: str, count: int) -> list[Prompt]:
    return [Prompt(domain, f"{domain} number {index}") for index in range(count)]


def test_plain_lines_are_prompts(tmp_path):
    (tmp_path / "mine.txt").write_text("one prompt\n\n  \nanother: {x}\n")
    found = sources.read_prompts(tmp_path / "mine.txt")
    assert {domain: [p.text for p in prompts] for domain, prompts in found.items()} == {
        "prompts": ["one prompt", "another: {x}"]
    }


@pytest.mark.parametrize(
    ("name", "contents", "said"),
    [
        ("bad.txt", b" \n\t\n", "one prompt per line"),
        ("bad.jsonl", b'{"text": "a"}', "none of them JSON"),
        ("bad.txt", b"\xff\xfe", "not UTF-8"),
    ],
)
def test_bad_prompt_files_are_refused(tmp_path, name, contents, said):
    path = tmp_path / name
    path.write_bytes(contents)
    with pytest.raises(UsageError, match=said):
        sources.read_prompts(path)


def test_domains_take_turns_and_what_does_not_fit_is_left_out():
    domains = {"a": [*prompts_of("a", 3), Prompt("a", "a number 1")], "b": prompts_of("b", 2)}
    chosen, too_long = choose(domains, lambda prompt: prompt.text != "a number 0")
    assert [prompt.text for prompt in chosen] == ["a number 1", "b number 0", "a number 2", "b number 1"]
    assert too_long == 1
    assert choose(domains, lambda prompt: True, one_each=True)[0] == [domains["a"][0], domains["b"][0]]
    with pytest.raises(PromptError, match="context_length="):
        choose(domains, lambda prompt: False)


def test_random_text_is_made_of_tokens_that_print_and_of_the_seed():
    domains = random_text(VOCABULARY, seed=3)
    assert domains == random_text(VOCABULARY, seed=3) != random_text(VOCABULARY, seed=4)
    for prompt in domains["random_text"]:
        assert len(VOCABULARY.encode(prompt.text)) == 48 and set(prompt.text) <= set("abcdefghijk")
