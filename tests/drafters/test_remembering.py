"""Drafts from the corpus and from earlier answers change no token; and nothing is learnt where that would be a lie."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import edgespec
from command_line import run
from edgespec import GenerateOptions, Sampling
from edgespec.cli.session import open_session
from edgespec.config.sources import resolve
from edgespec.drafters.spec import learnt_texts
from lossless import PROMPTS, assert_same_text

QUESTION = "Find me a cheap Italian restaurant in San Jose for tonight."


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home folder of this test's own, with what was measured of the demo elsewhere."""
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture(scope="module", params=["llamacpp", "onnx"])
def remembering(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[edgespec.Model]:
    """The demo target with a corpus that holds one of the answers, and with earlier answers, told and on disk."""
    folder = tmp_path_factory.mktemp("remembering")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EDGESPEC_HOME", str(folder / "home"))
        with edgespec.load("demo", engine=request.param, drafter="none", learn=True) as model:
            for prompt in PROMPTS:
                _answer(model, prompt, Sampling(temperature=0.0), "none")
            (folder / "answer.txt").write_text(
                _answer(model, PROMPTS[0], Sampling(temperature=0.8, seed=3), "none").text
            )
        done = run("corpus", "add", str(folder / "answer.txt"))
        assert done.exit_code == 0, done.output
        with edgespec.load("demo", engine=request.param, reproducible=True, learn=True) as model:
            yield model


def _answer(
    model: edgespec.Model, prompt: str, sampling: Sampling, drafter: str, length: int | str = "auto"
) -> edgespec.Result:
    ids = model.encode_chat([{"role": "user", "content": prompt}])
    options = GenerateOptions(max_tokens=64, drafter=drafter, draft_length=length, ignore_eos=True)  # type: ignore[arg-type]
    return model.generate(ids, sampling, options)


def test_demo_text_does_not_depend_on_what_is_remembered(remembering: edgespec.Model) -> None:
    asked = [*itertools.product(("suffix",), (1, 4, 12, "auto")), ("auto", "auto")]
    assert_same_text(remembering, asked, num_tokens=64)


def test_what_is_remembered_is_really_drafted_from(remembering: edgespec.Model) -> None:
    remembering.forget()
    again = _answer(remembering, PROMPTS[0], Sampling(temperature=0.0), "suffix", 8)
    assert again.stats.mean_accepted_length > 3, "an earlier run gave this answer"
    written = _answer(remembering, PROMPTS[0], Sampling(temperature=0.8, seed=3), "suffix", 8)
    assert written.stats.mean_accepted_length > 3, "the corpus holds this answer"


def load_demo(**options: object) -> edgespec.Model:
    return edgespec.load("demo", drafter="suffix", draft_length=8, **options)


def rate_of(model: edgespec.Model) -> float:
    return _answer(model, QUESTION, Sampling(temperature=0.0), "suffix", 8).stats.mean_accepted_length


def test_learning_is_off_by_default_and_forgetting_clears_what_this_process_learnt(home: Path) -> None:
    with load_demo() as model:
        first = rate_of(model)
        model.forget()
        assert rate_of(model) == first, "a prompt that is decoded again does not meet its own answer"
    assert not (home / "texts").exists()
    with load_demo(learn=True) as model:
        assert rate_of(model) == first
        assert rate_of(model) > first + 1, "its own answer of a moment ago"
        model.forget()
        assert rate_of(model) == first
    with load_demo() as model:
        assert rate_of(model) == first
    with load_demo(learn=True) as model:
        assert rate_of(model) > first + 1, "the answer of an earlier run"
        model.forget()
        assert rate_of(model) > first + 1


@pytest.mark.parametrize("closes_model", [False, True])
def test_an_answer_that_was_stopped_is_learnt_as_far_as_it_came(home: Path, closes_model: bool) -> None:
    """Also where its model was closed meanwhile."""
    with load_demo(learn=True) as model:
        events = model.stream(QUESTION, Sampling(temperature=0.0), GenerateOptions(max_tokens=64, ignore_eos=True))
        emitted = [next(events).token_id for _ in range(20)]
        if not closes_model:
            events.close()  # type: ignore[attr-defined]
    events.close()  # type: ignore[attr-defined]
    with load_demo() as model:
        (kept,) = learnt_texts(model.target.vocabulary).read()
    assert 16 <= kept.size <= 20 and kept.tolist() == emitted[: kept.size]


def test_an_answer_that_ends_inside_a_draft_is_learnt_to_its_end_alone(home: Path) -> None:
    with load_demo(learn=True) as model:
        ids = model.encode_chat([{"role": "user", "content": QUESTION}])
        greedy = Sampling(temperature=0.0)
        whole = model.generate(ids, greedy, GenerateOptions(max_tokens=48, ignore_eos=True))
        num_beyond = 0
        stops = [whole.text[begin : begin + 8] for begin in range(40, len(whole.text) - 8, 12)]
        for stop in [stop for stop in stops if whole.text.index(stop) >= 40][:8]:
            found = model.generate(ids, greedy, GenerateOptions(max_tokens=48, stop=(stop,), ignore_eos=True))
            num_beyond += model._sequence.length > len(ids) + len(found.token_ids)
            newest = learnt_texts(model.target.vocabulary).read()[-1]
            assert tuple(newest.tolist()) == found.token_ids[: newest.size]
        assert num_beyond, "the cache held accepted tokens behind the stop string"


# -- on the command line


def test_a_corpus_is_added_listed_and_removed(home: Path, tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "a.py").write_text("def clamp(value, low, high):\n    return value\n" * 20)
    (tmp_path / "code" / "b.bin").write_bytes(b"\0\1")
    done = run("corpus", "add", str(tmp_path / "code"))
    assert done.exit_code == 0, done.output
    assert "added for demo: code, " in done.output and "tokens of 1 files" in done.output
    assert "left out as no text: 1 of" in done.output
    listed = run("corpus", "ls").output
    assert "code" in listed and "of 256 MiB" in listed and "learnt: 0 tokens of 0 answers" in listed
    assert run("corpus", "rm", "cod").output.strip() == "error: the corpus has no 'cod'; it has: code"
    assert "removed: code" in run("corpus", "rm", "code").output
    assert run("corpus", "add", str(tmp_path / "code")).exit_code == 0
    assert "removed: " in run("corpus", "rm", "--all").output
    assert "there was nothing" in run("corpus", "rm", "--all").output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["add", "nothing.txt"], "no file or folder 'nothing.txt': give a text file"),
        (["add", "empty.txt"], "empty.txt holds no text: give a file of text"),
        (["add", "image.png"], "image.png holds no text: give a file of text"),
        (["add", "folder"], "contains no text in UTF-8: give a folder that does"),
        (["add", "a.txt", "b.txt", "--name", "x"], "--name is for one text, but 2 paths are given"),
        (["add", "a.txt", "--name", ""], "is not a valid name"),
        (["add", "a.txt", "-m", "nonsense"], "no model 'nonsense'"),
        (["rm"], "say what to remove"),
        (["rm", "a", "--learnt"], "say what to remove"),
    ],
)
def test_what_is_refused_says_why_in_one_line(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], said: str
) -> None:
    (tmp_path / "folder").mkdir()
    for name, contents in {
        "a.txt": b"hello",
        "b.txt": b"world",
        "empty.txt": b"",
        "folder/empty.txt": b"",
        "image.png": b"\x89PNG\0",
    }.items():
        (tmp_path / name).write_bytes(contents)
    monkeypatch.chdir(tmp_path)
    done = run("corpus", *arguments)
    assert done.exit_code == 2 and said in done.output, done.output
    assert len(done.output.strip().splitlines()) == 1
    assert "Traceback" not in done.output


