"""EAGLE-3 heads in llama.cpp: their maths against numpy, what they read of a target, and no text depends on them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edgespec
from demo import DEMO, TEST_THREADS
from eagle3 import NumpyHead, compare_head, convert_head, plan_head
from edgespec import GenerateOptions, Sampling
from edgespec.engines.llamacpp.engine import LlamaCppEngine
from edgespec.engines.sequence import CachedSequence, at_once
from edgespec.engines.trial import check_model_files
from edgespec.errors import (
    BatchError,
    Cancelled,
    CapabilityError,
    ConfigError,
    ContextFull,
    EngineError,
    ModelFileError,
    VocabularyMismatch,
)
from edgespec.export.check import limits_of
from edgespec.export.gguf.convert import convert
from edgespec.formats.gguf.header import read_header
from edgespec.formats.gguf.heads import head_kind_of, read_head
from edgespec.types import Batch, Draft
from lossless import assert_same_text, assert_several_draft_apart, assert_window_changes_no_text
from tiny_checkpoints import write_checkpoint as write_tiny
from tiny_gguf import write_model
from tiny_head import LAYERS, TARGET, WIDTH, write_checkpoint, write_head

HF_TARGET = DEMO / "hf" / "target"
TOKENS = np.random.default_rng(5).integers(0, 4096, 60).astype(np.int32)


@pytest.fixture(scope="module")
def demo_target() -> Iterator[LlamaCppEngine]:
    path = DEMO / "demo-target-q8_0.gguf"
    with LlamaCppEngine.load(path, threads=TEST_THREADS, context_length=256, reproducible=False) as engine:
        yield engine


@pytest.fixture(scope="module")
def head_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random head for the demo target that owns its tables and proposes 500 tokens."""
    folder = tmp_path_factory.mktemp("head")
    return convert_head(write_checkpoint(folder / "hf", HF_TARGET), HF_TARGET, folder / "head.gguf", "f32")


def same_bits(found: np.ndarray, wanted: np.ndarray) -> None:
    assert np.array_equal(np.ascontiguousarray(found).view(np.uint32), np.ascontiguousarray(wanted).view(np.uint32))


def features_of(target: LlamaCppEngine, layers: tuple[int, ...]) -> np.ndarray:
    """Layer inputs of TOKENS, behind an empty cache that is left empty."""
    target.read_layers_alone(layers)
    target.give_hidden_states(True)
    target.forward(Batch.chain(TOKENS, last_only=True))
    found = target.hidden_states()
    target.rollback(0)
    target.give_hidden_states(False)
    return found


# -- what goes into a target's layers


def test_layer_inputs_change_no_bit_of_the_logits(demo_target: LlamaCppEngine) -> None:
    tree = Draft(np.array([5, 6, 7, 8], np.int32), np.array([-1, 0, 0, 2], np.int32), np.ones(4, np.float32))
    for batch in (Batch.chain(TOKENS[:1]), Batch.chain(TOKENS[:9]), Batch.chain(TOKENS, last_only=True)):
        plain = demo_target.forward(batch).copy()
        demo_target.rollback(0)
        demo_target.read_layers_alone((0, 4, 8))
        demo_target.give_hidden_states(True)
        same_bits(demo_target.forward(batch), plain)
        assert demo_target.hidden_states().shape == (batch.width, 3 * 256)
        branched = demo_target.forward(Batch.tree(9, tree)).copy()
        of_tree = demo_target.hidden_states()
        demo_target.rollback(batch.width)
        demo_target.forward(Batch.chain([9, 5, 7, 8]))
        of_branch = demo_target.hidden_states()
        np.testing.assert_allclose(of_tree[[0, 1, 3, 4]], of_branch, atol=0.02 * np.abs(of_branch).max())
        assert not np.allclose(of_tree[2], of_tree[3], atol=0.02 * np.abs(of_branch).max())
        demo_target.give_hidden_states(False)
        demo_target.rollback(batch.width)
        same_bits(demo_target.forward(Batch.tree(9, tree)), branched)
        demo_target.keep_path((0,))
        demo_target.rollback(0)


