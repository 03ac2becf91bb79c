"""`edgespec tune`: successive halving keeps the baselines, and later runs use the best setting."""

from __future__ import annotations

import json
import math
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from demo import DEMO, heed_interrupts
from edgespec.cli.main import cli
from edgespec.cli.tune_view import _labels, _short
from edgespec.config import LoadOptions
from edgespec.errors import CapabilityError, EdgespecError
from edgespec.reports import Stats
from edgespec.sampling import Sampling
from edgespec.tuning.profiles import load_profile, new_profile, profile_path, save_profile
from edgespec.tuning.settings_grid import (
    FEW_LENGTHS,
    LENGTHS,
    Candidate,
    Loaded,
    TuneRequest,
    exit_layers,
    needed,
    thread_counts,
)
from edgespec.tuning.sweep import Score, Sweep, prepare

HERE, PLAIN_MODE = Loaded("demo", "llamacpp", 1, None), Loaded("demo", "llamacpp", 1, False)
PLAIN, UNPADDED = Candidate(HERE, "none", "auto"), Candidate(PLAIN_MODE, "none", "auto")
AUTO = Candidate(HERE, "auto", "auto")
TRIED = [Candidate(HERE, "ngram", length) for length in (1, 2, 3, 4, 5, 6)]
OTHER_PLAIN = replace(PLAIN, loaded=replace(HERE, model="other"))
OTHER_AUTO = replace(OTHER_PLAIN, drafter="auto")
OTHER_TRIED = [replace(OTHER_PLAIN, drafter="ngram", draft_length=length) for length in (1, 2, 3, 4, 5, 6)]
MEDIUM = DEMO / "demo-medium-q8_0.gguf"


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def no_profiles_stay(private_home):
    yield
    shutil.rmtree(private_home / "profiles", ignore_errors=True)


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "mine.jsonl"
    path.write_text('{"text": "hello there"}\n{"text": "how are you"}\n')
    return path


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, list(arguments))


def sweep_of(rates: dict[Candidate, float], num_prompts: int = 4) -> Sweep:
    """A sweep in which every candidate decoded 10 tokens of each prompt at its rate."""
    request = TuneRequest(LoadOptions(), frozenset(), Sampling(), 11)
    prompts = {(candidate.loaded.model, candidate.loaded.engine): [[1]] * num_prompts for candidate in rates}
    found = Sweep(request, prompts, {c: Score(c) for c in rates})
    for candidate, rate in rates.items():
        for prompt in range(num_prompts):
            found.scores[candidate].add(prompt, Stats(new_tokens=11, wall_s=10 / rate))
        found.scores[candidate].rounds = 1
    return found


def test_the_best_survive_and_the_baselines_stay():
    rates = {PLAIN: 1.0, UNPADDED: 2.0, AUTO: 3.0} | {c: 10.0 + i for i, c in enumerate(TRIED)}
    found = sweep_of(rates)
    assert found._survivors(list(rates), range(4)) == [PLAIN, UNPADDED, AUTO, *TRIED[-4:]]


def test_the_default_setting_stays_even_if_it_was_disturbed_and_else_no_gain_is_told():
    usual = replace(AUTO, loaded=replace(HERE, threads=2))
    found = sweep_of({PLAIN: 1.0, UNPADDED: 2.0, AUTO: 3.0, usual: 0.01} | dict.fromkeys(TRIED, 10.0))
    found.usual_engines = {"demo": "llamacpp"}
    assert found.default("demo").candidate == usual
    assert usual in found._survivors(list(found.scores), range(4))
    found.scores[TRIED[0]].rounds = 2
    assert math.isinf(found.gain(found.scores[TRIED[0]])[1])


def test_speedup_is_over_the_best_plain_decoding_of_the_same_prompts():
    found = sweep_of({PLAIN: 10.0, UNPADDED: 20.0, TRIED[0]: 30.0})
    assert found.speedup(found.scores[TRIED[0]]) == pytest.approx(1.5)
    found.scores[PLAIN].add(7, Stats(new_tokens=11, wall_s=0.001))  # a prompt that the others did not have
    assert found.speedup(found.scores[TRIED[0]]) == pytest.approx(1.5)


