"""`edgespec bench` on the demo pair: output, refused input, resuming after an interruption."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from typing import Any

import pytest
from click.testing import CliRunner, Result

import edgespec
from edgespec.bench.runner import needs_second_model
from edgespec.cli.main import cli
from edgespec.installation import install_command
from edgespec.platform.disk_cache import cache_folder
from waiting import until

KEYS = {
    *("format", "edgespec", "model", "engine", "device", "threads", "context_length", "drafter", "draft_length"),
    *("max_slowdown", "verify", "reproducible", "baseline", "temperature", "top_k", "top_p", "min_p", "seed"),
    *("max_tokens", "ignore_eos", "complete", "num_trials", "num_planned_trials", "num_prompts", "num_identical"),
    *("num_as_standard", "padded_plain_speedup", "total", "domains", "drafters", "reliability", "memory", "prompts"),
    *("acceptance_by_position", "accepted_lengths", "cost_curve", "observed_passes", "standard_pass_s"),
    "draft_token_s",
}
FIGURES = {
    *("num_trials", "verdict", "speedup", "pooled_speedup", "whole_answer_speedup", "noise", "acceptance_rate"),
    *("mean_accepted_length", "standard", "speculative"),
}
SIDE = {"tokens_per_second", "pooled_tokens_per_second", "num_tokens", "time", "joules_per_token"}
PROMPT = {"domain", "text", "num_turns", "temperature", "num_prompt_tokens", "finish_reason", "identical", "pieces"}
QUICK = ["-n", "10", "--repeat", "1", "--temp", "0"]


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    lines = [{"domain": "dialogue", "text": "Find me a bus to Fresno."}, {"domain": "code", "text": "def add(a, b):"}]
    path.write_text("\n".join(json.dumps(line) for line in lines))
    return path


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["bench", *arguments])


def assert_refused(result: Result, *said: str) -> None:
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    for text in said:
        assert text in line


def report(*arguments: str) -> dict[str, Any]:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.stderr
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_json_is_one_object_with_exactly_the_promised_keys(pair, prompts):
    found = report(*pair, *QUICK, "--prompts", str(prompts), "--drafter", "model", "--draft-length", "3")
    assert set(found) == KEYS
    assert set(found["domains"]) == {"dialogue", "code"}
    for figures in (found["total"], *found["domains"].values()):
        assert set(figures) == FIGURES
        assert set(figures["standard"]) == set(figures["speculative"]) == SIDE
    assert all(set(prompt) == PROMPT | FIGURES for prompt in found["prompts"])
    assert found["complete"]
    assert found["num_identical"] == found["num_prompts"] == 2
    assert found["seed"] == 0
    assert found["drafters"]["model"]["drafted_tokens"] > 0


def test_the_standard_is_the_fastest_plain_decoding(prompts):
    """The reproducible mode pads a lone token of the ONNX export where the kernel for one row differs."""
    with edgespec.load("demo", engine="onnx", drafter="ngram", reproducible=True, threads=1) as model:
        is_padded = needs_second_model(model)
        assert is_padded == (model.target.facts.pinned_class[0] > 1)
    arguments = ["demo", "--engine", "onnx", *QUICK, "--prompts", str(prompts), "--domain", "code"]
    padded, free = (report(*arguments, mode) for mode in ("--reproducible", "--no-reproducible"))
    assert padded["memory"]["num_target_copies"] == 1 + is_padded
    assert ("second copy" in padded["baseline"]) == is_padded
    assert (padded["padded_plain_speedup"] is not None) == is_padded
    assert padded["num_identical"] == 1
    assert free["memory"]["num_target_copies"] == 1
    assert free["padded_plain_speedup"] is None


def test_the_table_and_the_notes(pair, prompts, tmp_path):
    page = tmp_path / "page.html"
    result = run(*pair, *QUICK, "--prompts", str(prompts), "--html", str(page), "--reproducible")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0].split()[:2] == ["domain", "runs"]
    assert [line.split()[0] for line in lines[1:4]] == ["dialogue", "code", "all"]
    assert "identical to plain decoding in the same mode, 2 of 2 prompts" in result.stdout
    assert sum(" -> " in line for line in result.stderr.splitlines()) == 2
    assert "Find me a bus to Fresno." in page.read_text()


def test_the_built_in_prompts_and_synthetic_domains(pair):
    found = report(*pair, *QUICK, "-n", "3", "--domain", "prose", "--domain", "random_text", "--per-domain", "1")
    assert set(found["domains"]) == {"prose", "random_text"}
    again = report(*pair, *QUICK, "-n", "3", "--domain", "random_text", "--per-domain", "1")
    other = report(*pair, *QUICK, "-n", "3", "--domain", "random_text", "--per-domain", "1", "--seed", "1")
    texts = [one["prompts"][-1]["text"] for one in (found, again, other)]
    assert texts[0] == texts[1] != texts[2]


def test_data_of_a_folder(pair, corpus_folder):
    result = report(*pair, *QUICK, "--data", str(corpus_folder), "--domain", "arithmetic", "--per-domain", "2")
    assert [prompt["domain"] for prompt in result["prompts"]] == ["arithmetic"] * 2


def test_a_domain_of_the_users_own_stays_theirs(pair, tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('{"domain": "copying", "text": "say it again"}\n')
    found = report(*pair, *QUICK, "-n", "2", "--prompts", str(path))
    assert [prompt["text"] for prompt in found["prompts"]] == ["say it again"]
    made = report(*pair, *QUICK, "-n", "2", "--prompts", str(path), "--domain", "high_entropy")
    assert [(p["text"], p["temperature"]) for p in made["prompts"]] == [("say it again", 1.5)]


def test_prompts_that_do_not_fit_are_reported(pair, tmp_path):
    path = tmp_path / "p.txt"
    path.write_text("short\n" + "long " * 300 + "\n")
    result = run(*pair, *QUICK, "-c", "128", "--prompts", str(path), "--json")
    assert "left out: 1 prompts" in result.stderr
    assert json.loads(result.stdout)["num_prompts"] == 1


def test_a_kept_journal_is_resumed_and_repeats_are_added(pair, prompts, tmp_path):
    arguments = [*pair, *QUICK, "--prompts", str(prompts), "--resume", str(tmp_path / "run.jsonl")]
    first = report(*arguments)
    lines = (tmp_path / "run.jsonl").read_bytes()
    again = run(*arguments, "--json")
    assert "2 of 2 are already done" in again.stderr
    assert json.loads(again.stdout)["total"] == first["total"]
    assert (tmp_path / "run.jsonl").read_bytes() == lines
    more = report(*arguments, "--repeat", "2")
    assert more["total"]["num_trials"] == 4
    assert (tmp_path / "run.jsonl").read_bytes().startswith(lines)
    assert_refused(run(*arguments, "-n", "11"), "has other settings (max_tokens)", "--restart")
    assert_refused(run(*arguments, "--repeat-penalty", "1.8"), "has other settings (sampling)", "--restart")
    assert_refused(run(*arguments, "--draft-temp", "1.2"), "has other settings (load)", "--restart")
    assert report(*arguments, "-n", "11", "--restart")["num_trials"] == 2


def test_a_finished_run_without_a_journal_measures_again(pair, prompts):
    arguments = [*pair, *QUICK, "--prompts", str(prompts), "--domain", "code"]
    report(*arguments)
    assert list((cache_folder() / "bench").iterdir()) == []
    assert "already done" not in run(*arguments, "--json").stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--drafter", "none"], "drafter none (the command line) turns speculation off"),
        (["--draft-length", "0"], "draft-length 0"),
        (["--prompts", "nowhere.txt"], "nowhere.txt cannot be read"),
        (["--data", "nowhere"], "nowhere holds none of"),
        (["--data", "a", "--prompts", "b"], "keep one"),
        (["--domain", "dialog"], "did you mean 'dialogue'"),
        (["--html", "no/where/page.html"], "its folder does not exist"),
        (["--repeat", "0"], "0 is not in the range"),
        (["--per-domain", "x"], "'x' is not a valid integer"),
        (["--temp", "-1"], "temperature"),
        (["--repaet", "2"], "did you mean '--repeat'"),
    ],
)
def test_bad_input_is_one_line(pair, arguments, said):
    assert_refused(run(*pair, *arguments), said)


def test_a_bad_line_of_prompts_is_named(pair, tmp_path):
    (tmp_path / "p.jsonl").write_text('{"text": "a"}\n{"text": }\n')
    assert_refused(run(*pair, "--prompts", str(tmp_path / "p.jsonl")), "p.jsonl line 2 is not JSON")


def test_missing_matplotlib_names_the_extra(pair, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert_refused(run(*pair, "--plot", str(tmp_path / "plots")), install_command("bench"))
    assert not (tmp_path / "plots").exists()


@pytest.mark.skipif(os.name == "nt", reason="Windows cannot send such a signal to one child")
def test_an_interrupted_run_prints_what_is_done_and_goes_on(pair, prompts, tmp_path):
    journal = tmp_path / "run.jsonl"
    arguments = [
        *pair,
        "-n",
        "24",
        "--repeat",
        "60",
        "--temp",
        "0",
        "--prompts",
        str(prompts),
        "--resume",
        str(journal),
    ]
    command = [sys.executable, "-m", "edgespec", "bench", *arguments, "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        until(lambda: journal.exists() and journal.read_bytes().count(b"\n") >= 3, 120, process)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    assert "the same command continues" in err
    assert "Traceback" not in err
    part = json.loads(out)
    assert not part["complete"]
    lines = journal.read_text().splitlines()
    assert part["num_trials"] == len(lines) - 1 < 120
    assert all(json.loads(line) for line in lines)
    whole = json.loads(run(*arguments, "--repeat", "1", "--json").stdout)
    assert whole["complete"]
    assert journal.read_text().splitlines()[: len(lines)] == lines


@pytest.mark.skipif(os.name == "nt", reason="Windows cannot send such a signal to one child")
def test_a_killed_run_goes_on(pair, prompts, tmp_path):
    journal = tmp_path / "run.jsonl"
    arguments = [*pair, "-n", "24", "--temp", "0", "--prompts", str(prompts), "--resume", str(journal)]
    command = [sys.executable, "-m", "edgespec", "bench", *arguments, "--repeat", "60"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        until(lambda: journal.exists() and journal.read_bytes().count(b"\n") >= 3, 120, process)
        process.kill()
    result = run(*arguments, "--repeat", "1", "--json")
    assert "2 of 2 are already done" in result.stderr
    assert json.loads(result.stdout)["complete"]