def test_a_sequence_keeps_the_layer_inputs_of_what_it_holds(demo_target: LlamaCppEngine) -> None:
    whole = features_of(demo_target, (2, 4, 6))
    cached = CachedSequence(demo_target)
    cached.keep_features(True)
    cached.feed(TOKENS[:20])
    for start, accepted in ((20, 3), (24, 0), (25, 5), (31, 2)):
        wrong = np.where(np.arange(5) < accepted, TOKENS[start + 1 : start + 6], 1 + TOKENS[start + 1 : start + 6] % 99)
        draft = Draft.chain(wrong.astype(np.int32))
        at_once(cached.scoring(int(TOKENS[start]), draft))
        cached.keep(int(TOKENS[start]), draft, tuple(range(accepted)))
    cached.rollback(30)
    assert cached.features is not None and len(cached.features) == 30
    cached.feed(TOKENS[30:40])
    told = cached.features
    assert told is not None and len(told) == 40
    np.testing.assert_allclose(told, whole[:40], atol=2e-3 * np.abs(whole).max())
    cached.keep_features(False)
    assert cached.features is None
    cached.rollback(0)


@pytest.mark.parametrize("layers", [(9,), (0, -1), (400,)])
def test_a_layer_that_is_not_there_is_refused(demo_target: LlamaCppEngine, layers: tuple[int, ...]) -> None:
    with pytest.raises(CapabilityError, match=r"this model has 0\.\.8"):
        demo_target.read_layers_alone(layers)


# -- the head itself


