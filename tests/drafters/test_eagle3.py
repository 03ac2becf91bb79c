"""EAGLE-3 heads in GGUF: their maths against the definition, what they read of a target, and texts as without."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

import edgespec
from demo import DEMO, TEST_THREADS
from edgespec.config.values import EngineName
from edgespec.engines.llamacpp.engine import LlamaCppEngine
from edgespec.engines.trial import FileTrial
from edgespec.errors import (
    BatchError,
    Cancelled,
    CapabilityError,
    ContextFull,
    EngineError,
    ModelFileError,
    VocabularyMismatch,
)
from edgespec.formats.gguf.heads import head_kind_of, read_head
from edgespec.formats.head_file import HeadManifest
from edgespec.types import Batch, Draft
from gguf_heads import assert_plan_is_what_it_takes, features_of, head_of, opened
from lossless import assert_same_text, assert_several_draft_apart, assert_window_changes_no_text
from needs import NEEDS_KERNELS
from numpy_layers import eagle_layer
from tiny_gguf import Shape, write_model
from tiny_head import HEADS, KV_HEADS, LAYERS, TARGET, WIDTH, head_tensors, write_head

NAMES = {  # of a heads file, by those of a GGUF's layer
    **{f"{kind}_proj": f"attn_{kind}" for kind in "qkv"},
    "o_proj": "attn_output",
    "embedding_norm": "attn_norm",
    "state_norm": "attn_norm_2",
    "mlp_norm": "ffn_norm",
    **{f"{kind}_proj": f"ffn_{kind}" for kind in ("gate", "up", "down")},
}
SMALL = replace(TARGET, weights=gguf.GGMLQuantizationType.Q8_0)  # such a target has a reproducible mode
NUM_TOKENS = 299
TOKENS = np.random.default_rng(5).integers(0, NUM_TOKENS, 60).astype(np.int32)


@pytest.fixture(scope="module")
def demo_target() -> Iterator[LlamaCppEngine]:
    path = DEMO / "demo-target-q8_0.gguf"
    with LlamaCppEngine.load(path, threads=TEST_THREADS, context_length=256, reproducible=False) as engine:
        yield engine


@pytest.fixture(scope="module")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LlamaCppEngine]:
    path = write_model(tmp_path_factory.mktemp("target") / "tiny.gguf", TARGET)
    with LlamaCppEngine.load(path, threads=TEST_THREADS, context_length=64, reproducible=False) as engine:
        yield engine


@pytest.fixture(scope="module")
def small_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("target") / "small.gguf", SMALL)


@pytest.fixture(scope="module")
def head_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_head(tmp_path_factory.mktemp("head") / "head.gguf")


def same_bits(found: np.ndarray, wanted: np.ndarray) -> None:
    assert np.array_equal(np.ascontiguousarray(found).view(np.uint32), np.ascontiguousarray(wanted).view(np.uint32))


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


# -- the head itself


def definition(states: np.ndarray, start: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """(states that follow, logits) of the pairs of TOKENS from `start` on with these states [n, width]."""
    own = {name.removesuffix(".weight"): each for name, each in head_tensors(TARGET, NUM_TOKENS).items()}
    arrays = {ours: own[f"blk.0.{name}"] for ours, name in NAMES.items()} | {"norm": own["output_norm"]}
    for name, heads in (("q_proj", HEADS), ("k_proj", KV_HEADS)):  # llama.cpp's rotary pairs lie side by side
        rows = arrays[name]
        arrays[name] = rows.reshape(heads, -1, 2, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)
    manifest = HeadManifest(
        *("eagle", 3, WIDTH, NUM_TOKENS, "tiny", "-"),
        heads=HEADS,
        kv_heads=KV_HEADS,
        head_dim=WIDTH // HEADS,
        ffn=64,
        rope_theta=10000.0,
        norm_eps=1e-5,
        layers=(0, 1, 3),
    )
    embedded = own["token_embd"][TOKENS[start + 1 : start + 1 + len(states)]]
    after, last = eagle_layer(manifest, arrays, states, embedded, np.tri(len(states), dtype=np.bool_), is_third=True)
    return after, last @ own["output"].T


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 2, 0)])
def test_a_head_computes_its_definition(
    engine_name: EngineName, small_path: Path, tmp_path: Path, order: tuple[int, ...]
) -> None:
    """Many pairs at once, one by one, behind a rollback, behind a dropped beginning, behind a restart."""
    layers = [LAYERS[place] for place in order]
    path = write_head(tmp_path / "head.gguf", metadata={"eagle3.target_layers": layers})
    with opened(engine_name, small_path, layers) as target, head_of(target, path) as head:
        features = features_of(target, tuple(layers), TOKENS)
        assert head.facts.layers == tuple(layers) and features.shape[1] == head.facts.feature_width
        states = head.encode(features).copy()
        given = features
        if engine_name == "onnx":  # in the target's order, with its last state
            given = features.reshape(TOKENS.size, 4, -1)[:, np.argsort(np.argsort(layers))].reshape(TOKENS.size, -1)
        encoded = given @ head_tensors(TARGET, NUM_TOKENS)["fc.weight"].T
        np.testing.assert_allclose(states, encoded, atol=1e-3 * np.abs(encoded).max())

        def same(first: int, end: int, start: int = 0) -> None:
            """Pairs first..end are read behind those from `start` on."""
            found, state = head.decode(TOKENS[first + 1 : end + 1], states[first:end])
            after, logits = definition(states[start:end], start)
            np.testing.assert_allclose(found, logits[-1], atol=5e-3 * np.abs(logits).max())
            np.testing.assert_allclose(state, after[-1], atol=5e-3 * np.abs(after).max())
            assert (head.start, head.end) == (start, end)

        same(0, 30)
        same(30, 31)
        head.rollback(29)
        same(29, 30)
        head.restart(35)
        same(35, 58, 35)
        last = head.end if head.facts.keeps_oldest else 45
        head.drop_before(last)
        assert (head.start, head.end) == (last, 58)


@NEEDS_KERNELS
@pytest.mark.parametrize("shape", [TARGET, SMALL], ids=["F32", "Q8_0"])
@pytest.mark.parametrize("drafted", [None, 120])
def test_both_engines_compute_the_same(tmp_path: Path, shape: Shape, drafted: int | None) -> None:
    """With tables of its own, or its target's; of a part of the vocabulary."""
    width = TARGET.width  # of a head that shares tables
    sized = write_model(tmp_path / "target.gguf", shape)
    tensors = head_tensors(TARGET, NUM_TOKENS, width)
    tensors["token_embd.weight"] = None
    if drafted is None:
        tensors["output.weight"] = None
    else:
        tensors["output.weight"] = tensors["output.weight"][:drafted]
        tensors["d2t"] = np.arange(1, 2 * drafted, 2, dtype=np.int64)
    path, found = write_head(tmp_path / "head.gguf", tensors=tensors, width=width), []
    for name in ("llamacpp", "onnx"):
        with opened(name, sized, LAYERS) as target, head_of(target, path) as head:
            states = head.encode(features_of(target, tuple(LAYERS), TOKENS))[:20]
            found.append([each.copy() for each in head.decode(TOKENS[1:21], states)])
            head.follow(np.zeros(300, np.int32) + NUM_TOKENS - 1)
            assert head.decode(TOKENS[21:22], states[:1])[0].shape == (NUM_TOKENS,)
    (logits, state), (ours, after) = found
    known = np.isfinite(logits)
    assert known.sum() == (drafted or NUM_TOKENS) and np.array_equal(known, np.isfinite(ours))
    allowed = 0.005 if shape is TARGET else 0.04  # of the deviation: both have inputs of 8 bits there
    for one, other in ((ours[known], logits[known]), (after, state)):
        assert np.sqrt(np.square(one - other).mean()) < allowed * other.std()


