"""Benchmark runs on table engines: empty caches, alternating order, journal, report, figures, HTML page."""

from __future__ import annotations

import dataclasses
import json
import re
import struct
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench_table import table_model
from edgespec.bench.html import page
from edgespec.bench.journal import Journal, default_path
from edgespec.bench.output import check_outputs
from edgespec.bench.record import Trial
from edgespec.bench.report import Setup, report_of
from edgespec.bench.runner import Runner, Task, load_standard, needs_second_model, tasks_of
from edgespec.bench.table import HEADER, cells, table_lines
from edgespec.config import GenerateOptions
from edgespec.errors import CapabilityError, ConfigError, StateError
from edgespec.installation import install_command
from edgespec.runtime import Model
from edgespec.sampling import Sampling
from edgespec.tuning.workload import BenchPrompt

OPTIONS = GenerateOptions(max_tokens=24)
SAMPLING = Sampling(temperature=0.0)
PROMPTS = [BenchPrompt("letters", ("abcabcabc",)), BenchPrompt("others", ("hgfedc",)), BenchPrompt("letters", ("kkk",))]
SETTINGS = {"model": "table", "seed": 1}


@pytest.fixture
def model(tmp_path):
    with table_model(tmp_path, drafter="model", draft_length=3) as loaded:
        yield loaded


def tasks(model: Model, repeat: int = 2, prompts: list[BenchPrompt] = PROMPTS) -> list[Task]:
    return tasks_of(prompts, lambda prompt: prompt.encode(model), SAMPLING, repeat)


def trials(model: Model, repeat: int = 2) -> dict[tuple[str, int], Trial]:
    return {trial.key: trial for trial in Runner(model, model, OPTIONS).run(tasks(model, repeat))}


def report(model: Model, repeat: int = 2) -> dict[str, Any]:
    return report_of(Setup(model, model, SAMPLING, OPTIONS), tasks(model, repeat), trials(model, repeat))


# running


def test_every_prompt_is_decoded_both_ways_on_empty_caches(model):
    found = trials(model, repeat=2)
    assert len(found) == 2 * len(PROMPTS)
    for trial in found.values():
        assert trial.standard.stats.reused_tokens == trial.speculative.stats.reused_tokens == 0
        assert trial.standard.stats.drafted_tokens == 0 < trial.speculative.stats.drafted_tokens
        assert trial.standard.token_digest == trial.speculative.token_digest
        assert trial.standard.stats.new_tokens == trial.speculative.stats.new_tokens == OPTIONS.max_tokens
        assert not trial.standard.pieces
        assert {drafter for _, drafter in trial.speculative.pieces} == {None, "model"}
        assert len(trial.speculative.rounds) == trial.speculative.stats.rounds


def test_both_modes_alternate_in_running_first(model):
    found = trials(model, repeat=2)
    firsts = Counter((key[0], trial.order[0]) for key, trial in found.items())
    assert set(firsts.values()) == {1}
    assert len(firsts) == 2 * len(PROMPTS)


def test_after_forget_target_and_draft_read_the_text_again(model):
    ids = model.encode("abcabcabcabc")
    first = model.generate(ids, SAMPLING, OPTIONS)
    assert model.generate(ids, SAMPLING, OPTIONS).stats.reused_tokens == len(ids) - 1
    drafter, text = model._pool.drafters["model"], np.array(ids, np.int32)
    assert drafter.num_uncached(text) < len(ids)
    model.forget()
    assert drafter.num_uncached(text) == len(ids)
    again = model.generate(ids, SAMPLING, OPTIONS)
    assert again.stats.reused_tokens == 0
    assert again.token_ids == first.token_ids


def test_a_model_without_padding_is_its_own_baseline(model):
    assert not needs_second_model(model)
    assert load_standard(model) is model


def test_hot_prompts_are_sampled_hotter(model):
    prompt = BenchPrompt("high_entropy", ("abc",), is_hot=True)
    (task,) = tasks(model, 1, [prompt])
    assert task.sampling.temperature == 1.5
    (cold,) = tasks(model, 1, [dataclasses.replace(prompt, is_hot=False)])
    assert cold.sampling == SAMPLING
    assert task.key != cold.key