@pytest.mark.parametrize(
    ("config", "options"),
    [
        ({}, {}),
        ({"norm_before_residual": True, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}, {"drafted": None}),
        ({"norm_before_fc": True, "rope_scaling": {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        }}, {"tensors": {"input_norm.weight": np.linspace(0.5, 1.5, 768, dtype=np.float32)}}),
        ({}, {"owns": (), "drafted": None}),
        ({}, {"owns": ("lm_head.weight",)}),
        ({"eagle_aux_hidden_state_layer_ids": [7, 0, 3]}, {"owns": ("embed_tokens.weight",), "drafted": None}),
    ],
    ids=["own tables", "speculators", "normed", "target's tables", "target's embeddings", "target's head"],
)  # fmt: skip
def test_a_head_computes_what_numpy_does(
    demo_target: LlamaCppEngine, tmp_path: Path, config: dict[str, Any], options: dict[str, Any]
) -> None:
    """Many pairs at once, one by one, behind a rollback, behind a dropped beginning, and its own states."""
    folder = write_checkpoint(tmp_path / "hf", HF_TARGET, config=config, **options)
    plan = plan_head(folder, HF_TARGET)
    path = convert_head(folder, HF_TARGET, tmp_path / "head.gguf", "f32")
    features = features_of(demo_target, plan.layers)
    wanted = NumpyHead.of(plan, HF_TARGET)
    with demo_target.load_head(path) as found:
        assert found.facts.layers == plan.layers
        states = found.encode(features)
        np.testing.assert_allclose(states, wanted.encode(features), atol=1e-4 * np.abs(states).max())

        def same(token_ids: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            logits, state = found.decode(token_ids, rows)
            logits, state = logits.copy(), state.copy()
            wanted_logits, wanted_state = wanted.decode(token_ids, rows)
            rounding = 2e-3 if "token_embd.weight" in plan.tensors else 1e-2
            np.testing.assert_allclose(state, wanted_state, atol=rounding * np.abs(wanted_state).max())
            is_drafted = np.isfinite(wanted_logits)
            assert np.array_equal(np.isfinite(logits), is_drafted)
            largest = np.abs(wanted_logits[is_drafted]).max()
            allowed = 4e-3 if "output.weight" in plan.tensors else 3e-2  # the target's head is in eight bits
            np.testing.assert_allclose(logits[is_drafted], wanted_logits[is_drafted], atol=allowed * largest)
            assert (found.start, found.end) == (wanted.start, wanted.end)
            return logits, state

        first, _ = same(TOKENS[1:31], states[:30])
        _, state = same(TOKENS[31:32], states[30:31])
        same(TOKENS[40:41], state[np.newaxis])
        for head in (found, wanted):
            head.rollback(29)
        again, _ = same(TOKENS[30:31], states[29:30])
        np.testing.assert_array_equal(again.argmax(), first.argmax())
        for head in (found, wanted):
            head.drop_before(12)
        same(TOKENS[31:41], states[30:40])
        for head in (found, wanted):
            head.restart(35)
        same(TOKENS[36:59], states[35:58])


def test_many_pairs_at_once_and_one_by_one_are_the_same(demo_target: LlamaCppEngine, head_path: Path) -> None:
    """More pairs than a pass takes, so that the border between passes is met too."""
    with demo_target.load_head(head_path) as head:
        states = np.tile(head.encode(features_of(demo_target, head.facts.layers)), (3, 1))[:150]
        ids = np.tile(TOKENS, 3)[:150]
        logits, state = (array.copy() for array in head.decode(ids, states))
        head.restart(0)
        for at in range(150):
            last = head.decode(ids[at : at + 1], states[at : at + 1])
        np.testing.assert_allclose(last[1], state, atol=1e-3 * np.abs(state).max())
        assert int(last[0].argmax()) == int(logits.argmax())


def test_wrong_calls_of_a_head_are_refused(demo_target: LlamaCppEngine, head_path: Path) -> None:
    one = np.ones((1, 256), np.float32)
    head = demo_target.load_head(head_path, context_length=8)
    with pytest.raises(BatchError, match=r"\[n, 768\]"):
        head.encode(one)
    for ids, states in (
        (np.array([4096]), one),
        (np.array([-1]), one),
        (np.array([1, 2]), one),
        (np.array([]), one[:0]),
    ):
        with pytest.raises(BatchError):
            head.decode(ids.astype(np.int32), states)
    with pytest.raises(ContextFull, match="room for 8"):
        head.decode(TOKENS[:9], np.tile(one, (9, 1)))
    head.decode(TOKENS[:3], np.tile(one, (3, 1)))
    for refused in (head.rollback, head.drop_before):
        with pytest.raises(BatchError, match=r"0\.\.3"):
            refused(4)
    head.close()
    head.close()
    with pytest.raises(EngineError, match="closed"):
        head.encode(one)


def test_a_cancelled_head_goes_on_as_if_nothing_had_been(demo_target: LlamaCppEngine, head_path: Path) -> None:
    with demo_target.load_head(head_path) as head:
        states = head.encode(features_of(demo_target, head.facts.layers))
        head.decode(TOKENS[1:11], states[:10])
        head.cancel()
        with pytest.raises(Cancelled):
            head.decode(TOKENS[11:31], states[10:30])
        assert head.end == 10
        after = head.decode(TOKENS[11:31], states[10:30])[0].copy()
        head.restart(0)
        head.decode(TOKENS[1:11], states[:10])
        same_bits(head.decode(TOKENS[11:31], states[10:30])[0], after)
        head.cancel()
        head.clear_cancel()
        head.encode(np.ones((1, 768), np.float32))


# -- texts


@pytest.fixture(scope="module")
def demo(head_path: Path) -> Iterator[edgespec.Model]:
    with edgespec.load("demo", draft=head_path, reproducible=True, threads=TEST_THREADS) as model:
        yield model


def test_demo_text_does_not_depend_on_the_head(demo: edgespec.Model) -> None:
    stats = assert_same_text(demo, [*(("eagle3", n) for n in (1, 7, 12, "auto")), ("auto", "auto"), ("auto", 4)])
    assert stats["eagle3", 7].drafted_tokens > 6 * 48


def test_heads_of_several_texts_draft_from_their_own_states(head_path: Path) -> None:
    """A head that read another text's states would draft others."""
    texts = ("Find me a cheap Italian restaurant.", "def add(a, b):", "Tom has 3 apples. " * 12, "Book a table")
    assert_several_draft_apart("demo", texts, "eagle3", draft=head_path)


def test_a_text_longer_than_the_heads_window_stays_the_same(head_path: Path) -> None:
    assert_window_changes_no_text("demo", "eagle3", draft=head_path)


# -- what does not fit


@pytest.fixture(scope="module")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LlamaCppEngine]:
    path = write_model(tmp_path_factory.mktemp("target") / "tiny.gguf", TARGET)
    with LlamaCppEngine.load(path, threads=TEST_THREADS, context_length=64, reproducible=False) as engine:
        yield engine


