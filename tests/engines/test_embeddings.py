"""Embeddings: those of llama-cpp-python, whatever texts share a pass, and nothing else changes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest
from click.testing import CliRunner
from numpy.typing import NDArray

import edgespec
from demo import TEST_THREADS
from edgespec import GenerateOptions, Model, Sampling
from edgespec.cli.main import cli
from edgespec.config.values import POOLINGS
from edgespec.engines.base import Engine
from edgespec.errors import (
    BatchError,
    Cancelled,
    CapabilityError,
    ConfigError,
    EngineError,
    ModelFileError,
    PromptError,
    StateError,
)
from tiny_bert import write_bert
from tiny_gguf import write_model

NUMBERS = {"mean": 1, "cls": 2, "last": 3}
TEXTS = ["Find me a bus to Fresno.", "a", "hello world", "Book a table for two in San Jose tonight. " * 8]


def written(path: Path, number: int | None, *, adds_end: bool = True) -> Path:
    """A random model whose file names a pooling."""
    pooling = {} if number is None else {"llama.pooling_type": np.uint32(number)}
    return write_model(path, metadata=pooling | {"tokenizer.ggml.add_eos_token": adds_end})


@pytest.fixture(scope="module")
def embedding_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("models") / "embedding.gguf", 3)


@pytest.fixture(scope="module")
def model(embedding_path: Path) -> Iterator[Model]:
    with edgespec.load(embedding_path, threads=TEST_THREADS, reproducible=False) as opened:
        yield opened


def reference(path: Path, pooling: str, texts: list[str]) -> NDArray[np.float64]:
    """What llama-cpp-python gives, with the attention that this engine has."""
    known = llama_cpp.Llama(
        str(path), embedding=True, pooling_type=NUMBERS[pooling], n_ctx=512, n_batch=512, n_ubatch=512,
        n_threads=TEST_THREADS, flash_attn=True, verbose=False,
    )  # fmt: skip
    with contextlib.closing(known):
        return np.array([known.embed(text, normalize=True) for text in texts])


@pytest.mark.parametrize("pooling", POOLINGS)
def test_embeddings_are_those_of_llama_cpp(embedding_path: Path, target_path: Path, pooling: str):
    for path, least in ((embedding_path, 0.99999), (target_path, 0.999)):  # quantised weights round by the pass's width
        with edgespec.load(path, pooling=pooling, threads=TEST_THREADS, reproducible=False) as opened:
            found = opened.embed(TEXTS)
        expected = reference(path, pooling, TEXTS)
        assert found.shape == expected.shape and found.dtype == np.float32
        np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, atol=1e-5)
        assert (found * expected).sum(axis=1).min() > least


def test_a_text_has_its_embedding_whatever_else_is_embedded(model: Model):
    texts = [f"{word} " * (1 + 15 * n) for n, word in enumerate(["bus", "hotel", "table", "Paris", "tonight"])]
    together = model.embed(texts)
    assert np.array_equal(together, np.concatenate([model.embed(text) for text in texts]))
    ids = [[*model.encode(text), 296] for text in texts[:3]]
    assert np.array_equal(model.embed(ids), together[:3]), "the model's end token is behind each text"


def test_a_conversation_stays_cached(model: Model):
    prompt, options = "a conversation " * 6, GenerateOptions(max_tokens=8)
    first = model.generate(prompt, Sampling(temperature=0.0), options)
    model.embed(TEXTS)
    again = model.generate(prompt, Sampling(temperature=0.0), options)
    assert again.token_ids == first.token_ids and again.stats.reused_tokens >= again.stats.prompt_tokens - 1


def test_long_texts(model: Model):
    most, text = model.context_length, "word " * 700
    assert len(model.encode(text)) > most
    with pytest.raises(PromptError, match=f"text 1 has .* the context holds {most}: split it"):
        model.embed(["short", text])
    ids = [*model.encode(text)[: most - 1], 296]
    assert np.array_equal(model.embed(text, truncate=True), model.embed([ids]))


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_a_text_of_several_passes(embedding_path: Path, pooling: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("edgespec.engines.llamacpp.embeddings.SCORES_BYTES", 1)  # 64 rows with states in a pass
    with edgespec.load(embedding_path, pooling=pooling, threads=TEST_THREADS, reproducible=False) as opened:
        opened.embed("a first context for short texts")
        text = "several passes " * 30
        assert len(opened.encode(text)) > 256
        assert opened.embed(text)[0] @ reference(embedding_path, pooling, [text])[0] > 0.99999


def test_what_cannot_be_embedded(tmp_path: Path, model: Model):
    assert model.embed([""]).shape == (1, 64), "a model with an end token reads that alone"
    wrong: list[tuple[Any, str]] = [([], "at least one"), ([1, 2], "list of their own"), (None, "got None")]
    wrong += [([[]], "text 0 is empty"), ([[299]], "outside the vocabulary"), ([b"x"], "must be text")]
    for given, words in wrong:
        with pytest.raises(PromptError, match=words):
            model.embed(given)
    with pytest.raises(BatchError, match="a text of 0 tokens"):
        model.target.embed(np.zeros(0, np.int32), "mean")
    for number, words in ((None, "llama.pooling_type.*pooling='mean'"), (0, "pooling="), (4, "pooling rank")):
        path = written(tmp_path / f"{number}.gguf", number, adds_end=False)
        opened = edgespec.load(path, threads=TEST_THREADS, reproducible=False)
        with opened, pytest.raises(CapabilityError, match=words):
            opened.embed("x")
    opened = edgespec.load(path, threads=TEST_THREADS, reproducible=False, pooling="mean")
    with opened, pytest.raises(PromptError, match="text 0 is empty"):
        opened.embed("")
    with pytest.raises(StateError, match="closed"):
        opened.embed("x")
    with pytest.raises(ConfigError, match="pooling"):
        edgespec.load(path, pooling="max")  # type: ignore[arg-type]


def test_cancelling(model: Model):
    target = model.target
    target.cancel()
    with pytest.raises(Cancelled):
        target.embed(np.array([1, 2], np.int32), "mean")
    asked = iter([True, False])
    with pytest.raises(Cancelled):
        model.embedder.embed(model.embedder.encode(["x " * 20] * 3, truncate=False), lambda: next(asked))
    assert model.embed("x").shape == (1, 64)


def test_onnx_models_give_none(onnx_path: Path):
    opened = edgespec.load(onnx_path, threads=TEST_THREADS, reproducible=False, pooling="mean")
    with opened, pytest.raises(CapabilityError, match="the onnx engine gives no embeddings: load an embedding model"):
        opened.embed("x")
    with pytest.raises(CapabilityError, match="ONNX models and models on RPC servers give none"):
        Engine.embed(opened.target, np.zeros(1, np.int32), "mean")


def non_causal(path: Path, number: int) -> Path:
    metadata = {"llama.attention.causal": False, "llama.pooling_type": np.uint32(number)}
    return write_model(path, metadata=metadata)


@pytest.mark.parametrize("write", [write_bert, non_causal])
@pytest.mark.parametrize("pooling", POOLINGS)
def test_encoders(tmp_path: Path, write: Callable[[Path, int], Path], pooling: str):
    path = write(tmp_path / "encoder.gguf", NUMBERS[pooling])
    texts = ["find me a bus", "hello world", "a", "table for two " * 13]
    with edgespec.load(path, threads=TEST_THREADS) as opened:
        found = opened.embed(texts)
        assert (found * reference(path, pooling, texts)).sum(axis=1).min() > 0.9999
        assert opened.notes == () and opened.memory is not None and not opened.target.facts.writes
        long = "hello " * 600
        with pytest.raises(PromptError, match="the context holds"):
            opened.embed(long)
        ids = opened.embedder.encode([long], truncate=True)[0]
        assert ids.size == opened.context_length and np.array_equal(
            opened.embed([ids]), opened.embed(long, truncate=True)
        )
        if write is write_bert:
            assert [ids[0], ids[-1]] == [2, 3], "a text begins with [CLS] and ends with [SEP]"


def test_encoders_write_no_text(tmp_path: Path, target_path: Path):
    path = write_bert(tmp_path / "bert.gguf")
    with edgespec.load(path, threads=TEST_THREADS) as opened:
        calls: list[Callable[[], Any]] = [lambda: opened.generate("x")]
        calls += [lambda: opened.chat([{"role": "user", "content": "x"}]), lambda: opened.generate_all(["x"])]
        calls += [lambda: opened.save_state(tmp_path / "state"), lambda: opened.target.fork(0, 0)]
        for call in calls:
            with pytest.raises(CapabilityError, match=r"bert models .* write no text"):
                call()
        opened.forget()
        assert opened.target.length() == 0
    with pytest.raises(EngineError, match="closed"):
        opened.target.embed(np.array([1], np.int32), "mean")
    with pytest.raises(CapabilityError, match=r"bert\.gguf writes no text: leave out reproducible=True"):
        edgespec.load(path, threads=TEST_THREADS, reproducible=True)
    with pytest.raises(CapabilityError, match=r"draft bert\.gguf .* cannot draft"):
        edgespec.load(target_path, draft=path, threads=TEST_THREADS)
    for command in ("chat", "generate"):
        refused = CliRunner().invoke(cli, [command, str(path)], input="x")
        assert refused.exit_code == 2 and "bert models read a whole text at once" in refused.stderr
    with pytest.raises(ModelFileError, match="bert models read a whole text at once"):
        edgespec.load(write_bert(tmp_path / "no pooling.gguf", None), threads=TEST_THREADS)
    weights = np.full((64, 64), np.nan, np.float32)
    with pytest.raises(ModelFileError, match="invalid data"):
        edgespec.load(write_bert(tmp_path / "damaged.gguf", damaged=weights), threads=TEST_THREADS)