def test_a_damaged_corpus_is_said_and_does_not_stop_an_answer(home: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("hello, world. " * 50)
    assert run("corpus", "add", str(tmp_path / "a.txt")).exit_code == 0
    (file,) = (home / "texts").glob("corpus-*.npz")
    file.write_bytes(b"garbage" * 1000)
    done = run("generate", "-p", "hello", "-n", "8")
    assert done.exit_code == 0 and "the corpus is not used" in done.output
    assert "is damaged" in run("corpus", "ls").output
    assert run("corpus", "rm", "--all").exit_code == 0
    assert "the corpus is not used" not in run("generate", "-p", "hello", "-n", "8").output


def test_answers_are_kept_only_when_asked_and_can_be_cleared(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["generate", "-p", QUESTION, "-n", "24", "--temp", "0", "--ignore-eos"]
    plain = run(*arguments)
    assert plain.exit_code == 0 and "Learning" not in plain.output
    assert run("chat", "--temp", "0", "-n", "24", stdin=QUESTION).exit_code == 0
    assert not (home / "texts").exists(), "nothing is kept unless it was asked for"
    done = run(*arguments, "--learn")
    said = "Learning from answers: on (edgespec corpus rm --learnt deletes it)"
    assert said in done.stderr
    assert "Learning" not in run(*arguments, "--learn").output, "it is said once"
    assert "tokens of 1 answers" in run("corpus", "ls").output
    assert run("corpus", "rm", "--learnt").exit_code == 0
    assert "learnt: 0 tokens of 0 answers" in run("corpus", "ls").output
    monkeypatch.setenv("EDGESPEC_LEARN", "on")
    assert said in run(*arguments).stderr, "a setting asks for it too"
    assert "tokens of 1 answers" in run("corpus", "ls").output


def test_commands_that_measure_remember_nothing_whatever_the_settings_say(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGESPEC_LEARN", "1")
    with open_session(resolve({})).model as model:
        assert not model.options.learn
    with open_session(resolve({}), remembers=True).model as model:
        assert model.options.learn, "the settings ask for it"
    for command in ("bench", "race", "verify"):
        assert "-learn" not in re.sub(r"\[no-\]", "no-", run(command, "--help-all").output)
        assert "no such option" in run(command, "--learn").output
    done = run("verify", "-n", "8", "--drafter", "suffix", "--json")
    assert json.loads(done.stdout)["identical"]
    assert not (home / "texts").exists()
