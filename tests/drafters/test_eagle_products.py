"""Products of an EAGLE head in ONNX Runtime against numpy's: the same numbers nearly, the same drafts, fewer bytes."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest

from demo import DEMO
from edgespec.drafters.eagle import EagleDrafter
from edgespec.drafters.products import NumpyProducts
from edgespec.engines.onnx.eagle import OnnxProducts
from edgespec.errors import EngineError
from edgespec.formats.head_file import HeadFile, HeadManifest, read_head_file
from head_tables import request


@pytest.fixture(scope="module")
def heads() -> HeadFile:
    return read_head_file(DEMO / "heads" / "eagle.npz")


def cosine(first: np.ndarray, second: np.ndarray) -> float:
    return float((first * second).sum() / (np.linalg.norm(first) * np.linalg.norm(second)))


def odd_heads() -> HeadFile:
    """Random heads whose widths no group of weights divides."""
    manifest = HeadManifest("eagle", 3, 30, 60, "random", "-", heads=2, kv_heads=1, head_dim=6, ffn=22, scale=0.5)
    rng = np.random.default_rng(0)
    arrays = {name: rng.normal(0, 0.2, shape).astype(np.float32) for name, shape in manifest.shapes().items()}
    ids = np.arange(50, dtype=np.int32)
    vocabulary = rng.normal(0, 0.2, (50, 30)).astype(np.float32)
    return HeadFile(manifest, arrays, vocabulary, ids, ids[:4], np.zeros((4, 30), np.float32))


@pytest.mark.parametrize("rows", [1, 5])
def test_both_compute_the_same_layer(heads: HeadFile, rows: int) -> None:
    for given, least in ((heads, 0.999), (odd_heads(), 0.999999)):  # odd widths keep float32
        rng = np.random.default_rng(rows)
        states, embedded = rng.standard_normal((2, rows, given.manifest.hidden_size)).astype(np.float32)
        found = []
        for products in (NumpyProducts(given), OnnxProducts(given, threads=1)):
            with products:
                x, together = products.before(states, embedded)
                attended = together[:, : given.manifest.heads * given.manifest.head_dim]
                found.append((x, together, *products.after(x, np.ascontiguousarray(attended))))
        for exact, quantised in zip(*found, strict=True):
            assert exact.shape == quantised.shape
            assert cosine(exact, quantised) > least


@pytest.mark.parametrize("branches", [0, 4])
def test_drafts_are_those_of_numpy(heads: HeadFile, branches: int) -> None:
    """At the demo's own probe, whose states are real ones."""
    chosen = []
    for products in (None, OnnxProducts(heads, threads=1)):
        with closing(EagleDrafter(heads, heads.manifest.vocabulary_size, frozenset(), products=products)) as drafter:
            text = np.append(heads.probe_ids, heads.probe_ids[-1])
            asked = request(text, heads.probe_states)._replace(max_branches=branches)
            drafts = [drafter.draft(asked), drafter.draft(asked)]  # the second one reads no pair
            assert list(drafts[0].token_ids) == list(drafts[1].token_ids)
            chosen.append(list(drafts[0].token_ids))
    assert chosen[0] == chosen[1]


def test_quantised_products_take_a_third_of_the_bytes(heads: HeadFile) -> None:
    drafters = [
        EagleDrafter(heads, heads.manifest.vocabulary_size, frozenset(), products=products)
        for products in (None, OnnxProducts(heads, threads=1))
    ]
    exact, quantised = (drafter._products.num_bytes for drafter in drafters)
    vocabulary = heads.vocabulary.nbytes  # which numpy's products share with the drafter
    assert quantised < 0.34 * (exact + vocabulary)
    assert quantised < drafters[1].bytes_used < 0.6 * drafters[0].bytes_used
    for drafter in drafters:
        drafter.close()


def test_a_failure_of_the_library_is_translated(heads: HeadFile) -> None:
    with OnnxProducts(heads, threads=1) as products, pytest.raises(EngineError):
        products.before(np.zeros((1, 3), np.float32), np.zeros((1, 3), np.float32))


def test_rows_are_scaled_as_the_heads_say(heads: HeadFile) -> None:
    doubled = replace(heads, manifest=replace(heads.manifest, scale=2 * heads.manifest.scale))
    rng = np.random.default_rng(0)
    x = rng.standard_normal((1, heads.manifest.hidden_size)).astype(np.float32)
    attended = np.zeros((1, heads.manifest.heads * heads.manifest.head_dim), np.float32)
    once, twice = (OnnxProducts(each, threads=1).after(x, attended)[1] for each in (heads, doubled))
    assert np.allclose(2 * once, twice, rtol=1e-4, atol=1e-4)
