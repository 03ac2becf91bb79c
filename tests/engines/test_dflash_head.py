"""DFlash and DSpark heads: their maths against numpy, and their cache."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from edgespec.config.values import EngineName
from edgespec.engines.head import DraftHead
from edgespec.engines.llamacpp.engine import LlamaCppEngine
from edgespec.engines.llamacpp.heads import Head
from edgespec.engines.onnx.kernel_engine import KernelEngine
from edgespec.errors import BatchError, Cancelled, CapabilityError, ContextFull, EngineError
from edgespec.formats.gguf.heads import MAX_BLOCK, read_head
from gguf_heads import features_of, head_of, opened
from needs import NEEDS_KERNELS
from tiny_dflash import LAYERS, NUM_TOKENS, TARGET, HeadShape, NumpyBlock, write_dflash
from tiny_gguf import matrices, write_model

TOKENS = np.random.default_rng(5).integers(0, NUM_TOKENS, 100).astype(np.int32)
DSPARK = HeadShape(markov=8, has_confidence=True)
OWN_TABLES = "token_embd.weight", "output.weight"


@pytest.fixture(scope="module")
def target_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("target") / "tiny.gguf", TARGET)


@pytest.fixture
def target(engine_name: EngineName, target_path: Path) -> Iterator[LlamaCppEngine | KernelEngine]:
    with opened(engine_name, target_path, LAYERS) as engine:
        yield engine


def read_of(head: DraftHead, features: np.ndarray) -> np.ndarray:
    """The inputs of the layers that a head reads, of what its target gives."""
    layers = len(head.facts.layers)
    if features.shape[1] == layers * TARGET.width:
        return features
    places = [LAYERS.index(layer) for layer in head.facts.layers]
    return features.reshape(len(features), -1, TARGET.width)[:, places].reshape(len(features), -1)


# -- what a head computes

SHAPES = {
    "own tables": HeadShape(),
    "one layer read": HeadShape(target_layers=(2,), layers=1),
    "a part of the vocabulary": HeadShape(drafted=120),
    "causal": HeadShape(causal=True),
    "sinks": HeadShape(has_sinks=True),
    "windows": HeadShape(window=20, windowed=(True, False)),
    "DSpark": DSPARK,
    "DSpark without confidences": HeadShape(markov=8),
    "DSpark that reads behind the anchor": replace(DSPARK, from_anchor=False),
    "DSpark with a part of the vocabulary": replace(DSPARK, drafted=120),
    "DFlash2": HeadShape(candidates=5),
    "DFlash2 with a part of the vocabulary": HeadShape(candidates=5, drafted=120, causal=True),
    "the longest block": HeadShape(block=MAX_BLOCK),
}


SHARED = (), ("token_embd.weight",), OWN_TABLES  # a head for a part of the vocabulary has its own output
PAIRS = [(shape, SHARED[at % (3 if shape.drafted is None else 2)]) for at, shape in enumerate(SHAPES.values())]
PAIRS += [(HeadShape(), shared) for shared in SHARED[1:]]


@pytest.mark.parametrize(("shape", "shares"), PAIRS)
def test_a_head_computes_what_numpy_does(
    target: LlamaCppEngine | KernelEngine, tmp_path: Path, shape: HeadShape, shares: tuple[str, ...]
) -> None:
    """Behind many tokens and none, behind a rollback, a dropped beginning and a restart."""
    path = write_dflash(tmp_path / "head.gguf", shape, tensors=dict.fromkeys(shares))
    if shape.candidates and isinstance(target, LlamaCppEngine):
        with pytest.raises(CapabilityError, match=r"has DFlash2's selector, which only edgespec's own kernels run"):
            target.load_head(path)
        return
    features = features_of(target, shape.target_layers, TOKENS)
    tables = matrices(TARGET, NUM_TOKENS)
    wanted = NumpyBlock(path, shape, {name: tables[name] for name in OWN_TABLES})
    with head_of(target, path) as head:
        assert head.facts.layers == shape.target_layers
        assert head.facts.most_drafted == (shape.block if shape.markov and shape.from_anchor else shape.block - 1)

        def same(token_id: int) -> None:
            logits, confidences = head.block(token_id)
            known, known_confidences = wanted.block(token_id, head.end)
            assert logits.shape == (head.facts.most_drafted, NUM_TOKENS) == known.shape
            is_drafted = np.isfinite(known)
            assert np.array_equal(np.isfinite(logits), is_drafted)
            allowed = 1e-2 * np.abs(known[is_drafted]).max()
            np.testing.assert_allclose(logits[is_drafted], known[is_drafted], atol=allowed)
            assert (confidences is None) == (known_confidences is None)
            if confidences is not None and known_confidences is not None:
                np.testing.assert_allclose(confidences, known_confidences, atol=1e-2)

        read = read_of(head, features)
        same(7)
        head.inject(features[:30])
        wanted.inject(read[:30], 0)
        same(int(TOKENS[30]))
        same(int(TOKENS[31]))
        head.inject(features[30:34])
        wanted.inject(read[30:34], 30)
        same(int(TOKENS[34]))
        head.rollback(25)
        dropped = 0 if head.facts.keeps_oldest else 11
        head.drop_before(dropped)
        for cache in wanted.cache:
            for position in (*range(dropped), *range(25, 34)):
                del cache[position]
        same(int(TOKENS[25]))
        head.inject(features[25:99])  # more than a pass takes
        wanted.inject(read[25:99], 25)
        same(int(TOKENS[99]))
        head.restart(40)
        for cache in wanted.cache:
            cache.clear()
        head.inject(features[40:44])
        wanted.inject(read[40:44], 40)
        same(int(TOKENS[44]))


@NEEDS_KERNELS
def test_dflash2_chooses_among_the_scores_that_llama_cpp_gives(
    target_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of which each row of its states holds the candidates, and for each of those before them a row of scores."""
    count, shape = 5, HeadShape(candidates=5)
    path, found = write_dflash(tmp_path / "head.gguf", shape), []
    given = replace(read_head(path), has_confidence=True)  # a pass gives states then
    monkeypatch.setattr("edgespec.engines.llamacpp.heads._sizes_of", lambda path: given)
    for name in ("llamacpp", "onnx"):
        with opened(name, target_path, LAYERS) as target, head_of(target, path) as head:
            head.inject(features_of(target, tuple(LAYERS), TOKENS)[:30])
            found.append(head.block(int(TOKENS[30]))[0].copy())
            if isinstance(head, Head):
                lattice = head._states(shape.block)[1:].copy()
    before = 0
    for row, scores in zip(lattice, found[1], strict=True):
        candidates = row[:count].astype(int)
        wanted = row[count : count + count**2].reshape(count, count)[before]
        assert set(candidates) == set(np.flatnonzero(np.isfinite(scores)))
        np.testing.assert_allclose(scores[candidates], wanted, atol=5e-3 * np.abs(wanted).max())
        before = int(wanted.argmax())