def test_repetitions_count_by_their_median():
    score = Score(PLAIN)
    for seconds in (1.0, 1.2, 50.0):
        score.add(0, Stats(new_tokens=13, wall_s=seconds))
    score.add(1, Stats(new_tokens=5, wall_s=0.8))
    assert score.rate() == pytest.approx((12 + 4) / (1.2 + 0.8))


def test_the_best_has_the_requested_mode_and_prefers_auto():
    assert sweep_of({PLAIN: 10.0, UNPADDED: 20.0, TRIED[0]: 12.0}).best("demo").candidate == TRIED[0]
    assert sweep_of({PLAIN: 10.0, AUTO: 11.9, TRIED[0]: 12.0}).best("demo").candidate == AUTO
    assert sweep_of({PLAIN: 10.0, AUTO: 11.0, TRIED[0]: 12.0}).best("demo").candidate == TRIED[0]


def twice(found: Sweep, rates: dict[Candidate, float]) -> Sweep:
    """A second visit of the last round, at these rates."""
    for candidate, rate in rates.items():
        for prompt in range(4):
            found.scores[candidate].add(prompt, Stats(new_tokens=11, wall_s=10 / rate))
    found.usual_engines = {"demo": "llamacpp", "other": "llamacpp"}
    return found


@pytest.mark.parametrize(
    ("second", "is_gain"),
    [({PLAIN: 10.0, AUTO: 10.1, TRIED[0]: 12.1}, True), ({PLAIN: 9.0, AUTO: 11.9, TRIED[0]: 10.2}, False)],
)
def test_a_gain_must_exceed_the_error_of_two_visits(second, is_gain):
    first = {PLAIN: 10.0, AUTO: 10.0, TRIED[0]: 12.0}
    found = twice(sweep_of(first), second)
    assert found.default("demo").candidate == AUTO
    gain, error = found.gain(found.scores[TRIED[0]])
    assert gain == pytest.approx(1.2, abs=0.2)
    assert (gain > 1 + error) is is_gain
    assert found.gain(found.scores[AUTO]) == (1.0, 0.0)


def test_the_default_is_the_usual_engine_with_most_threads_and_what_was_fixed():
    more = replace(HERE, threads=2)
    onnx = replace(HERE, engine="onnx", threads=2)
    rates = {
        AUTO: 1.0,
        replace(AUTO, loaded=more): 1.0,
        replace(AUTO, loaded=onnx): 1.0,
        replace(PLAIN, loaded=more): 1.0,
    }
    found = twice(sweep_of(rates), rates)
    assert found.default("demo").candidate == replace(AUTO, loaded=more)
    found.usual_engines = {"demo": "onnx"}
    assert found.default("demo").candidate == replace(AUTO, loaded=onnx)
    plain_only = twice(sweep_of({PLAIN: 1.0, TRIED[0]: 2.0}), {})
    assert plain_only.default("demo").candidate == PLAIN  # a model that cannot roll back has no automatic setting
    assert math.isinf(plain_only.gain(plain_only.scores[TRIED[0]])[1])  # nothing was decoded twice


def test_what_gains_nothing_keeps_no_profile_and_says_so(target_path, prompts):
    arguments = ["tune", str(target_path), "--drafter", "auto", "--prompts", str(prompts), "-n", "4"]
    path = profile_path(str(target_path))
    path.parent.mkdir(parents=True, exist_ok=True)
    save_profile(path, new_profile(str(target_path), {"drafter": "ngram"}, 1.0, 1.05))
    result = run(*arguments, "--threads", "1", "--draft-length", "auto", "--json")
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    if told["settings"]["drafter"] == "auto":
        assert (told["profile"], told["gain"], path.is_file()) == (None, 1.0, False)
        assert "removed: profile" in result.stderr
    shown = run(*arguments).stdout
    assert ("nothing gained" in shown) is not path.is_file()


