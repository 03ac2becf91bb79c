"""The operator Attention: right, and the same bits however its rows come: alone, together, in trees, on any path."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest
from numpy.typing import NDArray
from onnx import TensorProto

import tiled
from edgespec.kernels.interface import CHUNK, KernelCache
from tiled import Floats, Rows, bits, chain, node, session

HEADS, KV_HEADS, SIZE, SLOTS, CHUNKS = 6, 2, 64, 3, 3
WIDTH, LENGTH = (HEADS + 2 * KV_HEADS) * SIZE, 2 * CHUNK + 70
INPUTS = {"q": TensorProto.FLOAT, "rows": TensorProto.INT32, "cache": TensorProto.INT64}
ATTRIBUTES = {
    "heads": HEADS,
    "kv_heads": KV_HEADS,
    "head_size": SIZE,
    "first_head": 1,
    "window": 0,
    "scale": 0.125,
    "cap": 0.0,
    "epsilon": 1e-6,
}


@dataclass
class Model:
    """One attention operator, its cache, and joined queries, keys and values of three texts [slots, n, width]."""

    kind: str = "F16"
    threads: int = 1
    window: int = 0
    cap: float = 0.0
    has_norms: bool = False
    has_sinks: bool = False
    gated: int = 0
    weights: dict[str, Floats] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(1)
        self.texts = rng.standard_normal((SLOTS, LENGTH, WIDTH + self.gated * HEADS * SIZE)).astype(np.float32) * 2
        angles = rng.uniform(0, 7, (CHUNKS * CHUNK, SIZE // 2))
        self.weights = {"cosines": np.cos(angles).astype(np.float32), "sines": np.sin(angles).astype(np.float32)}
        if self.has_norms:
            self.weights |= {f"{k}_norm": rng.uniform(0.5, 2, SIZE).astype(np.float32) for k in "qk"}
        if self.has_sinks:
            self.weights["sinks"] = rng.standard_normal(HEADS).astype(np.float32)
        sizes = [32, *[SIZE] * KV_HEADS]  # a layer before this one has a head of another size
        self.cache = KernelCache(self.kind, sizes, SLOTS, CHUNKS)
        names = ["q", "", "", "rows", "cache", "cosines", "sines"]
        names += [name if name in self.weights else "" for name in ("q_norm", "k_norm", "sinks")]
        while not names[-1]:
            names.pop()
        self.session = session(
            [
                node(
                    "Attention",
                    names,
                    ["y"],
                    **(ATTRIBUTES | {"window": self.window, "cap": self.cap, "gated": self.gated}),
                )
            ],
            INPUTS,
            ["y"],
            self.weights,
            self.threads,
        )

    def run(self, joined: Floats, rows: Rows) -> Floats:
        """Results [n, heads * size] of rows (slot, position, cell, parent)."""
        given = {
            "q": joined[None],
            "rows": np.array(rows, np.int32).reshape(-1, 4),
            "cache": np.array([self.cache.number]),
        }
        found: Floats = self.session.run(None, given)[0][0]
        return found

    def chain(self, slot: int, start: int, stop: int) -> Floats:
        return self.run(self.texts[slot, start:stop], chain(slot, start, stop))

    def reference(self, slot: int, block: int = LENGTH) -> NDArray[np.float64]:
        """All results of a text in double precision, keys and values as the cache rounds them (F16).

        Rows from `block` on see one another.
        """
        joined = self.texts[slot].astype(np.float64).reshape(LENGTH, -1, SIZE)
        queries = HEADS * (1 + self.gated)
        q, k, v = np.split(joined, [queries, queries + KV_HEADS], 1)
        q, gates = (q[:, 0::2], q[:, 1::2]) if self.gated else (q, None)
        cos, sin = (self.weights[name][:LENGTH, None].astype(np.float64) for name in ("cosines", "sines"))

        def prepared(x: NDArray[np.float64], kind: str) -> NDArray[np.float64]:
            if self.has_norms:
                x = x / np.sqrt((x * x).mean(2, keepdims=True) + 1e-6) * self.weights[f"{kind}_norm"]
            a, b = np.split(x, 2, 2)
            return np.concatenate([a * cos - b * sin, b * cos + a * sin], 2)

        q, k = prepared(q, "q") * 0.125, prepared(k, "k").astype(np.float16).astype(np.float64)
        v = v.astype(np.float16).astype(np.float64)
        k, v = (x.repeat(HEADS // KV_HEADS, 1) for x in (k, v))
        scores = np.einsum("ihd,jhd->hij", q, k)
        if self.cap:
            scores = self.cap * np.tanh(scores / self.cap)
        i, j = np.ogrid[:LENGTH, :LENGTH]
        scores[:, (j > i) & (i < block) | (bool(self.window) & (j <= i - self.window))] = -np.inf
        weights = np.exp(scores - scores.max(2, keepdims=True))
        total = weights.sum(2)
        if self.has_sinks:
            total += np.exp(self.weights["sinks"][:, None] - scores.max(2))
        found: NDArray[np.float64] = np.einsum("hij,jhd->ihd", weights / total[..., None], v)
        if gates is not None:
            found = found / (1 + np.exp(-gates))
        return found.reshape(LENGTH, -1)


def cut(rng: np.random.Generator, most: int) -> Iterator[tuple[int, int]]:
    start = 0
    while start < LENGTH:
        stop = min(start + int(rng.integers(1, most)), LENGTH)
        yield start, stop
        start = stop


VARIANTS = [{}, {"window": 90}, {"window": 300, "cap": 5.0}, {"has_norms": True}, {"has_sinks": True}, {"gated": 1}]


@pytest.mark.parametrize("variant", VARIANTS)
def test_results_are_those_of_double_precision(variant: dict[str, bool]) -> None:
    model = Model(**variant)
    got = np.concatenate([model.chain(1, start, stop) for start, stop in cut(np.random.default_rng(0), 200)])
    np.testing.assert_allclose(got, model.reference(1), rtol=0, atol=8e-3)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("count", [3, 80])
def test_rows_of_a_block_see_one_another(variant: dict[str, bool], count: int) -> None:
    """And have the same bits beside other texts, with more threads, and where the block was there before."""
    start, found = LENGTH - count, []
    rows = [(1, at, at, at - LENGTH) for at in range(start, LENGTH)]
    for threads, others in ((1, 0), (3, 7)):
        model = Model(threads=threads, **variant)
        model.chain(1, 0, start)
        joined = np.concatenate((model.texts[0, :others], model.texts[1, start:]))
        for _ in range(2):
            found.append(model.run(joined, [*chain(0, 0, others), *rows])[others:])
    np.testing.assert_allclose(found[0], model.reference(1, start)[start:], rtol=0, atol=8e-3)
    assert all(np.array_equal(bits(each), bits(found[0])) for each in found)


def test_a_q8_0_cache_is_near_a_f16_one() -> None:
    near, exact = (Model(kind=kind).chain(0, 0, 300) for kind in ("Q8_0", "F16"))
    assert 0 < np.abs(near - exact).mean() < 0.02


@pytest.mark.parametrize(
    ("kind", "variant", "threads"),
    [("F16", {}, 3), ("Q8_0", {}, 1), ("F16", {"window": 90}, 1), ("Q8_0", {"has_norms": True, "gated": 1}, 3)],
)
def test_rows_have_the_bits_that_they_have_alone(kind: str, variant: dict[str, bool], threads: int) -> None:
    alone = Model(kind, **variant)
    expected = np.concatenate([alone.chain(0, at, at + 1) for at in range(LENGTH)])
    for seed, most in enumerate((3, 20, 60, LENGTH + 1)):
        model = Model(kind, threads, **variant)
        got = np.concatenate([model.chain(0, start, stop) for start, stop in cut(np.random.default_rng(seed), most)])
        np.testing.assert_array_equal(bits(got), bits(expected))


@pytest.mark.parametrize("threads", [1, 2])
def test_texts_that_share_passes_have_their_own_bits(threads: int) -> None:
    model, got = Model(threads=threads), np.zeros((SLOTS, LENGTH, HEADS * SIZE), np.float32)
    for parts, rows in tiled.shared_passes(SLOTS, LENGTH):
        found = model.run(np.concatenate([model.texts[slot, start:stop] for slot, start, stop in parts]), rows)
        for (slot, position, *_), result in zip(rows, found, strict=True):
            got[slot, position] = result
    for slot in range(SLOTS):
        np.testing.assert_array_equal(bits(got[slot]), bits(Model().chain(slot, 0, LENGTH)))


@pytest.mark.parametrize(("kind", "window"), [("F16", 0), ("F16", 40), ("Q8_0", 40)])
@pytest.mark.parametrize("base", [0, 37, CHUNK - 5, 2 * CHUNK - 1])
def test_branches_of_a_tree_have_the_bits_of_chains(kind: str, window: int, base: int) -> None:
    rng = np.random.default_rng(base)
    rows, paths = tiled.tree(rng, base, 30)
    model = Model(kind, window=window)
    tokens = rng.standard_normal((30, WIDTH)).astype(np.float32)
    if base:
        model.chain(0, 0, base)
    got = model.run(tokens, rows)
    for path in paths:
        expected = model_after(kind, window, base).run(tokens[path], chain(0, base, base + len(path)))
        np.testing.assert_array_equal(bits(got[path]), bits(expected))


_models: dict[tuple[str, int, int], Model] = {}


def model_after(kind: str, window: int, base: int) -> Model:
    """A model whose first text has `base` tokens; what follows them is overwritten by each test."""
    key = kind, window, base
    if key not in _models:
        _models.clear()
        _models[key] = Model(kind, window=window)
        if base:
            _models[key].chain(0, 0, base)
    return _models[key]


@pytest.mark.parametrize("kind", ["F16", "Q8_0"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_all_paths_give_the_same_bits_and_caches(kind: str, variant: dict[str, bool], paths: list[str]) -> None:
    found = []
    for path in paths:
        assert tiled.choose_path(path)
        model = Model(kind, **variant)
        model.texts *= 10.0 ** np.random.default_rng(0).uniform(-6, 1, (SLOTS, LENGTH, 1)).astype(np.float32)
        parts = [model.chain(0, 0, 250), model.chain(0, 250, 257), model.chain(0, 257, 300)]
        found.append((bits(np.concatenate(parts)), model.cache.memory.copy()))
    for result, memory in found[1:]:
        np.testing.assert_array_equal(memory, found[0][1])
        np.testing.assert_array_equal(result, found[0][0])


@pytest.mark.parametrize("kind", ["F16", "Q8_0"])
def test_cells_are_read_and_written_back(kind: str) -> None:
    model, other = Model(kind), Model(kind)
    expected = model.chain(0, 0, 300)
    kept = model.cache.read(0, np.arange(290, dtype=np.int32))
    assert kept.nbytes == 304 * model.cache.bytes_per_token
    other.cache.write(2, np.arange(290, dtype=np.int32), kept)
    got = other.run(other.texts[0, 290:300], chain(2, 290, 300))
    np.testing.assert_array_equal(bits(got), bits(expected[290:]))
    with pytest.raises(ValueError, match="not the keys and values of 291 tokens"):
        other.cache.write(2, np.arange(306, dtype=np.int32)[:291], kept[:-1])
    with pytest.raises(ValueError, match="outside the cache"):
        model.cache.read(3, np.arange(4, dtype=np.int32))
    with pytest.raises(ValueError, match="outside the cache"):
        model.cache.read(0, np.array([CHUNKS * CHUNK], np.int32))


def test_rows_outside_the_cache_are_errors() -> None:
    model = Model()
    for row, message in (
        ((3, 0, 0, -1), "slot 3"),
        ((-1, 0, 0, -1), "slot -1"),
        ((0, -1, 0, -1), "position -1"),
        ((0, CHUNKS * CHUNK, 0, -1), f"position {CHUNKS * CHUNK}"),
        ((0, 0, CHUNKS * CHUNK, -1), f"cell {CHUNKS * CHUNK}"),
        ((0, 0, -1, -1), "cell -1"),
        ((0, 1, 1, 0), "parent 0"),
        ((0, 1, 1, -2), "parent -2"),  # nothing fills the cell behind it
        ((0, 1, 1, -(1 << 31)), "parent -2147483648"),
    ):
        with pytest.raises(Exception, match=message):
            model.run(model.texts[0, :1], [row])
    model.cache.close()
    with pytest.raises(Exception, match="a cache that nobody holds"):
        model.run(model.texts[0, :1], [(0, 0, 0, -1)])


def test_attributes_that_cannot_be_are_named() -> None:
    for change, message in (
        ({"heads": 5}, "5 heads of size 64 for 2"),
        ({"head_size": 60}, "size 60"),
        ({"head_size": 2048}, "size 2048"),
        ({"first_head": -1}, "number -1"),
        ({"window": -1}, "window -1"),
        ({"gated": 2}, "6 heads of size 64"),
    ):
        attention = node("Attention", ["q", "", "", "rows", "cache"], ["y"], **(ATTRIBUTES | change))
        with pytest.raises(Exception, match=message):
            session([attention], INPUTS, ["y"], {})


def test_heads_outside_the_cache_are_errors() -> None:
    model = Model()
    for change, message in (
        ({"first_head": 2}, "heads 2 to 3 are outside"),
        ({"first_head": 0}, "those of its cache 32"),
    ):
        attention = node("Attention", ["q", "", "", "rows", "cache"], ["y"], **(ATTRIBUTES | change))
        model.session = session([attention], INPUTS, ["y"], {})
        with pytest.raises(Exception, match=message):
            model.run(model.texts[0, :1], [(0, 0, 0, -1)])


@pytest.mark.parametrize("threads", [1, 2])
def test_norm_of_a_sum(threads: int) -> None:
    rng = np.random.default_rng(2)
    x, delta = (rng.standard_normal((1, 300, 1000)).astype(np.float32) for _ in range(2))
    weight = {"weight": rng.standard_normal(1000).astype(np.float32)}
    given = {"x": TensorProto.FLOAT, "delta": TensorProto.FLOAT}
    model = session(
        [node("Norm", ["x", "weight", "delta"], ["y", "sum"], epsilon=1e-5)], given, ["y", "sum"], weight, threads
    )
    normed, total = model.run(None, {"x": x, "delta": delta})
    np.testing.assert_array_equal(total, x + delta)
    wide = total.astype(np.float64)
    np.testing.assert_allclose(
        normed, wide / np.sqrt((wide**2).mean(2, keepdims=True) + 1e-5) * weight["weight"], rtol=1e-5
    )
    alone = np.concatenate(
        [model.run(None, {"x": x[:, i : i + 1], "delta": delta[:, i : i + 1]})[0] for i in range(300)], 1
    )
    np.testing.assert_array_equal(bits(alone), bits(normed))
    plain = session([node("Norm", ["x", "weight"], ["y"], epsilon=1e-5)], {"x": TensorProto.FLOAT}, ["y"], weight)
    np.testing.assert_array_equal(bits(plain.run(None, {"x": total})[0]), bits(normed))
    unnamed = session([node("Norm", ["x", "weight", "delta"], ["y", ""], epsilon=1e-5)], given, ["y"], weight)
    np.testing.assert_array_equal(bits(unnamed.run(None, {"x": x, "delta": delta})[0]), bits(normed))
