"""A GGUF on our kernels: llama.cpp's tokens, nearly its logits, always the same bits; else llama.cpp, with a reason."""

from __future__ import annotations

import gc
import shutil
from collections.abc import Sequence

import numpy as np
import onnx
import pytest

import edgespec
from demo import DEMO, TEST_THREADS
from edgespec import GenerateOptions, Sampling
from edgespec.config.options import LoadOptions
from edgespec.engines.llamacpp.engine import LlamaCppEngine
from edgespec.engines.llamacpp.tokenizer import VocabularyFile
from edgespec.engines.onnx import OnnxEngine
from edgespec.engines.onnx.graph import OUTPUT_ROWS, read_graph
from edgespec.engines.onnx.source import GgufFile, open_source
from edgespec.engines.onnx.tokenizer import TokenizerFile
from edgespec.errors import CapabilityError, ConfigError, ModelFileError
from edgespec.formats.onnx.tiles import ATTENTION
from edgespec.loading.requirements import resolve_pair
from edgespec.types import Batch
from lossless import assert_same_text
from needs import NEEDS_KERNELS, NEEDS_LLAMA
from split_gguf import split
from tiny_graphs import assert_same_vocabulary, mean_kl, scored

TARGET, DRAFT = DEMO / "demo-target-q8_0.gguf", DEMO / "demo-draft-q8_0.gguf"
pytestmark = NEEDS_KERNELS
TEXTS = (
    "I need a table for two in San Jose tonight, at 7:30 pm.",
    "def f(x):\n\treturn {'a': x**2}  # \u00fcber\n",
    "\u4f60\u597d\uff0c\u4e16\u754c \U0001f389\U0001f469\u200d\U0001f680 caf\u00e9 \u0645\u0631\u062d\u0628\u0627",
    "  two  spaces\n\n\n  and lines <|im_end|> 12345.678",
)


@pytest.fixture(scope="module")
def engine():
    with OnnxEngine.load(TARGET, threads=TEST_THREADS, context_length=512) as found:
        yield found


def test_a_model_in_several_files_is_the_model(engine, tmp_path):
    first, *others = split(TARGET, tmp_path / "whole", 20)
    assert len(others) > 1
    with edgespec.load(first, threads=TEST_THREADS, context_length=64) as model:
        ids = model.encode(TEXTS[0])
        assert model.target.facts.name == "onnx"
        assert np.array_equal(model.target.forward(Batch.chain(ids)), scored(engine, ids, len(ids)))
    others[-1].write_bytes(others[-1].read_bytes()[:-1])
    with pytest.raises(ModelFileError, match=others[-1].name):
        edgespec.load(first)


@pytest.mark.parametrize("hidden_states", [False, True])
def test_behind_the_last_cache_only_wanted_rows_are_computed(hidden_states):
    """Of a prompt that is all rows but one; where the rows' states are asked for, the vocabulary's alone."""
    read = read_graph(open_source(TARGET), cells=64, hidden_states=hidden_states)
    nodes = onnx.load_from_string(read.serialised).graph.node
    behind = max(at for at, node in enumerate(nodes) if node.op_type == ATTENTION) + 1
    cut = next(at for at, node in enumerate(nodes) if OUTPUT_ROWS in node.input)
    assert cut > behind + 2 if hidden_states else cut == behind
    cutting = [node for node in nodes[cut:] if OUTPUT_ROWS in node.input]
    reading = [node for node in nodes[cut:] if node not in cutting]
    before = {name for node in nodes[:cut] for name in node.output}
    assert hidden_states or not before & {name for node in reading for name in node.input}


def test_a_row_has_the_same_bits_in_passes_of_all_widths(engine):
    ids = np.random.default_rng(3).integers(0, engine.vocabulary.size, 300).tolist()
    wanted = scored(engine, ids, 63)
    assert engine.facts.pinned_class == (1, engine.facts.max_batch) and not engine.facts.class_key
    for step in (1, 2, 3, 5, 8, 13, 21, 42, 64, 100, 128, 300):
        assert np.array_equal(scored(engine, ids, step).view(np.uint32), wanted.view(np.uint32)), step


@NEEDS_LLAMA
def test_logits_are_llama_cpps_but_for_the_rounding_of_activations(engine):
    ids = engine.vocabulary.encode(" ".join(TEXTS[:1] * 6))
    ours = scored(engine, ids, 32)
    with LlamaCppEngine.load(TARGET, threads=TEST_THREADS, reproducible=False) as theirs:
        assert mean_kl(ours, scored(theirs, ids, 32)) < 1e-3