def test_each_weights_are_searched_by_themselves():
    """What is slower than all of the faster weights may still be the best of its own."""
    rates = {PLAIN: 100.0, AUTO: 90.0} | {c: 110.0 + i for i, c in enumerate(TRIED)}
    others = {OTHER_PLAIN: 10.0, OTHER_AUTO: 9.0} | {c: 11.0 + i for i, c in enumerate(OTHER_TRIED)}
    found = sweep_of(rates | others)
    assert found._survivors(list(found.scores), range(4)) == [
        *(PLAIN, AUTO, *TRIED[-4:]),
        *(OTHER_PLAIN, OTHER_AUTO, *OTHER_TRIED[-4:]),
    ]
    assert found.models == ["demo", "other"]
    assert found.best("demo").candidate == TRIED[-1] and found.best("other").candidate == OTHER_TRIED[-1]
    assert found.speedup(found.scores[OTHER_TRIED[-1]]) == pytest.approx(1.6)
    assert found.num_runs() == 2 * sweep_of(rates).num_runs()


def test_models_to_draft_with_are_loaded_where_one_is_used():
    unaided = [PLAIN, *TRIED, Candidate(HERE, "lookahead", 4)]
    assert needed(HERE, unaided) == "none"
    for drafter in ("auto", "model", "tree", "eagle3", "early-exit"):
        assert needed(HERE, [*unaided, Candidate(HERE, drafter, 4)]) == "auto"
    alone = replace(HERE, opens="medusa")
    assert needed(alone, [Candidate(alone, "medusa", 4)]) == "medusa"


@pytest.mark.parametrize(
    ("own", "layers", "tried"), [(4, 9, [1, 2, 3, 5, 6]), (8, 32, [4, 12, 16, 20, 24]), (1, 2, []), (1, 3, [2])]
)
def test_exits_are_spread_over_the_layers(own, layers, tried):
    assert exit_layers(own, layers) == tried


def test_the_settings_that_are_tried(target_path, draft_path):
    options = LoadOptions(model=str(target_path), draft=draft_path, threads=1)
    request = TuneRequest(options, frozenset({"threads"}), Sampling(), 4)
    engines = {str(target_path): ["llamacpp"]}
    tried = list(prepare(request, engines, lambda model: [[1, 2]]).scores)
    for drafter in ("suffix", "model"):
        assert [c.draft_length for c in tried if c.drafter == drafter] == list(LENGTHS)
    assert [c.draft_length for c in tried if c.drafter == "auto"] == ["auto"]
    assert {c.loaded.threads for c in tried} == {1}
    fixed = TuneRequest(options, frozenset({"threads", "drafter", "draft_length"}), Sampling(), 4)
    tried = list(prepare(fixed, engines, lambda model: [[1, 2]]).scores)
    assert {(c.drafter, c.draft_length) for c in tried} == {("none", "auto"), ("auto", "auto")}


@pytest.mark.parametrize("engine", ["llamacpp", "onnx"])
def test_every_drafter_of_a_pair_is_tried(engine):
    """The demo has heads and a medium, which are opened by name; rows are too dear here for what needs many."""
    if engine == "onnx":
        pytest.importorskip("onnxruntime")
    if not (DEMO / "manifest.toml").is_file():
        pytest.skip("the demo family is not here")
    request = TuneRequest(LoadOptions(threads=1), frozenset({"threads"}), Sampling(), 4)
    tried = list(prepare(request, {"demo": [engine]}, lambda model: [[1, 2]]).scores)
    lengths = {name: [c.draft_length for c in tried if c.drafter == name] for name in {c.drafter for c in tried}}
    by_name = ("hierarchical", "medusa", "eagle")
    assert {"suffix", "model", "auto", *by_name} <= set(lengths)
    assert all(lengths[name] == list(FEW_LENGTHS) for name in by_name)
    assert {c.loaded.opens for c in tried} == {"auto", *by_name}
    assert all(c.loaded.opens == c.drafter for c in tried if c.drafter in by_name)
    sweep = Sweep(request, {("demo", engine): [[5, 6, 7]] * 2}, {})
    for name in by_name:
        chosen = [c for c in tried if c.drafter == name]
        sweep.scores |= {c: Score(c) for c in chosen}
        sweep._decode(chosen, 1, 1)
        assert all(sweep.scores[c].totals.drafted_tokens for c in chosen if c.draft_length == 4)


