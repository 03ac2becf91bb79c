"""`edgespec bench` and `edgespec race` on the demo pair: output, sweep, explanation, refused input, interruptions."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import command_line
from command_line import POSIX, Terminal, refusal
from edgespec.bench.prompts import built_in
from edgespec.cli.race import OTHER_COLOUR, Lap, Mark, coloured, legend, panels
from edgespec.reports import TokenEvent

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


def test_the_table_and_the_notes_of_the_built_in_prompts(pair, prompts, monkeypatch):
    drawn, known = prompts.with_suffix(".svg"), built_in()
    monkeypatch.setattr("edgespec.cli.bench.built_in", lambda: {name: known[name] for name in ("prose", "copying")})
    result = run(*pair, *QUICK, "--reproducible", "--plot", str(drawn))
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0].split()[:2] == ["domain", "runs"]
    assert [line.split()[0] for line in lines[1:5]] == ["prose", "copying", "random_text", "all"]
    assert "identical to plain decoding in the same mode, 8 of 8 prompts" in result.stdout
    assert sum(" -> " in line for line in result.stderr.splitlines()) == 8
    picture = drawn.read_text(encoding="utf-8").replace("&#160;", " ")
    assert picture.startswith("<svg") and "identical to plain decoding" in picture


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


# -- a race: both sides decode the same text, each alone, and what is said of them follows from what was measured


FIXED = ("--reproducible", "-n", "24", "--drafter", "model", "--draft-length", "4", "--seed", "7")


race = partial(command_line.run, "race")


def lap(drafters: list[str | None], token_s: float = 0.1) -> Lap:
    """A made-up lap: one token every `token_s`, the first with the prompt at 1 s."""
    events = [TokenEvent(i, f"t{i} ", i, drafter) for i, drafter in enumerate(drafters)]
    return Lap("plain", [Mark(event, 1.0 + i * token_s) for i, event in enumerate(events)], is_done=True)


# the picture


def test_tokens_have_the_colour_of_their_drafter_and_are_counted() -> None:
    marks = lap([None, *(["model"] * 3 + [None]) * 3]).marks
    assert legend(marks).plain == "tokens: 4 the target's own, 9 drafted by model"
    text = coloured(lap([None, "model", "ngram", "suffix", "medusa"]).marks)
    styles = {text.plain[span.start : span.end].strip(): span.style for span in text.spans}
    assert styles == {"t1": "cyan", "t2": "yellow", "t3": "magenta", "t4": OTHER_COLOUR}
    hostile = Mark(TokenEvent(0, "a\x1b[2Jb\r", 0, None), 0.0)
    assert coloured([hostile]).plain == "a\N{REPLACEMENT CHARACTER}[2Jb\N{REPLACEMENT CHARACTER}"


@pytest.mark.parametrize("columns", [200, 80, 40])
def test_panels_fit_the_terminal_and_show_the_end_of_a_long_text(columns: int) -> None:
    side = lap([None, *["model", None] * 400], 0.01)
    console = Console(width=columns, height=24, file=io.StringIO(), force_terminal=True)
    lines = console.render_lines(panels([side, side], 99.0, columns, lines=6), pad=False)
    shown = ["".join(segment.text for segment in line) for line in lines]
    assert all(len(line) <= columns for line in shown)
    assert "t800" in "".join(shown) and "t0 " not in "".join(shown)
    assert len(shown) == 8 + 1


# the command


def test_through_a_pipe_there_are_no_control_codes() -> None:
    result = race(*FIXED)
    assert result.exit_code == 0, result.output
    _, _, below = result.stdout.partition("tokens: ")
    legend, *said, end = below.splitlines()
    assert "the target's own" in legend and "speculative" in result.stdout
    assert re.match(r"\d+\.\d\dx: ", said[0]) and "identical" in said[1]
    assert "draft tokens accepted" in said[2] and "a pass over" in said[3] and "noise" in end
    assert "\x1b" not in result.stdout and "seed 7" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["demo", "--drafter", "none"], "--drafter none"),
        (["demo", "-p", " "], "the prompt is empty"),
        (["demo", "-s", "Be brief.", "--no-chat-template"], "--system needs the chat template"),
        (["demo", "--raw"], "no such option"),
    ],
)
def test_a_bad_race_is_one_line(arguments: list[str], said: str) -> None:
    refusal(race(*arguments), said)


def test_the_finish_is_drawn(tmp_path: Path) -> None:
    picture = tmp_path / "race.svg"
    result = race("demo", "-n", "24", "--drafter", "model", "--draft-length", "4", "--svg", str(picture))
    assert result.exit_code == 0, result.output
    drawn = picture.read_text(encoding="utf-8").replace("&#160;", " ")
    assert drawn.startswith("<svg") and len(drawn) < 60_000 and "font-face" not in drawn
    assert set(re.findall(r"https?://[^\"' )]+", drawn)) == {"http://www.w3.org/2000/svg", "https://www.textualize.io"}
    assert "identical to plain decoding" in drawn
    assert "drafted by model" in drawn
    assert list(tmp_path.iterdir()) == [picture]


# the terminal


def race_seen(*arguments: str, **environ: str) -> tuple[int, str]:
    """The exit code and all that appears."""
    with Terminal("race", *arguments, size=(80, 24), **environ) as terminal:
        shown = terminal.rest()
        return terminal.process.returncode, shown


@POSIX
def test_a_terminal_sees_the_race_and_keeps_the_result() -> None:
    code, shown = race_seen("demo", "-n", "24", "--drafter", "model", "--draft-length", "4", "--seed", "7")
    assert code == 0
    assert shown.count("\x1b[?1049h") == shown.count("\x1b[?1049l") == 1  # the other screen, and back
    live, kept = shown.split("\x1b[?1049l")
    assert "each side runs alone" in live
    assert "identical to plain decoding" in kept
    assert "\x1b[36m" in kept  # cyan


@POSIX
def test_no_colour_and_a_dumb_terminal_are_heeded() -> None:
    code, shown = race_seen("demo", "-n", "8", NO_COLOR="1")
    assert code == 0
    assert not re.search(r"\x1b\[[0-9;]*3[0-7]m", shown)
    code, shown = race_seen("demo", "--reproducible", "-n", "8", TERM="dumb")
    assert code == 0
    assert "\x1b[?" not in shown
    assert "speculative" in shown and "identical to plain decoding" in shown


@POSIX
def test_an_interrupt_gives_the_terminal_back() -> None:
    with Terminal("race", "demo", "-n", "2000", "--ignore-eos", size=(80, 24)) as terminal:
        begun = terminal.wait_for(" plain ")
        terminal.type("\x03")
        shown = begun + terminal.rest()
        assert terminal.process.returncode == 130
    assert shown.count("\x1b[?1049h") == shown.count("\x1b[?1049l") == 1
    assert shown.count("\x1b[?25l") == shown.count("\x1b[?25h")  # the cursor is back
    kept = shown.split("\x1b[?1049l")[1]
    assert "stopped before the end" in kept
    assert "Traceback" not in shown and "identical" not in shown
