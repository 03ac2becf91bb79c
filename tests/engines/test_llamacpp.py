"""The llama.cpp engine beyond the contract: settings, facts, padding, interruption, vocabularies."""

from __future__ import annotations

import logging
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edgespec
from demo import TEST_THREADS
from edgespec import GenerateOptions, Sampling
from edgespec.chat.template import encode_messages
from edgespec.engines import model_use, widths
from edgespec.engines.llamacpp import library as llama_library
from edgespec.engines.llamacpp.devices import gpus, overriding
from edgespec.engines.llamacpp.engine import LlamaCppEngine
from edgespec.engines.llamacpp.library import library, logger
from edgespec.engines.llamacpp.settings import open_model
from edgespec.engines.llamacpp.tokenizer import VocabularyFile
from edgespec.engines.model_use import ModelUse
from edgespec.errors import (
    BatchError,
    Cancelled,
    CapabilityError,
    ConfigError,
    ContextFull,
    EngineError,
    PromptError,
    StateError,
    UsageError,
)
from edgespec.types import Batch, Draft
from tiny_gguf import SPECIALS, TEMPLATE, Shape, write_model, write_recurrent_model, write_sentencepiece_model
from tiny_gguf import vocabulary as tiny_vocabulary


def load(path: Path, **options) -> LlamaCppEngine:
    given = {"threads": TEST_THREADS, "context_length": 256, "max_batch": 64, "reproducible": False}
    return LlamaCppEngine.load(path, **{**given, **options})


def chain(engine: LlamaCppEngine, ids, sequence: int = 0) -> np.ndarray:
    return engine.forward(Batch.chain(ids, sequence=sequence)).copy()


@pytest.mark.skipif(sys.platform == "win32", reason="a console's Ctrl-C is not raised like this on Windows")
def test_ctrl_c_in_the_log_of_a_load_is_not_lost(tiny_path, caplog):
    """Python drops what is raised in a callback: the load, and all that came after it, went on."""
    records: list[logging.LogRecord] = []

    def interrupt(record: logging.LogRecord) -> bool:
        if not records:
            signal.raise_signal(signal.SIGINT)
        records.append(record)
        return True

    caplog.set_level(logging.DEBUG, logger.name)
    logger.addFilter(interrupt)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    try:
        with pytest.raises(KeyboardInterrupt):
            load(tiny_path)
    finally:
        signal.signal(signal.SIGINT, before)
        logger.removeFilter(interrupt)
    assert records
    load(tiny_path).close()


# Settings and facts


@pytest.mark.parametrize(
    "option",
    [
        {"context_length": 0},
        {"context_length": 513},
        {"context_length": 512, "max_sequences": 1 << 16},
        {"cache_type_k": "q3_k"},
        {"cache_type_v": "nonsense"},
        {"cache_type_v": "q8_0", "flash_attention": False},
    ],
    ids=str,
)
def test_an_option_out_of_range_is_refused(tiny_path, option):
    with pytest.raises(ConfigError):
        load(tiny_path, **option)


@pytest.mark.parametrize("kind", ["cache_type_k", "cache_type_v"])
def test_a_cache_in_blocks_that_heads_do_not_fill_is_refused(tiny_path, kind):
    with pytest.raises(CapabilityError, match=r"block size 32 does not divide .*=16.* or other cache_type_k="):
        load(tiny_path, **{kind: "q8_0"})


def test_gpu_layers_need_a_build_that_has_a_gpu(tiny_path):
    if gpus():
        pytest.skip("this build can use a GPU")
    with pytest.raises(CapabilityError, match="-ngl 0"):
        load(tiny_path, gpu_layers=-1)


@pytest.mark.parametrize("gpu_layers", [0, -1])
def test_where_a_gpu_is_full_the_advice_is_to_place_fewer_layers(tiny_path, monkeypatch, gpu_layers):
    """llama.cpp logs this where the memory of a device does not suffice (ggml-cuda.cu, ggml-alloc.c)."""
    llama = library()

    def refused(*_: object) -> None:
        complain = llama_library._complaints.append
        complain("allocating 8000.00 MiB on device 0: cudaMalloc failed: out of memory")
        complain("alloc_tensor_range: failed to allocate CUDA0 buffer of size 8388608000")

    monkeypatch.setattr(llama, "llama_model_load_from_splits", refused)
    with pytest.raises(CapabilityError, match=r"out of memory.*smaller model") as caught:
        open_model(tiny_path, ModelUse(gpu_layers=gpu_layers))
    assert ("-ngl auto" in str(caught.value)) == bool(gpu_layers)