def test_other_exits_of_an_onnx_pair_are_tried(onnx_path, tmp_path):
    pytest.importorskip("onnxruntime")
    from edgespec.export.onnx.cut import early_exit_onnx

    folder = tmp_path / "target"
    shutil.copytree(onnx_path.parent, folder)
    target = str(folder / "model.onnx")
    options = LoadOptions(model=target, draft=early_exit_onnx(folder, 4), threads=1)
    for fixed, expected in (({"threads"}, {None, 1, 2, 3, 5, 6}), ({"threads", "exit_layer"}, {None})):
        request = TuneRequest(options, frozenset(fixed), Sampling(), 4)
        sweep = prepare(request, {target: ["onnx"]}, lambda model: [[1, 2]] * 2)
        exits = [c for c in sweep.scores if c.drafter == "early-exit"]
        assert {c.loaded.exit_layer for c in exits} == expected
        assert all(c.loaded.opens == ("auto" if c.loaded.exit_layer is None else "early-exit") for c in exits)
    cut = [c for c in exits if c.draft_length == 4]
    model = sweep.request.load(replace(cut[0].loaded, opens="early-exit", exit_layer=6), "early-exit")
    with model:
        assert model.target.early_exit().layers == 6


def test_another_exit_that_cannot_be_opened_is_left_out(target_path, caplog):
    """Also where the user asked for early exit itself: only the exit that was asked for must be there."""
    options = LoadOptions(model=str(target_path), drafter="early-exit", threads=1)
    request = TuneRequest(options, frozenset({"threads", "drafter"}), Sampling(), 4)
    asked = Candidate(Loaded(str(target_path), "llamacpp", 1, None, "early-exit"), "early-exit", 4)
    other = replace(asked, loaded=replace(asked.loaded, exit_layer=3))
    sweep = Sweep(request, {(str(target_path), "llamacpp"): [[5, 6]]}, {each: Score(each) for each in (asked, other)})
    sweep._decode([other], 1, 2)
    assert list(sweep.scores) == [asked] and "early-exit is skipped" in caplog.text
    with pytest.raises(EdgespecError):
        sweep._decode([asked], 1, 1)


@pytest.mark.parametrize(
    ("usual", "counts"), [(1, [1]), (2, [1, 2]), (4, [1, 2, 3, 4]), (6, [1, 2, 4, 6]), (16, [1, 2, 4, 8, 16])]
)
def test_threads_go_up_to_the_cores_unless_they_are_fixed(usual, counts, monkeypatch):
    options = LoadOptions()
    monkeypatch.setattr("edgespec.tuning.settings_grid.physical_cores", lambda: usual)
    assert thread_counts(TuneRequest(options, frozenset(), Sampling(), 4), usual) == counts
    assert thread_counts(TuneRequest(options, frozenset({"threads"}), Sampling(), 4), usual) == [usual]


def test_slow_cores_are_tried_too_where_the_engine_left_them_out(monkeypatch):
    monkeypatch.setattr("edgespec.tuning.settings_grid.physical_cores", lambda: 14)
    assert thread_counts(TuneRequest(LoadOptions(), frozenset(), Sampling(), 4), 6) == [1, 2, 4, 6, 14]


def test_an_unavailable_drafter_that_was_not_requested_is_skipped(target_path):
    model = str(target_path)
    request = TuneRequest(LoadOptions(model=model, threads=1), frozenset({"threads"}), Sampling(temperature=0.0), 3)
    sweep = prepare(request, {model: ["llamacpp"]}, lambda model: [[5, 6, 7], [6, 7, 8]])
    before = set(sweep.scores)
    here = next(iter(before)).loaded
    lost = [Candidate(replace(here, opens="medusa"), "medusa", length) for length in FEW_LENGTHS]
    sweep.scores |= {candidate: Score(candidate) for candidate in lost}
    sweep.run()
    assert set(sweep.scores) == before
    assert sweep.finalists()
    named = replace(request, options=replace(request.options, drafter="medusa"))
    with pytest.raises(CapabilityError, match="medusa"):
        Sweep(named, sweep.prompts, {lost[0]: Score(lost[0])}).run()


def test_no_more_runs_than_announced(target_path, draft_path, prompts):
    options = LoadOptions(model=str(target_path), draft=draft_path, threads=1)
    request = TuneRequest(options, frozenset({"threads"}), Sampling(temperature=0.0), 3)
    texts = ("ab", "cd", "ef")
    sweep = prepare(request, {str(target_path): ["llamacpp"]}, lambda model: [model.encode(text) for text in texts])
    done: list[int] = []
    sweep.advance = done.append
    sweep.run()
    assert len(sweep.scores) < sum(done) <= sweep.num_runs()
    finalists = sweep.finalists()
    assert 0 < len(finalists) < len(sweep.scores)
    assert all(set(score.seconds) == {0, 1, 2} for score in finalists)
    assert any(score.candidate.is_plain for score in finalists)


