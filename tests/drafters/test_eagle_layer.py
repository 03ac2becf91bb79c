"""The layer of an EAGLE head in ONNX Runtime against numpy's: the same numbers nearly, the same drafts, fewer bytes."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from demo import DEMO
from edgespec.drafters import eagle
from edgespec.drafters.eagle import EagleDrafter
from edgespec.drafters.head_layer import NumpyLayer, numpy_layer
from edgespec.engines.head import HeadLayer, NewPairs, Pairs
from edgespec.engines.onnx.eagle import FIRST_POSITIONS, OnnxLayer
from edgespec.errors import EngineError
from edgespec.formats.head_file import HeadFile, HeadManifest, read_head_file
from head_tables import request


@pytest.fixture(scope="module")
def heads() -> HeadFile:
    return read_head_file(DEMO / "heads" / "eagle.npz")


def drafter_of(heads: HeadFile) -> EagleDrafter:
    return EagleDrafter(heads, heads.manifest.vocabulary_size, frozenset())


def cosine(first: np.ndarray, second: np.ndarray) -> float:
    return float((first * second).sum() / (np.linalg.norm(first) * np.linalg.norm(second)))


def odd_heads(head_dim: int = 16) -> HeadFile:
    """Random heads whose widths no group of weights divides."""
    manifest = HeadManifest(
        "eagle", 3, 30, 60, "random", "-", heads=2, kv_heads=1, head_dim=head_dim, ffn=22, scale=0.5
    )
    rng = np.random.default_rng(0)
    arrays = {name: rng.normal(0, 0.2, shape).astype(np.float32) for name, shape in manifest.shapes().items()}
    ids = np.arange(50, dtype=np.int32)
    vocabulary = rng.normal(0, 0.2, (50, 30)).astype(np.float32)
    return HeadFile(manifest, arrays, vocabulary, ids, ids[:4], np.zeros((4, 30), np.float32))


def all_read(layer: HeadLayer, heads: HeadFile, *, is_tree: bool) -> list[np.ndarray]:
    """Several pairs, single ones behind them, and a few that see the text and some of one another."""
    rng, pairs = np.random.default_rng(1), Pairs.room(heads.manifest, 40)

    def read(count: int, **asked: Any) -> list[np.ndarray]:
        states, embedded = rng.standard_normal((2, count, heads.manifest.hidden_size)).astype(np.float32)
        positions = asked.pop("positions", np.arange(pairs.length, pairs.length + count))
        return [each.copy() for each in layer.read(pairs, NewPairs(states, embedded, positions, **asked))]

    found = read(6) + read(1) + read(1) + read(3, scored=2) + read(10, scored=2)
    if is_tree:
        sees = np.ones((4, pairs.length + 4), bool)
        sees[:, -4:] = np.eye(4)
        sees[3, -4] = True
        found += read(4, positions=np.array([11, 11, 11, 12]), sees=sees, scored=4)
    return [*found, pairs.keys[:, :, : pairs.length], pairs.values[:, :, : pairs.length]]


@pytest.mark.parametrize("is_tree", [False, True])
def test_both_compute_the_same_layer(heads: HeadFile, is_tree: bool) -> None:
    for given, least in ((heads, 0.999), (odd_heads(), 0.999999)):  # odd widths keep float32
        found = []
        for layer in (NumpyLayer(given), OnnxLayer(given, threads=1)):
            with layer:
                found.append(all_read(layer, given, is_tree=is_tree))
        for exact, quantised in zip(*found, strict=True):
            assert exact.shape == quantised.shape
            assert cosine(exact, quantised) > least


def test_a_window_goes_on_as_if_nothing_had_been_dropped(heads: HeadFile) -> None:
    """Pairs that are no longer seen may be gone, and the tables of positions grow."""
    rng = np.random.default_rng(2)
    states, embedded = rng.standard_normal((2, 12, heads.manifest.hidden_size)).astype(np.float32)
    places = np.arange(12) + FIRST_POSITIONS - 6
    with OnnxLayer(heads, threads=1) as layer:
        whole = Pairs.room(heads.manifest, 40)
        layer.read(whole, NewPairs(states[:1], embedded[:1], np.zeros(1, np.int64)))  # an empty cache counts from 0
        for at in range(1, 9):
            layer.read(whole, NewPairs(states[at : at + 1], embedded[at : at + 1], places[at : at + 1]))
        kept = Pairs.room(heads.manifest, 7)
        kept.keys[:, :, :5], kept.values[:, :, :5], kept.length = whole.keys[:, :, 4:9], whole.values[:, :, 4:9], 5
        sees = np.arange(10)[None] >= 4
        new = NewPairs(states[9:10], embedded[9:10], places[9:10])
        expected = [x.copy() for x in layer.read(whole, new._replace(sees=sees))]
        found = layer.read(kept, new)
        for one, other in zip(expected, found, strict=True):
            assert cosine(one, other) > 0.999  # inputs of products are rounded to 8 bits


def test_a_size_of_heads_that_onnx_runtime_refuses_is_read_by_numpy() -> None:
    assert not OnnxLayer.takes(odd_heads(6))
    with pytest.raises(EngineError), OnnxLayer(odd_heads(6), threads=1) as layer:
        all_read(layer, odd_heads(6), is_tree=False)
    with numpy_layer(odd_heads(6)) as layer:
        assert all_read(layer, odd_heads(6), is_tree=True)[0].shape == (1, 30)


@pytest.mark.parametrize("branches", [0, 4])
def test_drafts_are_those_of_numpy(heads: HeadFile, branches: int) -> None:
    """At the demo's own probe, whose states are real ones."""
    chosen = []
    for layer in (None, OnnxLayer(heads, threads=1)):
        with closing(EagleDrafter(heads, heads.manifest.vocabulary_size, frozenset(), layer=layer)) as drafter:
            text = np.append(heads.probe_ids, heads.probe_ids[-1])
            asked = request(text, heads.probe_states)._replace(max_branches=branches)
            drafts = [drafter.draft(asked), drafter.draft(asked)]  # the second one reads no pair
            assert list(drafts[0].token_ids) == list(drafts[1].token_ids)
            chosen.append(list(drafts[0].token_ids))
    assert chosen[0] == chosen[1]