def test_a_sound_head_is_told_from_a_model(tiny_target: LlamaCppEngine, tiny_path: Path, tmp_path: Path) -> None:
    path = write_head(tmp_path / "head.gguf")
    assert head_kind_of(path) == "eagle3" and head_kind_of(tiny_path) is None
    sizes = read_head(path)
    assert (sizes.width, sizes.layers, sizes.feature_width) == (WIDTH, tuple(LAYERS), 192)
    check_model_files({path: False})
    with tiny_target.load_head(path) as head:
        assert head.facts.end_ids == tiny_target.vocabulary.end_ids
    with pytest.raises(CapabilityError, match="draft="):
        LlamaCppEngine.load(path)
    with pytest.raises(ModelFileError, match="a draft head is needed"):
        read_head(tiny_path)


@pytest.mark.parametrize(
    ("metadata", "tensors", "reason"),
    [
        ({"eagle3.block_count": 2}, {}, "has one"),
        ({"eagle3.target_layers": [0, 1, 1]}, {}, "3 different ones"),
        ({"eagle3.target_layers": [0, 1, -1]}, {}, "3 different ones"),
        ({"eagle3.target_layers": None}, {}, "3 different ones"),
        ({"eagle3.target_hidden_size": 0}, {}, "target_hidden_size is 0"),
        ({"eagle3.rope.dimension_count": 64}, {}, "rotates 64 of 16"),
        ({}, {"blk.0.attn_norm_2.weight": None}, "'blk.0.attn_norm_2.weight' not found"),
        ({}, {"blk.0.attn_q.weight": np.ones((32, 32), np.float32)}, "'blk.0.attn_q.weight' has wrong shape"),
        ({}, {"token_embd.weight": np.ones((100, WIDTH), np.float32)}, "'token_embd.weight' has the shape"),
        ({}, {"d2t": np.arange(299, dtype=np.int32)}, "a list of I64"),
        ({}, {"d2t": np.arange(299, dtype=np.int64) + 1}, r"different tokens of 0\.\.298"),
        ({}, {"d2t": np.arange(100, dtype=np.int64)}, "'output.weight' has wrong shape"),
        ({}, {"d2t": np.arange(100, dtype=np.int64), "output.weight": None}, "no output.weight"),
    ],
)  # fmt: skip
def test_a_head_that_is_not_sound_is_refused(
    tiny_target: LlamaCppEngine, tmp_path: Path, metadata: dict[str, Any], tensors: dict[str, Any], reason: str
) -> None:
    """Named before llama.cpp sees it, which ends the process on most of these."""
    path = write_head(tmp_path / "head.gguf", metadata=metadata, tensors=tensors)
    with pytest.raises(ModelFileError, match=reason):
        tiny_target.load_head(path)


def test_a_head_of_another_target_is_refused(
    tiny_target: LlamaCppEngine, demo_target: LlamaCppEngine, tmp_path: Path, head_path: Path
) -> None:
    path = write_head(tmp_path / "head.gguf")
    with pytest.raises(CapabilityError, match="reads a target of width 64, this target has 256"):
        demo_target.load_head(path)
    deep = write_head(tmp_path / "deep.gguf", metadata={"eagle3.target_layers": [0, 1, 4]})
    with pytest.raises(CapabilityError, match=r"reads layer 4 of its target, this one has 0\.\.3"):
        tiny_target.load_head(deep)
    bare = write_head(tmp_path / "bare.gguf", tensors={"token_embd.weight": None})
    with pytest.raises(CapabilityError, match="32 wide and lacks embeddings or head"):
        tiny_target.load_head(bare)
    other = [*map(str, range(299))]
    renamed = write_head(tmp_path / "renamed.gguf", metadata={
        "tokenizer.ggml.tokens": other, "tokenizer.ggml.merges": ["1 2"],
    })  # fmt: skip
    with pytest.raises(VocabularyMismatch, match="token 0 is"):
        tiny_target.load_head(renamed)