def test_stopping_between_generations_leaves_complete_trials(model):
    asked = []

    def is_over() -> bool:
        asked.append(None)
        return len(asked) > 9

    found = list(Runner(model, model, OPTIONS, is_over).run(tasks(model)))
    assert 0 < len(found) < 2 * len(PROMPTS)
    assert all(trial.standard.stats.new_tokens == OPTIONS.max_tokens for trial in found)


def test_a_cancelled_generation_counts_for_nothing(model):
    runner = Runner(model, model, OPTIONS)
    iterator = runner.run(tasks(model))
    assert next(iterator).speculative.stats.finish_reason == "length"
    original, calls = model.target.forward, []

    def forward(batch: Any) -> Any:
        calls.append(None)
        if len(calls) == 5:
            model.cancel()
        return original(batch)

    model.target.forward = forward  # type: ignore[method-assign]
    assert list(iterator) == []


# journal


def test_a_journal_returns_the_trials_that_were_added(model, tmp_path):
    path = tmp_path / "run.jsonl"
    found = trials(model)
    with Journal(path, SETTINGS) as journal:
        for trial in found.values():
            journal.add(trial)
    with Journal(path, SETTINGS) as journal:
        assert journal.trials == found


def test_a_trial_with_an_incomplete_line_is_repeated(model, tmp_path):
    path = tmp_path / "run.jsonl"
    found = list(trials(model).values())
    with Journal(path, SETTINGS) as journal:
        for trial in found[:3]:
            journal.add(trial)
    whole = path.read_bytes()
    lines = whole.splitlines(keepends=True)
    for kept in (len(whole) - 1, len(whole) - len(lines[-1]) + 1, len(lines[0]) + 5):
        path.write_bytes(whole[:kept])
        with Journal(path, SETTINGS) as journal:
            known = len(journal.trials)
            assert known < 3
            journal.add(found[5])
        with Journal(path, SETTINGS) as journal:
            assert len(journal.trials) == known + 1
    path.write_bytes(lines[0][:10])
    with Journal(path, SETTINGS) as journal:
        assert journal.trials == {}


def test_a_journal_of_other_settings_is_refused(tmp_path):
    path = tmp_path / "run.jsonl"
    Journal(path, SETTINGS).close()
    with pytest.raises(ConfigError, match=r"has other settings \(seed\)"):
        Journal(path, {**SETTINGS, "seed": 2})
    Journal(path, {**SETTINGS, "seed": 2}, restart=True).close()
    with pytest.raises(ConfigError, match=r"\(seed\)"):
        Journal(path, SETTINGS)


@pytest.mark.parametrize(
    "contents",
    [b"hello\n", b"hello", b"{}\n", b'{"a": 1}', b"[1]\n", b'{"edgespec_bench": 1, "settings": 3}\n', b"\xff\n"],
)
def test_a_file_that_is_not_a_journal_is_left_unchanged(tmp_path, contents):
    path = tmp_path / "notes.txt"
    path.write_bytes(contents)
    with pytest.raises(ConfigError, match=r"line 1 is not a line of a benchmark journal|is not the journal of"):
        Journal(path, SETTINGS)
    assert path.read_bytes() == contents
    if not contents.startswith(b'{"edgespec_bench": '):
        with pytest.raises(ConfigError, match="is not the journal of a benchmark: give another --resume FILE"):
            Journal(path, SETTINGS, restart=True)
        assert path.read_bytes() == contents


def test_a_journal_that_cannot_be_opened(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StateError, match="cannot be opened"):
        Journal(tmp_path / "file" / "run.jsonl", SETTINGS)


def test_the_default_journal_depends_on_the_settings():
    assert default_path(SETTINGS) == default_path(dict(reversed(SETTINGS.items())))
    assert default_path(SETTINGS) != default_path({**SETTINGS, "seed": 2})