# the command


@pytest.fixture
def gains(monkeypatch):
    """Whatever is fastest counts as faster than the default: of a few short answers no gain would be certain."""
    monkeypatch.setattr(Sweep, "gain", lambda self, score: (self.speedup(score) + 1, 0.01))


@pytest.mark.usefixtures("gains")
def test_the_best_setting_is_what_later_runs_use(target_path, draft_path, prompts):
    pair = ["-m", str(target_path), "-md", str(draft_path)]
    result = run("tune", *pair, "--prompts", str(prompts), "-n", "6", "--json")
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    path = profile_path(str(target_path), draft_path)
    assert path is not None
    assert told["profile"] == str(path)
    assert dict(load_profile(path).settings) == told["settings"]
    best = [one for one in told["tried"] if one["tokens_per_second"] == told["tokens_per_second"]]
    assert any(one["drafter"] == told["settings"]["drafter"] for one in best)
    assert told["speedup"] > 0
    every = {"none", "suffix", "model", "auto"}
    assert (
        every <= {one["drafter"] for one in told["tried"]} <= every | {"tree", "lookahead"}
    )  # these where rows are cheap
    assert {one["model"] for one in told["tried"]} == {told["model"]} == {str(target_path)}
    assert [one["profile"] for one in told["weights"]] == [told["profile"]]

    assert "| tuned |" in run("generate", *pair, "-p", "hello", "-n", "2").stderr
    after = run("generate", *pair, "-p", "hello", "-n", "2", "-v")
    assert f"profile {path.stem}" in after.stderr
    assert f"drafter {told['settings']['drafter']}" in after.stderr
    assert "profile" not in run("generate", *pair, "-p", "hello", "-n", "2", "-v", "--no-profile").stderr
    assert run("tune", *pair, "--forget").stdout == f"removed: profile {path.stem}\n"
    assert "profile" not in run("generate", *pair, "-p", "hello", "-n", "2", "-v").stderr
    assert "nothing to forget" in run("tune", *pair, "--forget").stderr


@pytest.mark.usefixtures("gains")
def test_a_person_gets_a_table(target_path, prompts):
    engine = ("--engine", "llamacpp")
    result = run("tune", str(target_path), *engine, "--prompts", str(prompts), "--drafter", "ngram", "-n", "4")
    assert result.exit_code == 0, result.output
    for said in (
        "tokens/s",
        "speedup",
        "accepted",
        "llamacpp",
        "none",
        "best: engine llamacpp",
        "of the default settings (error 0.01), kept: ",
    ):
        assert said in result.stdout
    assert "suffix" not in result.stdout
    assert "weights" not in result.stdout


def test_engines_of_a_pair_are_compared_and_may_differ_in_text(prompts):
    pytest.importorskip("onnxruntime")
    if not (DEMO / "manifest.toml").is_file():
        pytest.skip("the demo family is not here")
    arguments = ["tune", "demo", "--prompts", str(prompts), "--drafter", "ngram", "--draft-length", "2", "-n", "3"]
    arguments += ["--reproducible"]
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    assert "reproducible per engine" in " ".join(result.stderr.split())
    tried = json.loads(result.stdout)["tried"]
    assert {one["engine"] for one in tried} == {"llamacpp", "onnx"}
    assert any(one["reproducible"] is False and one["drafter"] == "none" for one in tried)  # padding is no baseline
    one = run(*arguments, "--engine", "onnx", "--json")
    assert {tried["engine"] for tried in json.loads(one.stdout)["tried"]} == {"onnx"}
    assert "per engine" not in one.stderr