@NEEDS_LLAMA
def test_texts_become_the_tokens_that_llama_cpp_makes_of_them():
    source = open_source(TARGET)
    with VocabularyFile(TARGET) as theirs:
        ours = TokenizerFile(source.folder, theirs.size)
        assert_same_vocabulary(ours, theirs, TEXTS)
        assert ours.chat_template == theirs.chat_template


def test_drafts_of_a_gguf_change_no_token_and_no_log_probability():
    with edgespec.load(TARGET, draft=DRAFT, threads=TEST_THREADS) as model:
        assert model.target.facts.name == "onnx" and model.target.facts.pinned_class
        asked = [("model", 1), ("model", 5), ("ngram", 4), ("suffix", 8), ("auto", "auto")]
        found = assert_same_text(model, asked, num_tokens=30)
    assert all(stats.drafted_tokens for (drafter, _), stats in found.items() if drafter != "auto")


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_chats_that_draft_together_write_what_each_writes_alone(temperature):
    sampling = Sampling(temperature=temperature, seed=11)
    with edgespec.load(TARGET, draft=DRAFT, threads=TEST_THREADS, parallel=8) as model:

        def answer(places: Sequence[int], drafter: str, length: int | str):
            options = GenerateOptions(
                max_tokens=40, ignore_eos=True, drafter=drafter, draft_length=length, logprobs=True
            )
            results = model.generate_all([f"{place} {TEXTS[0]}" for place in places], sampling, options)
            return [(result.token_ids, result.logprobs) for result in results], results

        alone = [answer([place], "none", 0)[0][0] for place in range(8)]
        for count, drafter, length in ((2, "suffix", 4), (4, "model", 3), (5, "auto", "auto"), (8, "suffix", 2)):
            together, results = answer(range(count), drafter, length)
            assert together == alone[:count], (count, drafter)
            assert drafter == "auto" or all(result.stats.drafted_tokens for result in results)


def test_the_choice_of_engines():
    def engine(**options):
        return resolve_pair(LoadOptions(model=str(TARGET), **options)).files["target"]

    assert engine().engine == engine(engine="onnx").engine == engine(cache_type_k="q8_0", cache_type_v="q8_0").engine
    assert engine().engine == "onnx" and not engine().note
    assert engine(engine="llamacpp").engine == "llamacpp"
    for options, reason in (
        ({"gpu_layers": 2}, "its layers go to the GPU"),
        ({"rpc": "127.0.0.1:1"}, "RPC"),
        ({"cache_type_k": "q8_0"}, "in one type"),
        ({"cache_type_k": "q4_0", "cache_type_v": "q4_0"}, "no cache of the type q4_0"),
        ({"pooling": "mean"}, "no embeddings"),
    ):
        found = engine(**options)
        assert found.engine == "llamacpp" and reason in found.note
        with pytest.raises(CapabilityError, match=reason):
            engine(engine="onnx", **options)


def test_a_file_that_is_cut_or_changed_while_it_is_read_is_an_error(tmp_path):
    path = tmp_path / "model.gguf"
    shutil.copyfile(TARGET, path)
    source = GgufFile(path)
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 100_000)
    with pytest.raises(ModelFileError, match="became shorter"):
        source.graph(64), source.arrays()
    shutil.copyfile(TARGET, path)
    with pytest.raises(ModelFileError, match="was changed while it was read"):
        source.graph(64), source.arrays()


def test_a_loaded_model_does_not_mind_what_becomes_of_its_file(tmp_path):
    path = tmp_path / "model.gguf"
    shutil.copyfile(TARGET, path)
    with OnnxEngine.load(path, threads=1, context_length=64) as engine:
        wanted = engine.forward(Batch.chain([5, 6, 7])).copy()
        path.write_bytes(b"")
        engine.rollback(0)
        assert np.array_equal(engine.forward(Batch.chain([5, 6, 7])), wanted)


def test_a_cache_folder_that_cannot_be_written_costs_only_time(tmp_path, monkeypatch):
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setattr("edgespec.engines.onnx.source.user_folder", lambda kind: blocked)
    source = open_source(TARGET)
    assert TokenizerFile(source.folder, 1).encode("a")
    kept = source.folder
    del source
    gc.collect()  # from Python 3.12 on the error that was dealt with is part of a cycle
    assert not kept.exists()


def test_a_device_other_than_the_processor_is_refused_by_name():
    with pytest.raises(ConfigError, match="is for ONNX models"):
        edgespec.load(TARGET, provider="cuda")