def test_a_resumed_run_gives_the_same_report_as_an_uninterrupted_one(model, tmp_path):
    found = trials(model)
    with Journal(tmp_path / "j.jsonl", SETTINGS) as journal:
        for trial in found.values():
            journal.add(trial)
    with Journal(tmp_path / "j.jsonl", SETTINGS) as journal:
        setup = Setup(model, model, SAMPLING, OPTIONS)
        whole, resumed = (report_of(setup, tasks(model), each) for each in (found, journal.trials))
    assert json.loads(json.dumps(whole)) == json.loads(json.dumps(resumed))


# report


def test_the_report_is_strict_json_and_adds_up(model):
    found = json.loads(json.dumps(report(model), allow_nan=False))
    assert found["complete"]
    assert found["num_trials"] == sum(one["num_trials"] for one in found["domains"].values()) == 6
    assert [one["num_trials"] for one in found["prompts"]] == [2, 2, 2]
    assert found["num_identical"] == found["num_prompts"] == 3
    assert found["num_as_standard"] == 6
    assert found["padded_plain_speedup"] is None
    total = found["total"]
    assert total["standard"]["num_tokens"] == total["speculative"]["num_tokens"] == 6 * 24
    assert total["acceptance_rate"] == pytest.approx(found["drafters"]["model"]["acceptance_rate"])
    rounds = sum(sum(counts.values()) for counts in found["accepted_lengths"].values())
    assert rounds == sum(one["num_rounds"] for one in found["acceptance_by_position"])
    assert rounds == sum(one["num_passes"] for one in found["observed_passes"].values())
    assert found["memory"]["num_target_copies"] == 1
    assert found["memory"]["drafters_bytes"] > 0
    joined = "".join(text for text, _ in found["prompts"][0]["pieces"])
    assert len(joined) >= 24


def test_a_partial_report_says_so(model):
    done = trials(model)
    key = next(iter(done))
    partial = report_of(Setup(model, model, SAMPLING, OPTIONS), tasks(model), {key: done[key]})
    assert not partial["complete"]
    assert (partial["num_trials"], partial["num_planned_trials"], partial["num_prompts"]) == (1, 6, 1)
    assert "Interrupted: 1 of 6" in page(partial)


def test_different_tokens_are_reported(model):
    done = trials(model, repeat=1)
    key, trial = next(iter(done.items()))
    wrong = dataclasses.replace(trial.speculative, token_digest="other")
    done[key] = dataclasses.replace(trial, speculative=wrong)
    found = report_of(Setup(model, model, SAMPLING, OPTIONS), tasks(model, 1), done)
    assert found["num_identical"] == 2
    assert "texts: DIFFERENT from plain decoding, 2 of 3 prompts" in list(table_lines(found))
    assert "differs from plain decoding" in page(found)


def test_flat_pass_costs_give_a_speedup_and_confidences_are_reported(tmp_path):
    """Passes that cost the same at any width: speculation must gain, whoever decides."""
    prompts = [BenchPrompt("letters", ("abcdef"[i:] + "abc",)) for i in range(5)]
    with table_model(tmp_path, pass_s=0.004) as model:
        setup = Setup(model, model, SAMPLING, GenerateOptions(max_tokens=48))
        due = tasks(model, 1, prompts)
        _ = model.cost_curve  # measured, as the command does before it begins
        found = report_of(setup, due, {t.key: t for t in Runner(model, model, setup.options).run(due)})
    assert found["total"]["verdict"] == "gains"
    assert any(line.startswith("speculation is faster") for line in table_lines(found))
    assert found["reliability"]["all"]["num_tokens"] > 50
    assert 0 <= found["reliability"]["all"]["expected_calibration_error"] < 0.5
    assert found["num_identical"] == len(prompts)


def test_a_fixed_length_has_no_reliability(model):
    assert report(model)["reliability"] == {}


def test_the_table_shows_every_domain_and_all(model):
    lines = list(table_lines(report(model)))
    assert [line.split()[0] for line in lines[1:4]] == ["letters", "others", "all"]
    assert len(cells(report(model)["total"])) == len(HEADER) - 1
    assert max(map(len, lines[:4])) <= 100
    assert any("identical to plain decoding in the same mode, 3 of 3 prompts" in line for line in lines)


# figures and page


