"""What a new user meets: help on one screen, one line before an answer, errors that name the next command."""

from __future__ import annotations

import shutil
import time

import pytest

from command_line import run
from edgespec.cli.session import length_note
from edgespec.cli.terminal import waiting
from edgespec.config.options import SETTINGS, GenerateOptions
from edgespec.reports import Stats
from tiny_gguf import Shape, write_model

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def model(target_path, draft_path):
    return ["-m", str(target_path), "-md", str(draft_path), "--seed", "1", "-n", "8"]


@pytest.fixture(scope="module")
def base_path(tmp_path_factory):
    """A model without a chat template."""
    return write_model(tmp_path_factory.mktemp("base") / "base.gguf", Shape(has_template=False))


# help


@pytest.mark.parametrize("name", ["chat", "generate"])
def test_help_fits_on_a_screen_and_help_all_has_everything(name, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    lines = run(name, "--help").stdout.splitlines()
    assert 24 <= len(lines) <= 40
    assert max(map(len, lines)) <= 80
    for title in ("Model:", "Hardware:", "Speculation:", "Answer:", "Output:"):
        assert title in lines
    everything = run(name, "--help-all").stdout
    for setting in (setting for setting in SETTINGS if setting.part != "serve"):
        is_refused = name == "chat" and setting.name == "chat_template"
        flags = [f"--[no-]{setting.key}"] if setting.kind == "switch" else setting.flags
        assert all((flag in everything) is not is_refused for flag in flags)
    assert len(everything.splitlines()) > 60


# beside an answer


def test_one_line_comes_before_an_answer_more_with_verbose_none_with_quiet(model, monkeypatch, tmp_path):
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path))  # a first run, which has most to say
    (line,) = run("generate", *model, "-p", "hello", "--ignore-eos", "-n", "64").stderr.splitlines()[:-1]
    assert line == "demo-target-q8_0 on edgespec's kernels"
    shutil.rmtree(tmp_path / "cache")
    verbose = run("generate", *model, "-p", "hello", "-v").stderr
    assert "context" in verbose and verbose.count("\n") >= line.count("\n")
    quiet = run("generate", *model, "-p", "hello", "-q")
    assert quiet.stderr == "" and quiet.stdout
    both = run("generate", *model, "-p", "hello", "-q", "-v")
    assert both.exit_code == 2 and "contradict" in both.stderr


def test_quiet_keeps_the_answers_of_commands_and_the_errors(model):
    result = run("chat", *model, "-q", stdin="hello\n/stats\n/nonsense\n")
    assert "tokens/s" in result.stderr
    assert "error: no such command" in result.stderr
    assert "seed" not in result.stderr


def test_an_answer_that_is_cut_says_so(model):
    result = run("generate", *model, "-p", "hello", "--ignore-eos")
    assert "cut at 8 tokens: a larger -n (--max-tokens) gives more" in result.stderr
    full = Stats(new_tokens=5, finish_reason="length")
    assert "context is full" in (length_note(full, GenerateOptions()) or "")
    assert length_note(Stats(new_tokens=5, finish_reason="stop"), GenerateOptions()) is None
    assert "/continue" in (length_note(full, GenerateOptions(max_tokens=5), in_chat=True) or "")


def test_a_terminal_sees_a_load_and_then_it_is_gone(monkeypatch, capsys):
    with waiting("loading x") as on_progress:
        on_progress(2, 9, "measuring y")
    assert capsys.readouterr().err == "", "a log sees none of it"
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    said, until = "", time.monotonic() + 120
    with waiting("loading [x]") as on_progress:
        on_progress(2, 9, "proving [y]")
        while "proving [y]: 2 of 9 (Ctrl-C stops)" not in said and time.monotonic() < until:
            said += capsys.readouterr().err
    assert "proving [y]: 2 of 9 (Ctrl-C stops)" in said
    assert "\x1b[2K" in capsys.readouterr().err, "the line is erased"


# MODEL


def test_a_prompt_in_place_of_the_model_is_one_if_it_is_no_name(monkeypatch, tmp_path):
    monkeypatch.setenv("EDGESPEC_MODELS", str(tmp_path))
    result = run("run", "hello there", "-n", "2")
    assert result.exit_code == 0 and "demo on " in result.stderr
    both = run("run", "demo", "hello", "-p", "there")
    assert both.exit_code == 2 and "two prompts are given" in both.stderr


def test_a_hugging_face_model_names_the_command_that_converts_it(tmp_path):
    folder = tmp_path / "my model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    assert f"edgespec export '{folder}'" in run("chat", str(folder)).stderr
    assert "edgespec export some-org/Some-Model-1B" in run("chat", "some-org/Some-Model-1B").stderr
    assert "edgespec export" not in run("chat", "folder/missing.gguf").stderr


def test_a_base_model_is_refused_before_it_is_loaded_with_what_works(base_path, monkeypatch):
    def load(**options: object) -> None:
        raise AssertionError("loaded")

    with monkeypatch.context() as patch:
        patch.setattr("edgespec.cli.session.load", load)
        for name in ("chat", "generate"):
            result = run(name, str(base_path), *(["-p", "x"] if name == "generate" else []))
            assert result.exit_code == 2
            assert f"edgespec run {base_path} --no-chat-template -p 'Once upon a time'" in result.stderr
    works = run("generate", str(base_path), "--no-chat-template", "-p", "Once upon a time", "-n", "2")
    assert works.exit_code == 0, works.stderr


@pytest.mark.parametrize("word", ["/bye", "/quit", "/exit"])
def test_several_words_leave(model, word):
    result = run("chat", *model, stdin=f"{word}\nhello\n")
    assert (result.exit_code, result.stdout) == (0, "")
