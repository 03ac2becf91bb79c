"""Tuning: bad settings go early, the baseline stays, and the best one is what later runs use."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys

import pytest
from click.testing import CliRunner, Result
from conftest import DEMO

from edgespec.cli.main import cli
from edgespec.config import LoadOptions
from edgespec.profiles import load_profile, profile_path
from edgespec.sampling import Sampling
from edgespec.tuning.sweep import LENGTHS, Asked, Candidate, Loaded, Score, Sweep, prepare, thread_counts
from edgespec.types import Stats

HERE, PLAIN_MODE = Loaded("llamacpp", 1, None), Loaded("llamacpp", 1, False)
PLAIN, UNPADDED = Candidate(HERE, "none", "auto"), Candidate(PLAIN_MODE, "none", "auto")
AUTO = Candidate(HERE, "auto", "auto")
TRIED = [Candidate(HERE, "ngram", length) for length in (1, 2, 3, 4, 5, 6)]


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    monkeypatch.setenv("EDGESPEC_THREADS", "1")


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
    asked = Asked(LoadOptions(), frozenset(), Sampling(), 11)
    found = Sweep(asked, {"llamacpp": [[1]] * num_prompts}, {c: Score(c) for c in rates})
    for candidate, rate in rates.items():
        for prompt in range(num_prompts):
            found.scores[candidate].add(prompt, Stats(new_tokens=11, wall_s=10 / rate))
        found.scores[candidate].rounds = 1
    return found


def test_the_best_go_on_and_the_baselines_stay():
    rates = {PLAIN: 1.0, UNPADDED: 2.0, AUTO: 3.0} | {c: 10.0 + i for i, c in enumerate(TRIED)}
    found = sweep_of(rates)
    assert found._survivors(list(rates), range(4)) == [PLAIN, UNPADDED, AUTO, *TRIED[-4:]]


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


def test_the_best_keeps_the_promise_and_prefers_what_adapts():
    assert sweep_of({PLAIN: 10.0, UNPADDED: 20.0, TRIED[0]: 12.0}).best().candidate == TRIED[0]
    assert sweep_of({PLAIN: 10.0, AUTO: 11.9, TRIED[0]: 12.0}).best().candidate == AUTO
    assert sweep_of({PLAIN: 10.0, AUTO: 11.0, TRIED[0]: 12.0}).best().candidate == TRIED[0]


def test_what_is_tried(target_path, draft_path):
    options = LoadOptions(model=str(target_path), draft=draft_path, threads=1)
    asked = Asked(options, frozenset({"threads"}), Sampling(), 4)
    tried = list(prepare(asked, ["llamacpp"], lambda model: [[1, 2]]).scores)
    for drafter in ("ngram", "model"):
        assert [c.draft_length for c in tried if c.drafter == drafter] == list(LENGTHS)
    assert [c.draft_length for c in tried if c.drafter == "auto"] == ["auto"]
    assert {c.loaded.threads for c in tried} == {1}
    fixed = Asked(options, frozenset({"threads", "drafter", "draft_length"}), Sampling(), 4)
    tried = list(prepare(fixed, ["llamacpp"], lambda model: [[1, 2]]).scores)
    assert {(c.drafter, c.draft_length) for c in tried} == {("none", "auto"), ("auto", "auto")}


@pytest.mark.parametrize(
    ("usual", "counts"), [(1, [1]), (2, [1, 2]), (4, [1, 2, 3, 4]), (6, [1, 2, 4, 6]), (16, [1, 2, 4, 8, 16])]
)
def test_threads_go_up_to_the_cores_unless_they_are_fixed(usual, counts):
    options = LoadOptions()
    assert thread_counts(Asked(options, frozenset(), Sampling(), 4), usual) == counts
    assert thread_counts(Asked(options, frozenset({"threads"}), Sampling(), 4), usual) == [usual]


def test_no_more_is_decoded_than_was_announced(target_path, draft_path, prompts):
    options = LoadOptions(model=str(target_path), draft=draft_path, threads=1)
    asked = Asked(options, frozenset({"threads"}), Sampling(temperature=0.0), 3)
    sweep = prepare(asked, ["llamacpp"], lambda model: [model.encode(text) for text in ("ab", "cd", "ef")])
    done: list[int] = []
    sweep.advance = done.append
    sweep.run()
    assert len(sweep.scores) < sum(done) <= sweep.num_runs()
    finalists = sweep.finalists()
    assert 0 < len(finalists) < len(sweep.scores)
    assert all(set(score.seconds) == {0, 1, 2} for score in finalists)
    assert any(score.candidate.is_plain for score in finalists)


# the command


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
    assert {one["drafter"] for one in told["tried"]} == {"none", "ngram", "suffix", "cache", "model", "auto"}

    after = run("generate", *pair, "-p", "hello", "-n", "2")
    assert f"profile {path.stem}" in after.stderr
    assert f"drafter {told['settings']['drafter']}" in after.stderr
    assert "profile" not in run("generate", *pair, "-p", "hello", "-n", "2", "--no-profile").stderr
    assert run("tune", *pair, "--forget").stdout == f"removed: profile {path.stem}\n"
    assert "profile" not in run("generate", *pair, "-p", "hello", "-n", "2").stderr
    assert "nothing to forget" in run("tune", *pair, "--forget").stderr


def test_a_person_gets_a_table(target_path, prompts):
    result = run("tune", str(target_path), "--prompts", str(prompts), "--drafter", "ngram", "-n", "4")
    assert result.exit_code == 0, result.output
    for said in ("tokens/s", "speedup", "accepted", "llamacpp", "none", "best: engine llamacpp", "kept: "):
        assert said in result.stdout
    assert "suffix" not in result.stdout


def test_engines_of_a_pair_are_compared_and_may_differ_in_text(prompts):
    pytest.importorskip("onnxruntime")
    if not (DEMO / "manifest.toml").is_file():
        pytest.skip("the demo family is not here")
    arguments = ["tune", "demo", "--prompts", str(prompts), "--drafter", "ngram", "--draft-length", "2", "-n", "3"]
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    assert "reproducible per engine" in " ".join(result.stderr.split())
    tried = json.loads(result.stdout)["tried"]
    assert {one["engine"] for one in tried} == {"llamacpp", "onnx"}
    assert any(one["reproducible"] is False and one["drafter"] == "none" for one in tried)  # padding is no baseline
    one = run(*arguments, "--engine", "onnx", "--json")
    assert {tried["engine"] for tried in json.loads(one.stdout)["tried"]} == {"onnx"}
    assert "per engine" not in one.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--prompts", "nowhere.jsonl"], "nowhere.jsonl"),
        (["--max-prompts", "1"], "--max-prompts must be at least 2"),
        (["-n", "1"], "--max-tokens must be at least 2"),
        (["--ctx-size", "16"], "give a larger --ctx-size"),
        (["--engine", "onnx"], "which 'onnx' cannot run"),
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


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
def test_an_interrupt_writes_no_profile(target_path):
    arguments = [sys.executable, "-m", "edgespec", "tune", str(target_path), "-n", "1000", "--max-prompts", "8"]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
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