class Page(HTMLParser):
    """Collects tags, the tokens and where anything would be fetched from."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.sources: list[str] = []
        self.answers: list[str] = []
        self._in_answer = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.sources += [value for key in ("src", "href") if (value := values.get(key))]
        if tag not in ("meta", "img"):
            self.open.append(tag)
        if tag == "pre":
            self._in_answer = values.get("class") == "answer"
            if self._in_answer:
                self.answers.append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._in_answer and "pre" in self.open:
            self.answers[-1] += data


def test_the_page_is_complete_and_self_contained(model):
    found = report(model)
    found["prompts"][0]["text"] = "<script>alert(1)</script> & \x1b[0m"
    parsed = Page()
    text = page(found)
    parsed.feed(text)
    assert parsed.open == []
    assert all(source.startswith("data:image/png;base64,") for source in parsed.sources)
    assert "http" not in re.sub(r"base64,[^\"]*", "", text)
    assert "<script" not in text
    assert "\x1b" not in text
    expected = ["".join(piece for piece, _ in prompt["pieces"]) for prompt in found["prompts"]]
    assert parsed.answers == expected
    assert 'title="model"' in text


def test_a_page_suits_a_phone_and_the_dark(model):
    text = page(report(model, repeat=1))
    assert '<meta name="viewport" content="width=device-width' in text
    assert "color-scheme: light dark" in text
    assert "@media (prefers-color-scheme: dark)" in text and "@media (max-width: 40rem)" in text


def test_a_page_without_matplotlib_names_the_extra(model, monkeypatch):
    monkeypatch.setattr("edgespec.bench.html.has_matplotlib", lambda: False)
    text = page(report(model, repeat=1))
    assert "Figures need matplotlib" in text and "edgespec doctor" in text
    assert "<img" not in text


def test_figures_are_drawn_and_an_earlier_runs_are_not_left(model, tmp_path):
    pytest.importorskip("matplotlib", reason="figures need scripts/run.py install bench")
    from edgespec.bench.plots import draw

    folder = tmp_path / "new" / "figures"
    folder.mkdir(parents=True)
    (folder / "reliability.png").write_bytes(b"old")
    paths = draw(report(model), folder)
    assert {path.name for path in paths} == {"speedup.png", "acceptance.png", "accepted_lengths.png", "cost_curve.png"}
    assert {path.name for path in folder.iterdir()} == {path.name for path in paths}
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)


def test_a_name_that_ends_with_png_is_one_picture_of_all_figures(model, tmp_path):
    pytest.importorskip("matplotlib", reason="figures need pip install edgespec[bench]")
    from edgespec.bench.plots import draw

    found = report(model)
    (each, *_), path = draw(found, tmp_path / "figures"), tmp_path / "all.png"
    assert draw(found, path) == [path]
    assert path.is_file()
    width, height = _png_size(path)
    assert (width, height) == (_png_size(each)[0], 4 * _png_size(each)[1])


def _png_size(path: Path) -> tuple[int, ...]:
    return struct.unpack(">II", path.read_bytes()[16:24])


def test_all_figures_when_the_length_is_automatic(tmp_path):
    pytest.importorskip("matplotlib", reason="figures need scripts/run.py install bench")
    from edgespec.bench.plots import PLOTS, images

    with table_model(tmp_path, pass_s=0.02) as model:  # long enough to outweigh the noise of a busy machine
        _ = model.cost_curve
        assert set(images(report(model, 1))) == set(PLOTS)


def test_output_places_are_checked_first(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="is a folder"):
        check_outputs(None, tmp_path)
    with pytest.raises(ConfigError, match="its folder does not exist"):
        check_outputs(None, tmp_path / "no" / "page.html")
    monkeypatch.setattr("edgespec.bench.output.has_matplotlib", lambda: True)
    with pytest.raises(ConfigError, match=r"is a file: give a name that ends with \.png, or a folder"):
        check_outputs(tmp_path / "file", None)
    with pytest.raises(ConfigError, match="its folder does not exist"):
        check_outputs(tmp_path / "no" / "figures.png", None)
    monkeypatch.setattr("edgespec.bench.output.has_matplotlib", lambda: False)
    with pytest.raises(CapabilityError, match=re.escape(install_command("bench"))):
        check_outputs(tmp_path / "plots", None)