def test_a_target_without_layer_inputs_is_refused(tmp_path: Path) -> None:
    """Qwen 2 is a Llama with biases; llama.cpp's graph of it names no layers, and asking would end the process."""
    path = write_model(tmp_path / "qwen2.gguf", TARGET)
    with LlamaCppEngine.load(path, threads=TEST_THREADS, context_length=64, reproducible=False) as engine:
        engine.read_layers_alone((0, 1))
        engine._hidden_states._architecture = "qwen2"
        with pytest.raises(CapabilityError, match="no layer inputs of qwen2 models"):
            engine.read_layers_alone((0, 1))


def test_what_is_given_as_draft_must_be_what_the_drafter_needs(head_path: Path, onnx_path: Path) -> None:
    with pytest.raises(CapabilityError, match="use drafter='eagle3'"):
        edgespec.load("demo", draft=head_path, drafter="model", threads=TEST_THREADS)
    with pytest.raises(CapabilityError, match="use drafter='model'"):
        edgespec.load("demo", drafter="eagle3", threads=TEST_THREADS)
    with pytest.raises(CapabilityError, match=r"runs on onnx: .*engine='llamacpp'"):
        edgespec.load("demo", engine="onnx", draft=head_path, drafter="eagle3", threads=TEST_THREADS)
    target = str(DEMO / "demo-target-q8_0.gguf")
    with pytest.raises(CapabilityError, match="needs an EAGLE-3 head"):
        edgespec.load(target, drafter="eagle3", threads=TEST_THREADS)
    with edgespec.load(target, threads=TEST_THREADS) as model, pytest.raises(CapabilityError, match="EAGLE-3 head"):
        model.generate("Hello", options=GenerateOptions(drafter="eagle3"))


# -- the converter


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"config": {"num_hidden_layers": 2}}, "is not an EAGLE-3 head"),
        ({"config": {"hidden_act": "gelu"}}, "hidden_act 'gelu'"),
        ({"config": {"target_hidden_size": 512}}, "a target of width 512"),
        ({"config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 9]}}, r"3 different ones of 0\.\.8"),
        ({"config": {"eagle_config": {"eagle_aux_hidden_state_layer_ids": "123"}}}, r"3 different ones of 0\.\.8"),
        ({"config": {"rope_scaling": {"rope_type": "dynamic"}}}, "rotary scaling 'dynamic'"),
        ({"config": {"norm_before_fc": True}}, "lacks 1 tensors"),
        ({"config": {"intermediate_size": 95}}, "imply"),
        ({"tensors": {"midlayer.hidden_norm.weight": None}}, "blk.0.attn_norm_2.weight"),
        ({"tensors": {"midlayer.extra.weight": np.ones(3, np.float32)}}, "midlayer.extra.weight has no place"),
        ({"tensors": {"d2t": np.full(500, 4096, np.int64)}}, "must name different tokens"),
        ({"tensors": {"d2t": np.ones(500, np.float32)}}, "a list of I64"),
        ({"tensors": {"norm.weight": np.full(256, np.inf, np.float32)}}, "infinity"),
        ({"owns": ("embed_tokens.weight",)}, "no lm_head"),
    ],
)  # fmt: skip
def test_a_checkpoint_that_is_no_head_is_refused(tmp_path: Path, options: dict[str, Any], reason: str) -> None:
    folder = write_checkpoint(tmp_path / "hf", HF_TARGET, **options)
    with pytest.raises(ModelFileError, match=reason):
        convert_head(folder, HF_TARGET, tmp_path / "head.gguf")
    assert not list(tmp_path.glob("*.gguf*"))


