"""What a model writes by itself: kept batch by batch, other texts each time, and drafted from."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import edgespec
import write_corpus as script
from edgespec import GenerateOptions, Sampling
from edgespec.cli.main import cli
from edgespec.errors import PromptError
from write_corpus import ANSWER_TOKENS, LEAST_ANSWER, OwnText, without_loop

pytest.importorskip("onnxruntime")


@pytest.fixture(scope="module")
def model() -> Iterator[edgespec.Model]:
    with edgespec.load("demo", engine="onnx", parallel=4, context_length=704, threads=1, reproducible=False) as loaded:
        yield loaded


def batch(model: edgespec.Model, seed: int) -> list[tuple[int, ...]]:
    return [tuple(ids.tolist()) for ids in next(OwnText(model, seed).batches())]


def test_it_answers_questions_of_its_own_and_others_with_each_seed(model: edgespec.Model) -> None:
    first = batch(model, 0)
    assert first and all(LEAST_ANSWER <= len(ids) <= ANSWER_TOKENS for ids in first)
    assert batch(model, 0) == first
    assert not set(batch(model, 1)) & set(first)


def test_without_a_template_texts_are_written_from_nothing(
    model: edgespec.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object, **__: object) -> list[int]:
        raise PromptError("no template")

    monkeypatch.setattr(edgespec.Model, "encode_chat", refused)
    assert len(set(batch(model, 0))) > 1


def test_loops_are_cut_where_they_begin_again() -> None:
    text = np.arange(100, 140, dtype=np.int32)
    loop = np.tile(np.array([1, 2, 3, 4, 5], np.int32), 9)
    assert without_loop(text).tolist() == text.tolist()
    assert without_loop(np.concatenate((text, loop))).tolist() == [*text.tolist(), 1, 2, 3, 4, 5]
    once = np.concatenate((text, loop[:10], text))
    assert without_loop(once).tolist() == once.tolist(), "twice is no loop"


# -- the script


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def write(*arguments: str) -> int:
    return script.main(["demo", "--minutes", "0.02", "--parallel", "4", *arguments])


def num_tokens() -> int:
    row = CliRunner().invoke(cli, ["corpus", "ls"]).stdout.splitlines()[1].split()
    return int(row[3])  # behind the three words of the name


def test_more_is_added_each_time_and_drafted_from(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert write() == 0
    first = num_tokens()
    assert write() == 0 and "kept: written by demo" in capsys.readouterr().out
    assert num_tokens() > first
    question, accepted = [{"role": "user", "content": "Find me a hotel."}], {}
    options = GenerateOptions(max_tokens=60, drafter="suffix", draft_length=4, ignore_eos=True)
    for corpus in (False, True):
        with edgespec.load("demo", engine="onnx", corpus=corpus) as loaded:
            accepted[corpus] = loaded.chat(question, Sampling(temperature=0.0), options).result().stats.accepted_tokens
    assert accepted[True] > accepted[False]


def test_an_interrupt_keeps_what_was_written(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Interrupted(OwnText):
        def batches(self) -> Iterator[list[np.ndarray]]:
            yield from islice(super().batches(), 1)
            raise KeyboardInterrupt

    monkeypatch.setattr(script, "OwnText", Interrupted)
    assert write("--minutes", "5") == 0 and "kept: written by demo" in capsys.readouterr().out
    assert num_tokens() > 0


def test_a_name_that_is_taken_is_refused_before_anything_is_written(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "notes.txt").write_text("Some notes of mine.")
    assert CliRunner().invoke(cli, ["corpus", "add", str(tmp_path / "notes.txt"), "--name", "mine"]).exit_code == 0
    assert write("--name", "mine") == 2 and "another name with --name" in capsys.readouterr().err