@pytest.mark.usefixtures("gains")
def test_other_weights_take_turns_and_keep_their_own_profile(target_path, prompts):
    if not MEDIUM.is_file():
        pytest.skip("the demo family is not here")
    arguments = ["tune", str(target_path), "--weights", str(MEDIUM), "--drafter", "ngram", "-n", "4"]
    result = run(*arguments, "--prompts", str(prompts), "--json")
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert told["model"] == str(target_path)
    models = {str(target_path), str(MEDIUM)}
    assert {one["model"] for one in told["tried"]} == {one["model"] for one in told["weights"]} == models
    rates = [one["tokens_per_second"] for one in told["weights"]]
    assert rates == sorted(rates, reverse=True)
    for one in told["weights"]:
        path = profile_path(one["model"])
        assert one["profile"] == str(path)
        assert dict(load_profile(path).settings) == one["settings"]
        plain = [row for row in told["tried"] if row["model"] == one["model"] and row["drafter"] == "none"]
        assert max(row["speedup"] for row in plain) == pytest.approx(1.0)
    assert run("tune", str(target_path), "--weights", str(MEDIUM), "--forget").stdout.count("removed: ") == 2

    shown = run(*arguments, "--prompts", str(prompts))
    said = " ".join(shown.stdout.split())
    first, second = (Path(one["model"]).name for one in told["weights"])
    for wanted in ("weights engine", f"best for {first}: engine", f"best for {second}: engine"):
        assert wanted in said
    assert "write other texts" in said and "fastest weights: " in said


@pytest.mark.parametrize(
    ("models", "labels", "short"),
    [
        (["a/it-q4_0.gguf", "b/it-q8_0.gguf"], ["it-q4_0.gguf", "it-q8_0.gguf"], ["q4_0", "q8_0"]),
        (["x/int4/model.onnx", "x/int8/model.onnx"], ["x/int4/model.onnx", "x/int8/model.onnx"], ["int4", "int8"]),
        (["demo", "x/demo-q4.gguf"], ["demo", "demo-q4.gguf"], ["demo", "demo-q4.gguf"]),
        (["it.gguf", "it-q4.gguf"], ["it.gguf", "it-q4.gguf"], ["it", "it-q4"]),
        (["it-q4.gguf"], ["it-q4.gguf"], ["it-q4.gguf"]),
    ],
)
def test_weights_have_short_distinct_labels(models, labels, short):
    assert list(_labels(models).values()) == labels
    assert list(_short(_labels(models)).values()) == short


def test_other_weights_are_of_the_same_model(target_path, tiny_path, tmp_path):
    for weights, said in (
        (tiny_path, f"{target_path} and {tiny_path} are different models: token "),
        (target_path, "were already given"),
        (tmp_path / "none.gguf", "none.gguf"),
    ):
        result = run("tune", str(target_path), "--weights", str(weights), "--drafter", "none", "-n", "2")
        assert result.exit_code == 2, result.output
        line = result.stderr.splitlines()[-1]
        assert line.startswith("error: ") and said in line
        assert not profile_path(str(target_path)).is_file()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--prompts", "nowhere.jsonl"], "nowhere.jsonl"),
        (["--max-prompts", "1"], "--max-prompts must be at least 2"),
        (["-n", "1"], "--max-tokens must be at least 2"),
        (["--ctx-size", "16"], "give a larger --ctx-size"),
        (["--engine", "onnx", "-ngl", "1"], "its layers go to the GPU"),
        (["--drafter", "model"], "needs a draft model"),
        (["--temp", "-1"], "temperature"),
    ],
)
def test_bad_input_is_one_line(target_path, arguments, said):
    result = run("tune", str(target_path), *arguments)
    assert result.exit_code == 2, result.output
    line = result.stderr.splitlines()[-1]
    assert line.startswith("error: ")
    assert said in line
    assert result.stdout == ""
    assert profile_path(str(target_path)) is not None
    assert not profile_path(str(target_path)).is_file()


@pytest.mark.skipif(sys.platform == "win32", reason="Windows cannot send such a signal to one child")
def test_an_interrupt_writes_no_profile(target_path):
    arguments = [sys.executable, "-m", "edgespec", "tune", str(target_path), "-n", "1000", "--max-prompts", "8"]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(arguments, preexec_fn=heed_interrupts, **pipes) as process:
        assert process.stderr is not None
        while "settings, at most" not in process.stderr.readline():
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        output, said = process.communicate(timeout=120)
    assert process.returncode == 130, said
    assert "no profile is written" in said
    assert "Traceback" not in said
    assert "tokens/s" in output
    assert not profile_path(str(target_path)).is_file()
