"""`edgespec bench` on the demo pair: output, sweep and explanation, refused input, an interruption."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from functools import partial
from typing import Any

import pytest

import command_line
from command_line import refusal

KEYS = {
    *("format", "edgespec", "model", "engine", "device", "threads", "context_length", "drafter", "draft_length"),
    *("max_slowdown", "verify", "reproducible", "temperature", "top_k", "top_p", "min_p", "seed"),
    *("max_tokens", "ignore_eos", "complete", "num_trials", "num_planned_trials", "num_prompts", "num_identical"),
    *("total", "domains"),
}
FIGURES = {
    *("num_trials", "verdict", "speedup", "whole_answer_speedup", "noise", "acceptance_rate"),
    *("mean_accepted_length", "standard", "speculative"),
}
SIDE = {"tokens_per_second", "pooled_tokens_per_second", "num_tokens", "time"}
QUICK = ["-n", "10", "--repeat", "1", "--temp", "0"]


run = partial(command_line.run, "bench")
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("Find me a bus to Fresno.\ndef add(a, b):\n")
    return path


def report(*arguments: str) -> dict[str, Any]:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.stderr
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_json_is_one_object_with_exactly_the_promised_keys(pair, prompts):
    found = report(*pair, *QUICK, "--prompts", str(prompts), "--drafter", "model", "--draft-length", "3")
    assert set(found) == KEYS
    assert set(found["domains"]) == {"prompts"}
    for figures in (found["total"], *found["domains"].values()):
        assert set(figures) == FIGURES
        assert set(figures["standard"]) == set(figures["speculative"]) == SIDE
    assert found["complete"]
    assert found["num_identical"] == found["num_prompts"] == 2
    assert found["seed"] == 0
    assert found["total"]["acceptance_rate"] is not None


def test_the_table_and_the_notes(pair, prompts):
    drawn = prompts.with_suffix(".svg")
    result = run(*pair, *QUICK, "--domain", "prose", "--domain", "copying", "--reproducible", "--plot", str(drawn))
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0].split()[:2] == ["domain", "runs"]
    assert [line.split()[0] for line in lines[1:4]] == ["prose", "copying", "all"]
    assert "identical to plain decoding in the same mode, 4 of 4 prompts" in result.stdout
    assert sum(" -> " in line for line in result.stderr.splitlines()) == 4
    picture = drawn.read_text(encoding="utf-8").replace("&#160;", " ")
    assert picture.startswith("<svg") and "identical to plain decoding" in picture


def test_the_built_in_prompts_and_synthetic_domains(pair):
    found = report(*pair, *QUICK, "-n", "3", "--domain", "prose", "--domain", "random_text")
    assert set(found["domains"]) == {"prose", "random_text"}


def test_prompts_that_do_not_fit_are_reported(pair, tmp_path):
    path = tmp_path / "p.txt"
    path.write_text("short\n" + "long " * 300 + "\n")
    result = run(*pair, *QUICK, "-c", "128", "--prompts", str(path), "--json")
    assert "left out: 1 prompts" in result.stderr
    assert json.loads(result.stdout)["num_prompts"] == 1


def test_a_sweep_shows_the_best_fixed_setting_beside_auto(pair, prompts):
    arguments = [*pair, "-n", "10", "--temp", "0", "--prompts", str(prompts), "--sweep"]
    result = run(*arguments)
    assert result.exit_code == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0].split()[:2] == ["domain", "plain"]
    assert lines[1].split()[0] == "prompts"
    assert any(line.split() == ["draft", "length", "1", "2", "4", "8", "12"] for line in lines)
    swept = report(*arguments)["sweep"]
    assert set(swept) == {"prompts", "all"}
    settings = swept["all"]["settings"]
    assert [one["draft_length"] for one in settings[:2]] == ["auto", "auto"]  # plain decoding and auto
    assert {one["draft_length"] for one in settings[2:]} == {1, 2, 4, 8, 12}
    fixed = [one for one in settings if one["draft_length"] != "auto" or one["drafter"] == "none"]
    best = max(fixed, key=lambda one: one["speedup"])
    assert swept["all"]["best"] == {"drafter": best["drafter"], "draft_length": best["draft_length"]}


@pytest.mark.parametrize("sweep", [["--draft-length", "4"], ["--sweep"]])
def test_an_explanation_says_what_to_expect_and_why(pair, prompts, sweep):
    arguments = [*pair, *QUICK, *sweep, "--prompts", str(prompts), "--explain", "--drafter", "model"]
    result = run(*arguments)
    assert result.exit_code == 0, result.stderr
    assert result.stdout.startswith("domain ") and "expected" in result.stdout
    assert "a round emitted" in result.stdout and "on this machine a pass over" in result.stdout
    assert "expected speedup" in result.stdout.splitlines()[-1]
    explained = report(*arguments)["explain"]
    assert 0 < explained["acceptance"] <= 1 and list(explained["expected"]) == ["1", "2", "4", "8", "12"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--drafter", "none"], "drafter none (the command line) turns speculation off"),
        (["--draft-length", "0"], "draft-length 0"),
        (["--prompts", "nowhere.txt"], "nowhere.txt' cannot be read"),
        (["--domain", "dialog"], "did you mean 'dialogue'"),
        (["--sweep", "--plot", "x.svg"], "leave --sweep out"),
        (["--plot", "x.png"], "must end in .svg"),
        (["--plot", "nowhere/x.svg"], "does not exist"),
        (["--repeat", "0"], "0 is not in the range"),
        (["--temp", "-1"], "--temp"),
        (["--repaet", "2"], "did you mean '--repeat'"),
    ],
)
def test_bad_input_is_one_line(pair, arguments, said):
    refusal(run(*pair, *arguments), said, beside="demo-target-q8_0 | ")


@pytest.mark.skipif(os.name == "nt", reason="Windows cannot send such a signal to one child")
def test_an_interrupted_run_prints_what_is_done(pair, prompts):
    arguments = [*pair, "-n", "24", "--repeat", "500", "--temp", "0", "--prompts", str(prompts), "--json"]
    command = [sys.executable, "-m", "edgespec", "bench", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        while " -> " not in process.stderr.readline():
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    assert "of 1000 runs are shown" in err and "Traceback" not in err
    part = json.loads(out)
    assert not part["complete"] and 0 < part["num_trials"] < 1000