def test_speculators_names_and_small_types(tmp_path: Path, demo_target: LlamaCppEngine) -> None:
    """The layer under another name with its settings nested; in eight bits the head is the same but for rounding."""
    folder = write_checkpoint(tmp_path / "hf", HF_TARGET)
    plan = plan_head(folder, HF_TARGET)
    renamed = {
        source.replace("midlayer.", "layers.0."): plan.checkpoint.weights(source) for source in plan.tensors.values()
    }
    nested = {"transformer_layer_config": {"num_hidden_layers": 1}}
    other = write_checkpoint(
        tmp_path / "other",
        HF_TARGET,
        tensors={**dict.fromkeys(plan.tensors.values()), **renamed},
        config={**nested, "num_hidden_layers": None},
    )
    found = convert_head(other, HF_TARGET, tmp_path / "other.gguf", "q8_0")
    assert sum(tensor.kind == "Q8_0" for tensor in read_header(found).tensors) == 10
    logits = []
    for path in (found, convert_head(folder, HF_TARGET, tmp_path / "head.gguf", "f32")):
        with demo_target.load_head(path) as head:
            states = head.encode(features_of(demo_target, head.facts.layers))
            logits.append(head.decode(TOKENS[1:], states[:-1])[0].copy())
    known = np.isfinite(logits[0])
    np.testing.assert_allclose(logits[0][known], logits[1][known], atol=0.05 * np.abs(logits[1][known]).max())
    with pytest.raises(ConfigError, match="allowed: f32"):
        convert_head(folder, HF_TARGET, tmp_path / "k.gguf", "q4_k_m")


def test_the_check_of_an_export_finds_a_wrong_head(demo_target: LlamaCppEngine, tmp_path: Path) -> None:
    """Queries in Hugging Face's order of rotary pairs would still draft, only badly."""
    folder = write_checkpoint(tmp_path / "hf", HF_TARGET, owns=("lm_head.weight",))
    plan = plan_head(folder, HF_TARGET)
    path = convert_head(folder, HF_TARGET, tmp_path / "head.gguf", "f16")
    assert not compare_head(plan, HF_TARGET, demo_target, path).complaint(limits_of("q8_0"))
    rows = plan.checkpoint.weights("midlayer.self_attn.q_proj.weight")
    shuffled = rows.reshape(4, 32, 2, 512).swapaxes(1, 2).reshape(rows.shape)
    wrong = write_checkpoint(
        tmp_path / "wrong",
        HF_TARGET,
        owns=("lm_head.weight",),
        tensors={"midlayer.self_attn.q_proj.weight": np.ascontiguousarray(shuffled)},
    )
    path = convert_head(wrong, HF_TARGET, tmp_path / "wrong.gguf", "f16")
    assert compare_head(plan, HF_TARGET, demo_target, path).complaint(limits_of("q8_0"))
    demo_target.rollback(0)
    demo_target.give_hidden_states(False)


@pytest.mark.parametrize("case", ["llama", "qwen3"])
def test_targets_of_several_architectures(tmp_path: Path, case: str) -> None:
    """A tiny random target with a head that takes all tables from it: text as without, and logits as numpy's."""
    folder = write_tiny(tmp_path / case, case)
    head = write_checkpoint(tmp_path / "head", folder, owns=(), drafted=None)
    path = convert_head(head, folder, tmp_path / "head.gguf", "f32")
    target = convert(folder, tmp_path / "target.gguf", "f32")
    with LlamaCppEngine.load(target, threads=TEST_THREADS, context_length=128, reproducible=False) as engine:
        assert not compare_head(plan_head(head, folder), folder, engine, path).complaint(limits_of("f16"))
    target = convert(folder, tmp_path / "small.gguf", "q8_0")
    with edgespec.load(str(target), draft=path, threads=TEST_THREADS, reproducible=True) as model:
        for temperature in (0.0, 0.9):
            sampling, options = Sampling(temperature=temperature), {"max_tokens": 40, "ignore_eos": True}
            plain = model.generate("The quick", sampling, GenerateOptions(drafter="none", **options))
            found = model.generate("The quick", sampling, GenerateOptions(drafter="eagle3", draft_length=4, **options))
            assert found.stats.drafted_tokens > 40
            assert found.token_ids == plain.token_ids
