"""The layer of an EAGLE head on the kernels against numpy's: pairs in parts and at once, trees."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from demo import DEMO
from edgespec.engines.head import States
from edgespec.engines.onnx.file_heads import NEVER, EagleHead, load_eagle
from edgespec.errors import CapabilityError
from edgespec.formats.head_file import HeadFile, HeadManifest, read_head_file
from needs import NEEDS_KERNELS
from numpy_layers import eagle_layer
from table_engine import LetterVocabulary

pytestmark = NEEDS_KERNELS
COUNT = 14


def random_file(width: int, *, head_dim: int = 16, **more: Any) -> HeadFile:
    manifest = HeadManifest(
        *("eagle", 3, width, 60, "random", "-"),
        **{"heads": 2, "kv_heads": 1, "head_dim": head_dim, "ffn": 22, "scale": 0.5, **more},
    )
    rng = np.random.default_rng(0)
    arrays = {name: rng.normal(0, 0.2, shape).astype(np.float32) for name, shape in manifest.shapes().items()}
    arrays |= {name: 1 + arrays[name] for name in arrays if name.endswith("norm")}
    ids = np.arange(50, dtype=np.int32)
    vocabulary = rng.normal(0, 0.2, (50, width)).astype(np.float32)
    probe = np.zeros((4, manifest.feature_size), np.float32)
    return HeadFile(manifest, arrays, vocabulary, ids, ids[:4], probe)


FILES = {
    "demo": lambda: read_head_file(DEMO / "heads" / "eagle.npz"),
    "odd widths": lambda: random_file(30),
    "of a projection": lambda: random_file(64, feature_size=96),
}


@pytest.fixture(params=FILES)
def heads(request: pytest.FixtureRequest) -> HeadFile:
    return FILES[request.param]()


def opened(heads: HeadFile) -> EagleHead:
    return load_eagle(heads, LetterVocabulary(heads.manifest.vocabulary_size), heads.manifest.layers, threads=1)


def exact(heads: HeadFile, states: States, embedded: States, sees: NDArray[np.bool_]) -> tuple[States, States]:
    """(states that follow, scores) of pairs that each `sees` [n, n], by the papers' definition."""
    after, last = eagle_layer(heads.manifest, heads.arrays, states, embedded, sees)
    return after, last @ heads.frequent_rows.T * heads.manifest.scale


def cosine(one: States, other: States) -> float:
    return float((one * other).sum() / np.linalg.norm(one) / np.linalg.norm(other))


def test_pairs_and_trees_are_those_of_the_definition(heads: HeadFile) -> None:
    rng, sizes = np.random.default_rng(1), heads.manifest
    least = 0.9995 if sizes.hidden_size % 32 else 0.998  # the others' weights and inputs have 8 bits
    states = rng.standard_normal((COUNT, sizes.hidden_size)).astype(np.float32)
    ids = heads.token_ids[rng.integers(0, len(heads.token_ids), COUNT)]
    parents = [-1, 0, 0, 2]
    sees = np.tri(COUNT, dtype=bool)
    sees[-3:, -4:] = [[1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]]
    with closing(opened(heads)) as head:
        embedded = head._text.embed(ids)
        wanted_states, wanted = exact(heads, states, embedded, sees)
        text = COUNT - len(parents)
        found = []
        for first, end in ((0, 6), (6, 7), (7, text)):
            logits, state = head.decode(ids[first:end], states[first:end])
            found.append((logits[heads.token_ids].copy(), state.copy()))
        assert head.end == text and (logits[np.setdiff1d(np.arange(len(logits)), heads.token_ids)] == NEVER).all()
        rows, after = head.branch(ids[text:], states[text:], parents, [1, 3])
        assert head.end == text
        for logits, state, at in (
            *((*each, end - 1) for each, end in zip(found, (6, 7, text), strict=True)),
            (rows[0][heads.token_ids], after[0], text + 1),
            (rows[1][heads.token_ids], after[1], text + 3),
        ):
            assert cosine(logits, wanted[at]) > least and cosine(state, wanted_states[at]) > least
        with closing(opened(heads)) as whole:  # a pair's bits do not depend on what is read with it
            logits, state = whole.decode(ids[:text], states[:text])
            np.testing.assert_array_equal(logits[heads.token_ids], found[-1][0])
            np.testing.assert_array_equal(state, found[-1][1])


def test_rows_are_scaled_as_the_heads_say() -> None:
    heads = random_file(30)
    doubled = replace(heads, manifest=replace(heads.manifest, scale=1.0))
    rows = []
    for each in (heads, doubled):
        with closing(opened(each)) as head:
            rows.append(head.decode(heads.token_ids[:3], np.ones((3, 30), np.float32))[0][:50].copy())
    np.testing.assert_allclose(2 * rows[0], rows[1], rtol=1e-5)


def test_a_size_that_the_kernels_lack_is_named() -> None:
    with pytest.raises(CapabilityError, match="24 values in a head of attention; allowed: multiples of 16"):
        opened(random_file(32, head_dim=24))