def long_text(heads: HeadFile, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens, and states that are the demo's own in another order, so that no two places look alike."""
    rng = np.random.default_rng(4)
    chosen = rng.integers(0, len(heads.probe_ids), count)
    states = heads.probe_states[chosen] + rng.normal(0, 0.1, (count, heads.probe_states.shape[1])).astype(np.float32)
    return np.append(heads.probe_ids[chosen], heads.probe_ids[-1]), states


def all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eagle, "AT_ONCE", 10_000)
    monkeypatch.setattr(eagle, "MOST_NEW", 10_000)


@pytest.mark.parametrize("at_once", [1, 5, 64])
def test_a_long_text_is_read_over_several_drafts(
    heads: HeadFile, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    text, states = long_text(heads, 300)
    with monkeypatch.context() as patched, closing(drafter_of(heads)) as drafter:
        patched.setattr(eagle, "AT_ONCE", at_once)
        patched.setattr(eagle, "MOST_NEW", 2 * at_once)
        read, first = 0, 270
        for end in range(first, 301):
            before, expected = drafter._pairs.length, drafter.num_uncached(text[: end + 1])
            found = drafter.draft(request(text[: end + 1], states[:end]))
            assert drafter._pairs.length - before == expected <= 2 * at_once
            read += expected
        assert read == min(300, at_once + 30 * (at_once + 1))
    known = states[300 - read :]  # what was not read yet is not seen either
    all_at_once(monkeypatch)
    with closing(drafter_of(heads)) as other:
        whole = other.draft(request(text, known))
        assert other._pairs.length == read
    assert whole.token_ids.tolist() == found.token_ids.tolist()
    np.testing.assert_allclose(whole.evidence, found.evidence, atol=1e-3)


def test_what_is_out_of_sight_goes_and_positions_begin_anew(heads: HeadFile, monkeypatch: pytest.MonkeyPatch) -> None:
    text, states = long_text(heads, 400)
    monkeypatch.setattr(eagle, "WINDOW", 30)
    largest, dropped = 0, 0
    with closing(drafter_of(heads)) as drafter:
        read = drafter._layer.read

        def watched(pairs: Pairs, new: NewPairs) -> Any:
            nonlocal largest
            largest = max(largest, int(new.positions.max()))
            return read(pairs, new)

        monkeypatch.setattr(drafter._layer, "read", watched)
        for end in range(100, 401):
            before = drafter._pairs
            found = drafter.draft(request(text[: end + 1], states[max(end - 30, 0) : end]))
            if drafter._pairs is not before and end > 100:
                dropped += 1
                with monkeypatch.context() as patched, closing(drafter_of(heads)) as other:
                    all_at_once(patched)
                    seen = drafter._pairs.length
                    patched.setattr(eagle, "WINDOW", seen)
                    afresh = other.draft(request(text[: end + 1], states[end - seen : end]))
                assert afresh.token_ids.tolist() == found.token_ids.tolist()
                np.testing.assert_allclose(afresh.evidence, found.evidence, atol=1e-3)
    assert dropped > 3
    assert largest < 150


def test_a_quantised_layer_takes_less_than_half_of_the_bytes(heads: HeadFile) -> None:
    in_eight_bits = OnnxLayer(heads, threads=1)
    drafters = [
        EagleDrafter(heads, heads.manifest.vocabulary_size, frozenset(), layer=layer) for layer in (None, in_eight_bits)
    ]
    exact, quantised = (drafter._layer.num_bytes for drafter in drafters)
    vocabulary = heads.vocabulary.nbytes  # which numpy's layer shares with the drafter
    tables = sum(table.nbytes for table in in_eight_bits._tables)  # of positions, which numpy computes
    assert quantised - tables < 0.42 * (exact + vocabulary)
    assert quantised < drafters[1].bytes_used < 0.65 * drafters[0].bytes_used + tables
    for drafter in drafters:
        drafter.close()


def test_a_failure_of_the_library_is_translated(heads: HeadFile) -> None:
    rows, pairs = np.zeros((1, heads.manifest.hidden_size), np.float32), Pairs.room(heads.manifest, 1)
    with OnnxLayer(heads, threads=1) as layer:
        layer.read(pairs, NewPairs(rows, rows, np.zeros(1, np.int64)))
        with pytest.raises(EngineError):
            layer.read(pairs, NewPairs(rows, rows, np.ones(1, np.int64)))  # no room
        assert pairs.length == 1


def test_rows_are_scaled_as_the_heads_say(heads: HeadFile) -> None:
    doubled = replace(heads, manifest=replace(heads.manifest, scale=2 * heads.manifest.scale))
    once, twice = (all_read(OnnxLayer(each, threads=1), heads, is_tree=False)[1] for each in (heads, doubled))
    assert np.allclose(2 * once, twice, rtol=1e-4, atol=1e-4)