def test_tensors_go_where_their_names_say(tiny_path, caplog):
    caplog.set_level(logging.DEBUG, logger.name)
    with load(tiny_path, overrides=((r"blk\.1\.ffn_(up|down)", "CPU"),)) as engine:
        found = chain(engine, [1, 2, 3])
    moved = {line.split()[1] for line in caplog.messages if "buffer type overridden to CPU" in line}
    assert moved == {"blk.1.ffn_up.weight", "blk.1.ffn_down.weight"}
    with load(tiny_path) as engine:
        np.testing.assert_array_equal(found, chain(engine, [1, 2, 3]))
    with pytest.raises(CapabilityError, match=r"no device 'Vulkan77'.* sees: .*CPU"):
        overriding((("exps", "CPU"), ("blk", "Vulkan77")))
    with pytest.raises(CapabilityError, match=r"no device 'Vulkan77'.* sees: .*CPU"):
        load(tiny_path, gpu_layers=-1, devices=("Vulkan77",))
    with pytest.raises(ConfigError, match="no layer is on a GPU: give their number"):
        load(tiny_path, overrides=(("blk", "Vulkan77"),))
    with pytest.raises(ConfigError, match="knows no such expressions"):
        load(tiny_path, overrides=(("(?P<name>blk)", "CPU"),))


@pytest.mark.parametrize("kind", ["f32", "bf16", "q8_0", "q4_0"])
def test_every_cache_type_works(tmp_path, kind):
    ids = list(range(40))
    path = write_model(tmp_path / "wide-heads.gguf", Shape(heads=2, kv_heads=1))
    with load(path) as plain, load(path, cache_type_k=kind, cache_type_v=kind) as other:
        expected, found = chain(plain, ids), chain(other, ids)
        tolerance = {"f32": 0.02, "bf16": 0.1, "q8_0": 0.1, "q4_0": 1.0}[kind]
        np.testing.assert_allclose(found, expected, atol=tolerance * expected.std() * 3, rtol=0)
        with pytest.raises(StateError, match="another model"):
            other.load_state(plain.save_state())


def test_more_rows_of_logits_than_there_is_room_for_are_refused(tiny_path, monkeypatch):
    monkeypatch.setattr(model_use, "LOGITS_BYTES", 1)
    with load(tiny_path, max_batch=128) as engine:
        with pytest.raises(BatchError, match="at most 64 rows"):
            chain(engine, range(65))
        assert chain(engine, range(64)).shape == (64, engine.vocabulary.size)
        assert engine.forward(Batch.chain(range(128), last_only=True)).shape == (1, engine.vocabulary.size)


def test_a_tree_of_too_many_branches_is_refused(tiny_path):
    star = Draft(np.arange(10, dtype=np.int32), np.full(10, -1, np.int32), np.ones(10, np.float32))
    with load(tiny_path, max_branches=4) as engine:
        with pytest.raises(BatchError, match="9 side branches"):
            engine.forward(Batch.tree(1, star))
        assert chain(engine, [1, 2]).shape == (2, engine.vocabulary.size)


def test_trees_of_other_sequences_keep_and_leave_their_branches(tiny_path, monkeypatch):
    """A tree that waits keeps its ids; one whose pass failed does not."""
    star = Draft(np.arange(3, dtype=np.int32), np.full(3, -1, np.int32), np.ones(3, np.float32))

    def on(sequence: int) -> Batch:
        return Batch.tree(1, star, sequence=sequence)

    with load(tiny_path, max_branches=4, max_sequences=3) as engine:
        for sequence in range(3):
            chain(engine, [5, 6, 7 + sequence], sequence)
        expected = chain(engine, [1, 1])[1]
        engine.rollback(3)
        with monkeypatch.context() as patched:
            patched.setattr(engine, "_decode", lambda *_: 1)
            with pytest.raises(ContextFull):
                engine.forward(on(2))
        found = engine.forward(on(0)).copy()
        engine.forward(on(1))
        with pytest.raises(BatchError, match="room for 0"):
            engine.forward(on(2))
        engine.keep_path((0, 2))
        np.testing.assert_allclose(found[2], expected, atol=0.02 * expected.std())
        assert engine.forward(on(2)).shape == found.shape
        assert engine.length() == 5 and engine.length(1) == engine.length(2) == 3