@NEEDS_KERNELS
@pytest.mark.parametrize("shape", [HeadShape(context=400, block=12), replace(DSPARK, context=400, causal=True)])
def test_a_block_may_lie_in_two_chunks_of_the_cache(target_path: Path, tmp_path: Path, shape: HeadShape) -> None:
    """And its first rows alone are those of the whole."""
    path, count = write_dflash(tmp_path / "head.gguf", shape), 250
    with opened("onnx", target_path, LAYERS, 400) as target, head_of(target, path) as head:
        features = np.concatenate([features_of(target, tuple(LAYERS), TOKENS)] * 3)[:count]
        head.inject(features)
        wanted = NumpyBlock(path, shape)
        wanted.inject(read_of(head, features), 0)
        found = head.block(7)[0].copy()
        known = wanted.block(7, count)[0]
        np.testing.assert_allclose(found, known, atol=1e-2 * np.abs(known).max())
        assert np.array_equal(head.block(7, 3)[0], found[:3])
        for length in (1, 4):
            head.block(7, length)
            assert np.array_equal(head.block(7)[0], found)


@pytest.mark.parametrize("shape", [HeadShape(), DSPARK, HeadShape(window=20, windowed=(True, False))])
def test_a_block_leaves_no_trace(target: LlamaCppEngine | KernelEngine, tmp_path: Path, shape: HeadShape) -> None:
    path, features = write_dflash(tmp_path / "head.gguf", shape), features_of(target, tuple(LAYERS), TOKENS)
    with head_of(target, path) as used, head_of(target, path) as fresh:
        for end in (0, 3, 3, 20, 21, 30):
            used.inject(features[used.end : end])
            used.block(int(TOKENS[end]))
            used.block(5)
        used.rollback(18)
        used.inject(features[18:26])
        fresh.inject(features[:26])
        found, wanted = (head.block(int(TOKENS[26]))[0] for head in (used, fresh))
        np.testing.assert_allclose(found, wanted, atol=1e-3 * np.abs(wanted).max())


def test_heads_of_several_texts_do_not_see_one_another(target: LlamaCppEngine | KernelEngine, tmp_path: Path) -> None:
    features = features_of(target, tuple(LAYERS), TOKENS)
    with head_of(target, write_dflash(tmp_path / "head.gguf", DSPARK)) as head:
        other = head.another(1)
        head.inject(features[:20])
        before = head.block(9)[0].copy()
        other.inject(features[30:60])
        other.set_threads(1)
        assert not np.allclose(other.block(9)[0], before)
        np.testing.assert_allclose(head.block(9)[0], before, atol=1e-4 * np.abs(before).max())
        head.close()
        with pytest.raises(EngineError, match="closed"):
            other.block(9)


def test_wrong_calls_of_a_head_are_refused(target: LlamaCppEngine | KernelEngine, tmp_path: Path) -> None:
    features = features_of(target, tuple(LAYERS), TOKENS)
    head = head_of(target, write_dflash(tmp_path / "head.gguf"), 8)
    with pytest.raises(BatchError, match=rf"\[n, {head.facts.feature_width}\]"):
        head.inject(features[:, :64])
    for token_id in (-1, NUM_TOKENS):
        with pytest.raises(BatchError, match=f"token id {token_id} is outside"):
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
    calls = lambda: head.block(1), lambda: head.inject(features[:1]), lambda: head.another(1)
    for call in calls[: 1 if isinstance(target, KernelEngine) else 3]:  # a head on the kernels leaves it to its passes
        with pytest.raises(EngineError, match="closed"):
            call()


def test_a_cancelled_head_goes_on_as_if_nothing_had_been(target: LlamaCppEngine | KernelEngine, tmp_path: Path) -> None:
    features = features_of(target, tuple(LAYERS), TOKENS)
    with head_of(target, write_dflash(tmp_path / "head.gguf")) as head:
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
