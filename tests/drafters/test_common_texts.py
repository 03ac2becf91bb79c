"""The texts that come with edgespec: encoded behind an answer, kept, drafted from, and never a part of the text."""

from __future__ import annotations

import random
from pathlib import Path
from time import sleep

import numpy as np
import pytest

import edgespec
from damage import damaged
from edgespec import GenerateOptions, Sampling
from edgespec.config.values import EngineName
from edgespec.corpus import texts as stored
from edgespec.corpus.texts import CommonTexts
from edgespec.drafters.base import DraftRequest
from edgespec.drafters.suffix import SuffixDrafter
from edgespec.sampling.sampler import Sampler

OPTIONS = GenerateOptions(max_tokens=24, drafter="suffix")
QUESTION = [{"role": "user", "content": "Find me a cheap Italian restaurant in San Jose for tonight."}]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the encoded texts are kept in this test. The demo's vocabulary is large enough in it."""
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path))
    monkeypatch.setattr(stored, "_LEAST_VOCABULARY", 1)
    return tmp_path / "cache" / "common texts"


def texts_of(model: edgespec.Model) -> CommonTexts | None:
    suffix = model.drafters.drafter("suffix")
    assert isinstance(suffix, SuffixDrafter)
    return suffix.common


def answer(model: edgespec.Model, options: GenerateOptions = OPTIONS) -> str:
    return model.chat(QUESTION, Sampling(temperature=0.0), options).result().text


@pytest.mark.parametrize("engine", ["onnx", "llamacpp"])
def test_they_are_encoded_behind_the_first_answer_and_kept(folder: Path, engine: EngineName) -> None:
    with edgespec.load("demo", engine=engine, reproducible=True) as model:
        texts = texts_of(model)
        assert texts is not None and texts.index is None
        plain = answer(model, GenerateOptions(max_tokens=24, drafter="none"))
        assert answer(model) == plain
        known = model.target.vocabulary.encode(" in the United States")
    assert texts.index is not None and len(list(folder.iterdir())) == 1, "closing waited for it"
    with edgespec.load("demo", engine=engine, reproducible=True) as model:
        kept = texts_of(model)
        assert kept is not None and kept.index is not None and not kept.begin()
        assert kept.index.num_tokens == texts.index.num_tokens > 100_000
        assert kept.index.find(known) is not None and answer(model) == plain


def test_they_propose_what_usually_follows(folder: Path) -> None:
    with edgespec.load("demo") as model:
        answer(model)
        suffix, encode = model.drafters.drafter("suffix"), model.target.vocabulary.encode
        begun, sampler = (
            encode("It plays a crucial role"),
            Sampler(Sampling(temperature=0.0), model.target.vocabulary.size),
        )
    suffix.begin(np.array(begun[:1], np.int32))
    draft = suffix.draft(DraftRequest(np.array(begun, np.int32), 8, sampler))
    with edgespec.load("demo") as model:
        assert model.target.vocabulary.decode(draft.token_ids.tolist()).startswith(" in")


def test_a_damaged_file_is_written_anew(folder: Path) -> None:
    with edgespec.load("demo") as model:
        answer(model)
    (kept,) = folder.iterdir()
    whole = kept.read_bytes()
    kept.write_bytes(damaged(whole, random.Random(1)))
    with edgespec.load("demo") as model:
        texts = texts_of(model)
        assert texts is not None and texts.index is None
        answer(model)
    assert kept.read_bytes() == whole


def test_they_wait_while_something_is_generated(folder: Path) -> None:
    with edgespec.load("demo") as model, model.batch() as batch:
        batch.results([model.chat(QUESTION, Sampling(temperature=0.0), OPTIONS)])  # behind it they are begun
        texts = texts_of(model)
        assert texts is not None and not texts.begin()
        sleep(3.0)  # in which all would be encoded
        assert texts.index is None
    assert texts.index is not None


def test_without_a_corpus_there_are_none(folder: Path) -> None:
    with edgespec.load("demo", corpus=False) as model:
        answer(model)
        assert texts_of(model) is None
    assert not folder.exists()