def test_loading_is_quiet_and_lazy(tiny_path, capfd):
    load(tiny_path).close()
    assert capfd.readouterr() == ("", "")
    program = "import sys, edgespec.engines.llamacpp; sys.exit('llama_cpp' in sys.modules)"
    root = Path(__file__).parents[2]
    assert subprocess.run([sys.executable, "-c", program], check=False, cwd=root).returncode == 0


# Width classes and padding


def test_classes_are_measured_once_per_file_and_settings(target_path, monkeypatch):
    options = {"reproducible": True, "widest": 9, "context_length": 320}
    with load(target_path, **options) as engine:
        measured = engine.facts
    monkeypatch.setattr(widths, "find_class", lambda *_: pytest.fail("measured again"))
    with load(target_path, **options) as engine:
        assert engine.facts == measured


def test_reproducible_is_refused_where_it_cannot_be(tiny_path, monkeypatch):
    monkeypatch.setattr(widths, "find_class", lambda *_: None)
    with pytest.raises(CapabilityError, match="reproducible=False"):
        load(tiny_path, reproducible=True, widest=7)
    with load(tiny_path, reproducible=None, widest=7) as engine:
        assert engine.facts.pinned_class is None
        assert engine.widest_pass == engine.facts.max_batch


@pytest.mark.parametrize("num_before", [1, 14, 40])
def test_a_state_that_is_loaded_behind_a_padded_pass_gives_the_same_bits(tiny_path, num_before):
    """The padding row is still in the cache, and a state that lay behind it would be summed in other tiles."""
    ids = np.random.default_rng(0).integers(5, 290, 140)
    with load(tiny_path, reproducible=True, context_length=512) as engine:
        for start in range(0, 134, 50):
            chain(engine, ids[start : min(start + 50, 134)])
        state = engine.save_state()
        expected = chain(engine, ids[134:135]).copy()
        engine.rollback(0)
        for token_id in ids[60 : 60 + num_before]:
            chain(engine, [token_id])
        engine.load_state(state)
        np.testing.assert_array_equal(chain(engine, ids[134:135]), expected)


def test_padding_leaves_no_trace_in_the_cache(target_path, monkeypatch):
    ids = [5, 6, 7, 8, 9, 10, 11, 12]
    monkeypatch.setattr(widths, "find_class", lambda *_: (3, 8))
    with load(target_path, reproducible=True, widest=8) as engine:
        assert engine.facts.pinned_class == (3, 8)
        whole = chain(engine, ids)
        state = engine.save_state()
        engine.rollback(0)
        single = np.concatenate([chain(engine, [token_id]) for token_id in ids])
        np.testing.assert_array_equal(single, whole)
        assert engine.save_state() == state
        engine.rollback(0)
        engine.forward(Batch.chain(ids, last_only=True))
        assert engine.save_state() == state


def test_long_runs_of_any_widths_give_the_same_bits(target_path):
    """On two threads, across the steps of 256 cells in which the cache grows, with rejected tokens in between."""
    rng = np.random.default_rng(0)
    with load(target_path, context_length=None, reproducible=True, threads=2) as engine:
        assert engine.facts.pinned_class is not None
        _, high = engine.facts.pinned_class
        ids = rng.integers(0, engine.vocabulary.size, 320).astype(np.int32)
        expected = np.concatenate([chain(engine, ids[i : i + high]) for i in range(0, ids.size, high)])
        engine.rollback(0)
        at = 0
        while at < ids.size:
            width = min(int(rng.integers(1, high + 1)), ids.size - at)
            wrong = rng.integers(0, 200, int(rng.integers(0, high - width + 1)))
            rows = chain(engine, [*ids[at : at + width], *wrong])
            at += width
            engine.rollback(at)
            np.testing.assert_array_equal(rows[:width], expected[at - width : at])


# Interruption


