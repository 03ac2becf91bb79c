"""DFlash and DSpark heads in llama.cpp: their maths against numpy, their cache, and which files are refused."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from demo import DEMO, TEST_THREADS
from edgespec.engines.llamacpp import DFlashHead, LlamaCppEngine
from edgespec.engines.trial import check_model_file
from edgespec.errors import (
    BatchError,
    Cancelled,
    CapabilityError,
    ContextFull,
    EngineError,
    ModelFileError,
    VocabularyMismatch,
)
from edgespec.formats.gguf.dflash import MAX_BLOCK, is_dflash, read_dflash
from edgespec.formats.gguf.eagle3 import is_eagle3
from edgespec.formats.gguf.head_reader import is_draft_head
from edgespec.types import Batch
from tiny_dflash import LAYERS, MASK_ID, NUM_TOKENS, TARGET, WIDTH, HeadShape, NumpyBlock, write_dflash
from tiny_gguf import matrices, write_model
from tiny_head import write_head

TOKENS = np.random.default_rng(5).integers(0, NUM_TOKENS, 100).astype(np.int32)
DSPARK = HeadShape(markov=8, has_confidence=True)
OWN_TABLES = "token_embd.weight", "output.weight"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LlamaCppEngine]:
    path = write_model(tmp_path_factory.mktemp("target") / "tiny.gguf", TARGET)
    with LlamaCppEngine.load(path, threads=TEST_THREADS, context_length=128, reproducible=False) as engine:
        yield engine


def features_of(target: LlamaCppEngine, layers: tuple[int, ...] = tuple(LAYERS)) -> np.ndarray:
    """Layer inputs of TOKENS, behind an empty cache that is left empty."""
    target.give_layer_inputs(layers)
    target.forward(Batch.chain(TOKENS, last_only=True))
    found = target.layer_inputs()
    target.rollback(0)
    target.give_layer_inputs(())
    return found


# -- what a head computes

SHAPES = {
    "own tables": HeadShape(),
    "one layer read": HeadShape(target_layers=(2,), layers=1),
    "a part of the vocabulary": HeadShape(drafted=120),
    "causal": HeadShape(causal=True),
    "not causal, as its file says": HeadShape(causal=False),
    "windows": HeadShape(window=20, windowed=(True, False)),
    "windows everywhere": HeadShape(window=9, windowed=(True, True)),
    "sinks, further norms, values from keys": HeadShape(has_extras=True, kv_heads=4),
    "DSpark": DSPARK,
    "DSpark without confidences": HeadShape(markov=8),
    "DSpark that reads behind the anchor": replace(DSPARK, from_anchor=False),
    "DSpark with a part of the vocabulary": replace(DSPARK, drafted=120),
    "the longest block": HeadShape(block=MAX_BLOCK),
}


@pytest.mark.parametrize("shares", [(), ("token_embd.weight",), OWN_TABLES], ids=["owns", "embeddings", "both"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_head_computes_what_numpy_does(
    target: LlamaCppEngine, tmp_path: Path, shape: HeadShape, shares: tuple[str, ...]
) -> None:
    """Behind many tokens and none, behind a rollback, a dropped beginning and a restart."""
    if shape.drafted is not None and "output.weight" in shares:
        pytest.skip("a head for a part of the vocabulary has its own")
    path = write_dflash(tmp_path / "head.gguf", shape, tensors=dict.fromkeys(shares))
    features = features_of(target, shape.target_layers)
    tables = matrices(TARGET, NUM_TOKENS)
    wanted = NumpyBlock(path, shape, {name: tables[name] for name in OWN_TABLES})
    with target.load_dflash(path) as head:
        assert head.facts.layers == shape.target_layers
        assert head.most_drafted == (shape.block if shape.markov and shape.from_anchor else shape.block - 1)

        def same(token_id: int) -> None:
            logits, confidences = head.block(token_id)
            known, known_confidences = wanted.block(token_id, head.end)
            assert logits.shape == (head.most_drafted, NUM_TOKENS) == known.shape
            is_drafted = np.isfinite(known)
            assert np.array_equal(np.isfinite(logits), is_drafted)
            allowed = 1e-2 * np.abs(known[is_drafted]).max()
            np.testing.assert_allclose(logits[is_drafted], known[is_drafted], atol=allowed)
            assert (confidences is None) == (known_confidences is None)
            if confidences is not None and known_confidences is not None:
                np.testing.assert_allclose(confidences, known_confidences, atol=1e-2)

        same(7)
        head.inject(features[:30])
        wanted.inject(features[:30], 0)
        same(int(TOKENS[30]))
        same(int(TOKENS[31]))
        head.inject(features[30:34])
        wanted.inject(features[30:34], 30)
        same(int(TOKENS[34]))
        head.rollback(25)
        head.drop_before(11)
        for cache in wanted.cache:
            for position in (*range(11), *range(25, 34)):
                del cache[position]
        same(int(TOKENS[25]))
        head.inject(features[25:99])  # more than a pass takes
        wanted.inject(features[25:99], 25)
        same(int(TOKENS[99]))
        head.restart(40)
        for cache in wanted.cache:
            cache.clear()
        head.inject(features[40:44])
        wanted.inject(features[40:44], 40)
        same(int(TOKENS[44]))


@pytest.mark.parametrize("shape", [HeadShape(), DSPARK, HeadShape(window=20, windowed=(True, False))])
def test_a_block_leaves_no_trace(target: LlamaCppEngine, tmp_path: Path, shape: HeadShape) -> None:
    path, features = write_dflash(tmp_path / "head.gguf", shape), features_of(target)
    with target.load_dflash(path) as used, target.load_dflash(path) as fresh:
        for end in (0, 3, 3, 20, 21, 30):
            used.inject(features[used.end : end])
            used.block(int(TOKENS[end]))
            used.block(5)
        used.rollback(18)
        used.inject(features[18:26])
        fresh.inject(features[:26])
        found, wanted = (head.block(int(TOKENS[26]))[0] for head in (used, fresh))
        np.testing.assert_allclose(found, wanted, atol=1e-3 * np.abs(wanted).max())


def test_heads_of_several_texts_do_not_see_one_another(target: LlamaCppEngine, tmp_path: Path) -> None:
    features = features_of(target)
    with target.load_dflash(write_dflash(tmp_path / "head.gguf", DSPARK)) as head:
        other = head.another()
        head.inject(features[:20])
        before = head.block(9)[0].copy()
        other.inject(features[30:60])
        other.set_threads(1)
        assert not np.allclose(other.block(9)[0], before)
        np.testing.assert_allclose(head.block(9)[0], before, atol=1e-4 * np.abs(before).max())
        head.close()
        with pytest.raises(EngineError, match="closed"):
            other.block(9)


def test_wrong_calls_of_a_head_are_refused(target: LlamaCppEngine, tmp_path: Path) -> None:
    features = features_of(target)
    head = target.load_dflash(write_dflash(tmp_path / "head.gguf"), context_length=8)
    with pytest.raises(BatchError, match=r"\[n, 192\]"):
        head.inject(features[:, :64])
    for token_id in (-1, NUM_TOKENS):
        with pytest.raises(BatchError, match=f"token {token_id} is outside"):
            head.block(token_id)
    with pytest.raises(ContextFull, match="room for 8"):
        head.inject(features[:9])
    head.inject(features[:8])
    head.block(3)  # a full cache still has room for the block
    for refused in (head.rollback, head.drop_before):
        with pytest.raises(BatchError, match=r"0\.\.8"):
            refused(9)
    head.close()
    head.close()
    for call in (lambda: head.inject(features[:1]), lambda: head.block(1), head.another):
        with pytest.raises(EngineError, match="closed"):
            call()


def test_a_cancelled_head_goes_on_as_if_nothing_had_been(target: LlamaCppEngine, tmp_path: Path) -> None:
    features = features_of(target)
    with target.load_dflash(write_dflash(tmp_path / "head.gguf")) as head:
        head.inject(features[:10])
        wanted = head.block(4)[0].copy()
        for call in (lambda: head.inject(features[10:20]), lambda: head.block(4)):
            head.cancel()
            with pytest.raises(Cancelled):
                call()
            assert head.end == 10
        np.testing.assert_array_equal(head.block(4)[0], wanted)
        head.cancel()
        head.clear_cancel()
        head.inject(features[10:20])


# -- which files are taken


def test_a_sound_head_is_told_from_others(target: LlamaCppEngine, tiny_path: Path, tmp_path: Path) -> None:
    path, other = write_dflash(tmp_path / "head.gguf", DSPARK), write_head(tmp_path / "eagle3.gguf")
    assert is_dflash(path) and not is_dflash(other) and not is_dflash(tiny_path)
    assert is_eagle3(other) and not is_eagle3(path)
    assert [is_draft_head(each) for each in (path, other, tiny_path)] == [True, True, False]
    sizes = read_dflash(path)
    assert (sizes.width, sizes.layers, sizes.feature_width, sizes.mask_id) == (WIDTH, tuple(LAYERS), 192, MASK_ID)
    assert (sizes.has_markov, sizes.has_confidence, sizes.first_row, sizes.most_drafted) == (True, True, 0, 6)
    check_model_file(path)
    check_model_file(write_dflash(tmp_path / "bare.gguf", tensors=dict.fromkeys(OWN_TABLES)))
    with target.load_dflash(path) as head:
        assert head.facts.end_ids == target.vocabulary.end_ids
    with pytest.raises(CapabilityError, match=r"is a DFlash head, .* -md/--model-draft"):
        LlamaCppEngine.load(path)
    for wrong in (tiny_path, other):
        with pytest.raises(ModelFileError, match="a DFlash head is needed"):
            target.load_dflash(wrong)


@pytest.mark.parametrize(
    ("metadata", "tensors", "variant"),
    [
        ({"dflash.hyper_connection.count": 4}, {}, "DeepSeek-V4's layers"),
        ({"dflash.selector_rank": 8}, {}, "DFlash2 head"),
        ({"dflash.selector_top_k": 4}, {}, "DFlash2 head"),
        ({}, {"selector_hidden.weight": np.ones((8, WIDTH), np.float32)}, "DFlash2 head"),
        ({}, {"blk.0.attn_conv_proj.weight": np.ones((8, WIDTH), np.float32)}, "DFlash2 head"),
        ({"dflash.rope.dimension_sections": [8, 0, 0, 0]}, {}, "also reads images"),
    ],
)  # fmt: skip
def test_a_variant_that_does_not_run_is_named(
    target: LlamaCppEngine, tmp_path: Path, metadata: dict[str, Any], tensors: dict[str, Any], variant: str
) -> None:
    path = write_dflash(tmp_path / "head.gguf", metadata=metadata, tensors=tensors)
    with pytest.raises(CapabilityError, match=f"{variant}.*give a DFlash or DSpark head"):
        target.load_dflash(path)


def ones(*shape: int) -> np.ndarray:
    return np.ones(shape, np.float32)


@pytest.mark.parametrize(
    ("metadata", "tensors", "reason"),
    [
        ({"tokenizer.ggml.mask_token_id": None}, {}, r"mask_token_id is None, a token of 0\.\.298"),
        ({"tokenizer.ggml.mask_token_id": 299}, {}, "mask_token_id is 299"),
        ({"dflash.block_size": None}, {}, "block_size is None"),
        ({"dflash.block_size": 0}, {}, "block_size is 0"),
        ({"dflash.block_size": 1}, {}, r"block_size is 1, 2\.\.64"),
        ({"dflash.block_size": 65}, {}, r"block_size is 65, 2\.\.64"),
        ({"dflash.block_size": "six"}, {}, "block_size is 'six'"),
        ({"dflash.target_layers": None}, {}, "one or more different ones"),
        ({"dflash.target_layers": [0, 1, 1]}, {}, "one or more different ones"),
        ({"dflash.target_layers": [0, 1, -1]}, {}, "one or more different ones"),
        ({"dflash.target_layers": [0, 1]}, {}, "'fc.weight' has the shape"),
        ({"dflash.embedding_length": 32}, {}, "has the shape"),
        ({"dflash.block_count": 3}, {}, "lacks the tensor 'blk.2.attn_norm.weight'"),
        ({"dflash.attention.value_length": 8}, {}, "differ in width"),
        ({"dflash.attention.key_length_swa": 8}, {}, "heads of another size"),
        ({"dflash.rope.dimension_count": 15}, {}, "rotates 15 of 16"),
        ({"dflash.rope.dimension_count": 64}, {}, "rotates 64 of 16"),
        ({"dflash.attention.sliding_window": 8}, {}, "does not say for each layer"),
        ({"dflash.attention.sliding_window": 8, "dflash.attention.sliding_window_pattern": [True]}, {}, "each layer"),
        ({"dflash.attention.causal": "no"}, {}, "causal is 'no', true or false"),
        ({"dflash.hidden_activation": "relu"}, {}, "hidden_activation is 'relu', known are silu"),
        ({}, {"enc.output_norm.weight": None}, "lacks the tensor 'enc.output_norm.weight'"),
        ({}, {"blk.1.attn_q_norm.weight": None}, "lacks the tensor 'blk.1.attn_q_norm.weight'"),
        ({}, {"blk.1.attn_v.weight": ones(16, 64)}, "'blk.1.attn_v.weight' has the shape"),
        ({}, {"blk.0.attn_sinks.weight": ones(3)}, "'blk.0.attn_sinks.weight' has the shape"),
        ({}, {"token_embd.weight": ones(100, WIDTH)}, "'token_embd.weight' has the shape"),
        ({}, {"output.weight": ones(100, WIDTH)}, "'output.weight' has the shape"),
        ({}, {"d2t": np.arange(299, dtype=np.int32)}, "a list of I64"),
        ({}, {"d2t": np.arange(299, dtype=np.int64) + 1}, r"different tokens of 0\.\.298"),
        ({}, {"d2t": np.arange(100, dtype=np.int64)}, "'output.weight' has the shape"),
        ({}, {"d2t": np.arange(100, dtype=np.int64), "output.weight": None}, "no output.weight"),
        ({}, {"markov_w1.weight": ones(299, 8)}, "lacks the tensor 'markov_w2.weight'"),
        ({}, {"markov_w2.weight": ones(299, 8)}, "a part of a Markov head"),
        ({}, {"markov_w1.weight": ones(100, 8), "markov_w2.weight": ones(299, 8)}, "'markov_w1.weight' has the shape"),
        ({}, {"markov_w1.weight": ones(299, 8), "markov_w2.weight": ones(299, 4)}, "'markov_w2.weight' has the shape"),
        ({}, {"markov_w1.weight": ones(299, 8), "markov_w2.weight": ones(299, 8), "conf_proj.weight": ones(1, 64)},
         "'conf_proj.weight' has the shape"),
        ({"dflash.sample_from_anchor": 1}, {"markov_w1.weight": ones(299, 8), "markov_w2.weight": ones(299, 8)},
         "sample_from_anchor is 1, true or false"),
        ({}, {"output_norm.weight": np.full(WIDTH, np.nan, np.float32)}, "no number|not a usable"),
    ],
)  # fmt: skip
def test_a_head_that_is_not_sound_is_refused(
    target: LlamaCppEngine, tmp_path: Path, metadata: dict[str, Any], tensors: dict[str, Any], reason: str
) -> None:
    """Named before llama.cpp sees it, which ends the process on some of these."""
    path = write_dflash(tmp_path / "head.gguf", metadata=metadata, tensors=tensors)
    with pytest.raises(ModelFileError, match=reason):
        target.load_dflash(path)


def test_a_truncated_head_is_refused(target: LlamaCppEngine, tmp_path: Path) -> None:
    whole = write_dflash(tmp_path / "head.gguf").read_bytes()
    for size in (10, len(whole) // 4, len(whole) - 2000):
        path = tmp_path / f"cut{size}.gguf"
        path.write_bytes(whole[:size])
        with pytest.raises(ModelFileError):
            target.load_dflash(path)


def test_a_head_of_another_target_is_refused(target: LlamaCppEngine, tmp_path: Path) -> None:
    path = write_dflash(tmp_path / "head.gguf")
    demo = DEMO / "demo-target-q8_0.gguf"
    with (
        LlamaCppEngine.load(demo, threads=TEST_THREADS, context_length=64, reproducible=False) as other,
        pytest.raises(CapabilityError, match="reads a target of width 64, this target has 256"),
    ):
        other.load_dflash(path)
    deep = write_dflash(tmp_path / "deep.gguf", metadata={"dflash.target_layers": [0, 1, 4]})
    with pytest.raises(CapabilityError, match=r"reads layer 4 of its target, this one has 0\.\.3"):
        target.load_dflash(deep)
    tables = {name: ones(300, WIDTH) for name in OWN_TABLES}
    tokens = [*map(str, range(300))]
    changed = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.merges": ["1 2"], "tokenizer.ggml.token_type": None}
    more = write_dflash(tmp_path / "more.gguf", metadata=changed, tensors=tables)
    with pytest.raises(CapabilityError, match="was made for 300 tokens, this target has 299"):
        target.load_dflash(more)
    renamed = write_dflash(tmp_path / "renamed.gguf", metadata=changed | {"tokenizer.ggml.tokens": tokens[:299]})
    with pytest.raises(VocabularyMismatch, match="token 0 is"):
        target.load_dflash(renamed)


@pytest.mark.parametrize("layers", [1, 2, 6])
def test_the_longest_markov_chain_that_is_taken_runs(tmp_path: Path, layers: int) -> None:
    """llama.cpp ends the process where its graph has more nodes than it made room for."""
    shape = replace(DSPARK, layers=layers, drafted=100, has_extras=True, kv_heads=4)
    path = tmp_path / "head.gguf"
    for block in range(MAX_BLOCK, 1, -1):
        write_dflash(path, replace(shape, block=block))
        try:
            sizes = read_dflash(path)
        except CapabilityError as exc:
            assert "smaller blocks" in str(exc)
            continue
        break
    assert 12 < sizes.block_size < MAX_BLOCK
    code = "import sys, pathlib; from edgespec.engines.llamacpp import DFlashHead as Head"
    code += "; Head.try_alone(pathlib.Path(sys.argv[1]))"
    subprocess.run([sys.executable, "-c", code, str(path)], check=True)
    DFlashHead.try_alone(path)