@NEEDS_KERNELS
def test_a_tree_of_guesses_has_the_bits_of_its_paths(small_path: Path, head_path: Path) -> None:
    with opened("onnx", small_path, LAYERS) as target, head_of(target, head_path) as head:
        states = head.encode(features_of(target, tuple(LAYERS), TOKENS)).copy()
        head.decode(TOKENS[1:6], states[:5])
        parents = [-1, 0, 0, -1, 2, 1, 3]
        logits, after = (each.copy() for each in head.branch(TOKENS[6:13], states[5:12], parents, [0, 2, 4, 5, 6]))
        for row, path in enumerate(([0], [0, 2], [0, 2, 4], [0, 1, 5], [3, 6])):
            found, state = head.decode(TOKENS[6 + np.array(path)], states[5 + np.array(path)])
            same_bits(found, logits[row])
            same_bits(state, after[row])
            head.rollback(5)


def test_wrong_calls_of_a_head_are_refused(engine_name: EngineName, small_path: Path, head_path: Path) -> None:
    target = opened(engine_name, small_path, LAYERS)
    one = np.ones((1, WIDTH), np.float32)
    head = head_of(target, head_path, 8)
    with pytest.raises(BatchError, match=rf"\[n, {head.facts.feature_width}\]"):
        head.encode(one)
    for ids, states in (
        (np.array([NUM_TOKENS]), one),
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
        head.encode(np.ones((1, head.facts.feature_width), np.float32))
    target.close()


def test_a_cancelled_head_goes_on_as_if_nothing_had_been(
    engine_name: EngineName, small_path: Path, head_path: Path
) -> None:
    with opened(engine_name, small_path, LAYERS) as target, head_of(target, head_path) as head:
        states = head.encode(features_of(target, head.facts.layers, TOKENS)).copy()
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
        head.encode(np.ones((1, head.facts.feature_width), np.float32))


# -- texts


def test_text_does_not_depend_on_the_head(engine_name: EngineName, small_path: Path, head_path: Path) -> None:
    given: dict[str, Any] = {"draft": head_path, "engine": engine_name, "reproducible": True, "threads": TEST_THREADS}
    with edgespec.load(small_path, **given) as model:
        assert model.target.facts.name == engine_name
        stats = assert_same_text(model, [*(("eagle3", n) for n in (1, 7, 12, "auto")), ("auto", "auto"), ("auto", 4)])
    assert stats["eagle3", 7].drafted_tokens > 6 * 40


def test_heads_of_several_texts_draft_from_their_own_states(
    engine_name: EngineName, small_path: Path, head_path: Path
) -> None:
    """A head that read another text's states would draft others."""
    texts = ("Find me a cheap Italian restaurant.", "def add(a, b):", "Tom has 3 apples. " * 6, "Book a table")
    assert_several_draft_apart(str(small_path), texts, "eagle3", draft=head_path, engine=engine_name)


def test_a_text_longer_than_the_heads_window_stays_the_same(
    engine_name: EngineName, small_path: Path, head_path: Path
) -> None:
    assert_window_changes_no_text(str(small_path), "eagle3", draft=head_path, engine=engine_name)


@NEEDS_KERNELS
@pytest.mark.parametrize("bare", [(), ("token_embd.weight", "output.weight")], ids=["own tables", "its target's"])
def test_the_plan_is_what_the_head_takes(tmp_path: Path, small_path: Path, bare: tuple[str, ...]) -> None:
    tensors = head_tensors(TARGET, NUM_TOKENS, TARGET.width) | dict.fromkeys(bare)
    path = write_head(tmp_path / "head.gguf", tensors=tensors, width=TARGET.width)
    assert_plan_is_what_it_takes(small_path, LAYERS, path)


# -- what does not fit


def test_a_sound_head_is_told_from_a_model(tiny_target: LlamaCppEngine, tiny_path: Path, tmp_path: Path) -> None:
    path = write_head(tmp_path / "head.gguf")
    assert head_kind_of(path) == "eagle3" and head_kind_of(tiny_path) is None
    sizes = read_head(path)
    assert (sizes.width, sizes.layers, sizes.feature_width) == (WIDTH, tuple(LAYERS), 192)
    FileTrial({path: False}).require_sound()
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
    with pytest.raises(CapabilityError, match="reads a target of width 64, this target has 256"):
        demo_target.load_head(head_path)
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


def test_what_is_given_as_draft_must_be_what_the_drafter_needs(small_path: Path, head_path: Path) -> None:
    with pytest.raises(CapabilityError, match="use drafter='eagle3'"):
        edgespec.load(small_path, draft=head_path, drafter="model", threads=TEST_THREADS)
    with pytest.raises(CapabilityError, match=r"for a target in GGUF, .* runs on onnx: .*engine='llamacpp'"):
        edgespec.load("demo", engine="onnx", draft=head_path, drafter="eagle3", threads=TEST_THREADS)
    with pytest.raises(CapabilityError, match="needs an EAGLE-3 head"):
        edgespec.load(DEMO / "demo-target-q8_0.gguf", drafter="eagle3", threads=TEST_THREADS)


def test_a_target_without_layer_inputs_is_refused(tmp_path: Path) -> None:
    """Qwen 2 is a Llama with biases; llama.cpp's graph of it names no layers, and asking would end the process."""
    path = write_model(tmp_path / "qwen2.gguf", TARGET)
    with LlamaCppEngine.load(path, threads=TEST_THREADS, context_length=64, reproducible=False) as engine:
        engine.read_layers_alone((0, 1))
        engine._hidden_states._architecture = "qwen2"
        with pytest.raises(CapabilityError, match="no layer inputs of qwen2 models"):
            engine.read_layers_alone((0, 1))