@pytest.fixture(scope="module")
def slow_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose passes are long enough to be interrupted."""
    shape = Shape(layers=8, width=512, heads=8, kv_heads=8, hidden=1024)
    return write_model(tmp_path_factory.mktemp("slow") / "slow.gguf", shape)


@pytest.mark.quiet
def test_cancel_ends_a_pass_in_the_middle(slow_path):
    with load(slow_path, context_length=512, max_batch=512) as engine:
        batch = Batch.chain(np.arange(500) % 290, last_only=True)
        started_s = time.perf_counter()
        expected = engine.forward(batch).copy()
        whole_s = time.perf_counter() - started_s
        engine.rollback(0)
        timer = threading.Timer(whole_s / 10, engine.cancel)
        timer.start()
        with pytest.raises(Cancelled, match=r"^a pass of \d+ rows was cancelled; "):
            engine.forward(batch)
        assert engine.length() == 0
        np.testing.assert_array_equal(engine.forward(batch), expected)


@contextmanager
def struck(engine: LlamaCppEngine, number: int = 1) -> Iterator[None]:
    """Ctrl-C right after this pass of the library."""
    decode, passes = engine._decode, list[int]()

    def decoding(*rows: Any) -> int:
        passes.append(decode(*rows))
        if len(passes) == number:
            raise KeyboardInterrupt
        return passes[-1]

    engine._decode = decoding
    with pytest.raises(KeyboardInterrupt):
        yield
    engine._decode = decode


@pytest.mark.parametrize("is_tree", [False, True])
def test_an_interrupt_right_after_a_pass_leaves_a_usable_cache(tiny_path, is_tree):
    draft = Draft(np.array([1, 2, 3], np.int32), np.array([-1, 0, -1], np.int32), np.ones(3, np.float32))
    batch = Batch.tree(9, draft) if is_tree else Batch.chain([9])
    with load(tiny_path, reproducible=not is_tree) as engine:
        prompt = list(range(20))
        chain(engine, prompt)
        expected = engine.forward(batch).copy()
        engine.rollback(20)
        with struck(engine):
            engine.forward(batch)
        assert engine.length() == 20
        np.testing.assert_array_equal(engine.forward(batch), expected)


@pytest.mark.parametrize("reader", ["save", "fork"])
def test_what_an_interrupted_pass_left_is_not_passed_on(tiny_path, reader):
    with load(tiny_path, max_sequences=2) as engine:
        chain(engine, range(20))
        expected = chain(engine, [7, 8])
        engine.rollback(20)
        with struck(engine):
            chain(engine, [1, 2, 3])
        if reader == "save":
            engine.load_state(engine.save_state(0), 1)
        else:
            engine.fork(0, 1)
        np.testing.assert_allclose(chain(engine, [7, 8], 1), expected, atol=0.05 * expected.std())


@pytest.mark.parametrize("number", [1, 3])
def test_a_recurrent_model_goes_on_after_an_interrupted_pass(tmp_path, number):
    """Its state cannot be rolled back, so that the next text is read from its beginning; it used to fail for good."""
    with edgespec.load(write_recurrent_model(tmp_path / "mamba.gguf"), drafter="none", threads=1) as model:
        ids, options = list(range(5, 15)), GenerateOptions(max_tokens=8, ignore_eos=True)
        expected = model.generate(ids, Sampling(), options)
        model.forget()
        with struck(model.target, number):
            model.generate(ids, Sampling(), options)
        found = model.generate([*ids, *expected.token_ids[:4]], Sampling(), replace(options, max_tokens=4))
        assert found.token_ids == expected.token_ids[4:]  # read at once, so that only rounding may differ
        np.testing.assert_allclose(found.logprobs, expected.logprobs[4:], atol=1e-4)


# Vocabularies


def test_byte_level_text_survives(tiny_path):
    rng = random.Random(0)
    with VocabularyFile(tiny_path) as vocabulary:
        assert vocabulary.bos_id == vocabulary.size - len(SPECIALS)
        assert vocabulary.end_ids == {vocabulary.bos_id}
        assert not vocabulary.adds_bos
        assert vocabulary.chat_template == TEMPLATE
        for _ in range(200):
            text = "".join(chr(rng.choice((rng.randrange(1, 128), rng.randrange(0x2F00), 0x1F600))) for _ in range(30))
            assert vocabulary.decode(vocabulary.encode(text)) == text
        assert vocabulary.decode(vocabulary.encode("a\0b")) == "a\0b"
        assert vocabulary.encode("") == []


def test_control_tokens_are_parsed_only_when_asked(tiny_path):
    with VocabularyFile(tiny_path) as vocabulary:
        end = vocabulary.bos_id
        assert vocabulary.encode("<|end|>", parse_special=True) == [end]
        assert end not in vocabulary.encode("<|end|>")
        assert vocabulary.decode(vocabulary.encode("<|end|>")) == "<|end|>"
        assert vocabulary.token_name(end) == "<|end|>"
        assert vocabulary.token_bytes(end) == b""
        assert vocabulary.encode("b", add_bos=True) == [end, *vocabulary.encode("b")]


def test_an_id_out_of_range_and_text_that_is_no_unicode_never_reach_the_library(tiny_path):
    with VocabularyFile(tiny_path) as vocabulary:
        with pytest.raises(PromptError, match="surrogate"):
            vocabulary.encode("a\ud800b")
        for token_id in (-1, vocabulary.size, 1 << 40):
            for call in (vocabulary.token_bytes, vocabulary.token_name):
                with pytest.raises(UsageError, match="outside the vocabulary"):
                    call(token_id)


@pytest.mark.parametrize("splitter", ["gpt-2", "gpt-4o", "default", "falcon"])
def test_a_long_text_does_not_end_the_process(tmp_path, splitter):
    """On a small stack, as threads have on macOS, with splitters that overflow it on some text."""
    path = write_model(tmp_path / "model.gguf", metadata={"tokenizer.ggml.pre": splitter})
    texts = ["a" * 100_000, " " * 100_000, "\n" * 100_000, "1" * 100_000, "." * 100_000, "._" * 50_000]
    texts += ["ab1 .\n" * 20_000, "a\u0301" * 20_000, "\u4e2d" * 30_000, ("." * 499 + "\n" * 499) * 20]
    found = []
    with VocabularyFile(path) as vocabulary:
        default_bytes = threading.stack_size(512 * 1024)
        try:
            reader = threading.Thread(target=lambda: found.extend(map(vocabulary.encode, texts)))
            reader.start()
        finally:
            threading.stack_size(default_bytes)
        reader.join()
        assert [vocabulary.decode(ids) for ids in found] == texts
        with pytest.raises(PromptError, match="262145 characters without a blank"):
            vocabulary.encode("a" * ((1 << 18) + 1))


def test_whole_vocabularies_read_fast_are_what_single_calls_give(target_path, tmp_path):
    for path in (target_path, write_sentencepiece_model(tmp_path / "spm.gguf")):
        with load(path) as engine:
            vocabulary, ids = engine.vocabulary, range(engine.vocabulary.size)
            assert vocabulary.pieces == [vocabulary.token_bytes(i) for i in ids] == [vocabulary.piece(i) for i in ids]
            assert vocabulary.token_names() == [vocabulary.token_name(i) for i in ids]
            assert vocabulary.control_names == tuple(
                vocabulary.token_name(i) for i in ids if not vocabulary.token_bytes(i)
            )
            assert vocabulary.control_names


def test_a_closed_vocabulary_refuses_but_keeps_what_was_read(tiny_path):
    engine = load(tiny_path)
    vocabulary = engine.vocabulary
    pieces = vocabulary.pieces
    engine.close()
    assert vocabulary.pieces is pieces
    for call in (lambda: vocabulary.encode("a"), lambda: vocabulary.token_bytes(1), lambda: vocabulary.token_name(1)):
        with pytest.raises(EngineError, match="closed"):
            call()


def test_a_chat_template_gets_the_tokens_that_begin_and_end_a_text(tmp_path):
    """Templates of Llama 2, Mistral, Zephyr and others write `eos_token` behind every answer."""
    source = (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}<|user|>{{ m.content }}"
        "{% else %}{{ m.content + eos_token }}{% endif %}{% endfor %}"
    )
    words, _ = tiny_vocabulary(Shape().merges)
    end, user, bos = (words.index(name) for name in SPECIALS)
    tokens = {"tokenizer.ggml.bos_token_id": bos, "tokenizer.ggml.eos_token_id": end}
    path = write_model(tmp_path / "m.gguf", metadata={**tokens, "tokenizer.chat_template": source})
    turns = [{"role": role, "content": "7"} for role in ("user", "assistant", "user")]
    with VocabularyFile(path) as vocabulary:
        assert vocabulary.eos_id == end
        [seven] = vocabulary.encode("7")
        assert encode_messages(vocabulary, turns, None, "tiny") == [bos, user, seven, seven, end, user, seven]


def test_a_sentencepiece_vocabulary_reads_and_writes(tmp_path):
    path = write_sentencepiece_model(tmp_path / "spm.gguf")
    with load(path) as engine:
        vocabulary = engine.vocabulary
        assert vocabulary.adds_bos
        assert vocabulary.bos_id == 1
        assert vocabulary.end_ids == {2}
        ids = vocabulary.encode("hello \u00e9!", add_bos=True)
        assert ids[0] == 1
        assert vocabulary.decode(ids) == " hello \u00e9!"
        assert chain(engine, ids).shape == (len(ids), vocabulary.size)
