"""The operators in ONNX Runtime: the kernels' bits for any number of threads; bad graphs are errors that say why."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from onnx import TensorProto

import tiled
from edgespec.kernels import interface
from tiled import Bytes, Floats, bits, dequantised, node, packed, random_rows, session

KINDS, OUTPUTS, INPUTS = ("Q4_K", "Q8_0", "F16"), (200, 33, 16), 512
TYPES = [interface.TYPES[kind] for kind in KINDS]
X = {"x": TensorProto.FLOAT}


@pytest.fixture(scope="module")
def weights() -> dict[str, Bytes | Floats]:
    rng = np.random.default_rng(0)
    made: dict[str, Bytes | Floats] = {"bias": rng.standard_normal(sum(OUTPUTS)).astype(np.float32)}
    for i, (kind, outputs) in enumerate(zip(KINDS, OUTPUTS, strict=True)):
        made[f"w{i}"] = packed(kind, random_rows(kind, outputs, INPUTS, rng), INPUTS)
    return made


def direct(weights: dict[str, Bytes | Floats], x: Floats) -> Floats:
    ends = np.cumsum(OUTPUTS)[:-1]
    parts = zip(KINDS, OUTPUTS, np.split(weights["bias"], ends), strict=True)
    return np.concatenate([tiled.product(k, weights[f"w{i}"], n, x, b) for i, (k, n, b) in enumerate(parts)], 1)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("num_outputs", [1, 3])
def test_operator_gives_the_kernels_bits(weights: dict[str, Bytes | Floats], threads: int, num_outputs: int) -> None:
    names = [f"y{i}" for i in range(num_outputs)]
    product = node("TiledMatMul", ["x", "bias", "w0", "w1", "w2"], names, K=INPUTS, types=TYPES, outputs=list(OUTPUTS))
    model = session([product], X, names, weights, threads)
    x = np.random.default_rng(1).standard_normal((1100, INPUTS)).astype(np.float32)
    expected = bits(direct(weights, x))
    for shape in ((1,), (1, 2), (3, 7, 3), (70,), (1, 1100), (1, 0), (0,)):
        rows = int(np.prod(shape))
        got = model.run(None, {"x": x[:rows].reshape(*shape, INPUTS)})
        assert [part.shape for part in got] == [(*shape, n) for n in ((sum(OUTPUTS),) if num_outputs == 1 else OUTPUTS)]
        together = np.concatenate([part.reshape(rows, part.shape[-1]) for part in got], 1)
        np.testing.assert_array_equal(bits(together), expected[:rows])


def test_threads_that_run_one_session_at_once_do_not_disturb_each_other(weights: dict[str, Bytes | Floats]) -> None:
    product = node("TiledMatMul", ["x", "bias", "w0", "w1", "w2"], ["y"], K=INPUTS, types=TYPES, outputs=list(OUTPUTS))
    model = session([product], X, ["y"], weights, 2)
    xs = np.random.default_rng(2).standard_normal((40, 5, INPUTS)).astype(np.float32)
    with ThreadPoolExecutor(4) as pool:
        got = list(pool.map(lambda x: model.run(None, {"x": x})[0], xs))
    np.testing.assert_array_equal(bits(np.concatenate(got)), bits(direct(weights, xs.reshape(-1, INPUTS))))


@pytest.mark.parametrize("kind", ["Q4_K", "Q8_0"])
def test_an_enormous_value_does_not_cost_its_block_the_small_ones(kind: str, paths: list[str]) -> None:
    """Such a row errs like a row without it, and has the same bits alone, among a thousand and on every path."""
    rng = np.random.default_rng(3)
    rows = random_rows(kind, 40, INPUTS, rng)
    product = node("TiledMatMul", ["x", "", "w"], ["y"], K=INPUTS, types=[interface.TYPES[kind]], outputs=[40])
    model = session([product], X, ["y"], {"w": packed(kind, rows, INPUTS)}, 2)
    matrix = dequantised(kind, rows).astype(np.float64).T
    x, uneven = rng.standard_normal((1100, INPUTS)).astype(np.float32), [0, 5, 700, *range(900, 1000)]
    even_error = np.abs(model.run(None, {"x": x})[0] - x @ matrix).mean()
    x[uneven, 3] = 3000
    got = model.run(None, {"x": x})[0]
    assert np.abs(got - x @ matrix)[uneven].mean() < even_error
    for path in paths:
        assert tiled.choose_path(path)
        alone = [model.run(None, {"x": x[row : row + 1]})[0] for row in uneven[:5]]
        np.testing.assert_array_equal(bits(np.concatenate(alone)), bits(got[uneven[:5]]))


def test_weights_and_bias_may_be_inputs_and_left_out(weights: dict[str, Bytes | Floats]) -> None:
    product = node("TiledMatMul", ["x", "", "w0"], ["y"], K=INPUTS, types=TYPES[:1], outputs=[200])
    model = session([product], X | {"w0": TensorProto.UINT8}, ["y"], {})
    x = np.ones((1, INPUTS), np.float32)
    got = model.run(None, {"x": x, "w0": weights["w0"]})[0]
    np.testing.assert_array_equal(bits(got), bits(tiled.product("Q4_K", weights["w0"], 200, x)))
    with pytest.raises(Exception, match=f"w0 has {weights['w0'].size - 1} bytes, its type and size need"):
        model.run(None, {"x": x, "w0": weights["w0"][1:]})
    with pytest.raises(Exception, match="x has 256 inputs, expected 512"):
        model.run(None, {"x": x[:, :256], "w0": weights["w0"]})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"types": [12]}, "1 types and 3 outputs"),
        ({"types": [], "outputs": []}, "types"),
        ({"types": [12, 8, 1, 1], "outputs": [200, 33, 16, 16]}, "4 types and 4 outputs"),
        ({"types": [12, 8, 99]}, "16 outputs x 512 inputs of type 99"),
        ({"types": [12, 8, 2**32 + 1]}, "of type 4294967297"),
        ({"outputs": [200, 33, 0]}, "0 outputs x 512 inputs of type 1"),
        ({"outputs": [200, -33, 16]}, "-33 outputs"),
        ({"outputs": [200, 33, 2**61]}, "outputs x 512 inputs of type 1"),
        ({"outputs": [200, 49, 16]}, "w1 has .* bytes"),
        ({"K": 500}, "500 inputs of type 12"),
        ({"K": 0}, "0 inputs"),
        ({"K": -512}, "-512 inputs"),
        ({"K": 256}, "w0 has .* bytes"),
    ],
)
def test_attributes_that_do_not_fit_are_named(
    weights: dict[str, Bytes | Floats], change: dict[str, int | list[int]], message: str
) -> None:
    attributes: dict[str, int | list[int]] = {"K": INPUTS, "types": TYPES, "outputs": list(OUTPUTS)}
    product = node("TiledMatMul", ["x", "bias", "w0", "w1", "w2"], ["y"], **(attributes | change))
    with pytest.raises(Exception, match=message):
        session([product], X, ["y"], weights)


def test_other_numbers_of_inputs_and_outputs_are_errors(weights: dict[str, Bytes | Floats]) -> None:
    two = {"types": TYPES[:2], "outputs": list(OUTPUTS[:2])}
    for names, outputs, message in (
        (["x", "bias", "w0"], ["y"], "3 inputs, expected x, bias and 2 matrices"),
        (["x", "bias", "w0", "w1", "w2"], ["y"], "5 inputs, expected x, bias and 2 matrices"),
        (["x", "", "w0", "w1"], ["y", "z", "a"], "3 outputs, expected 1 or 2"),
    ):
        with pytest.raises(Exception, match=message):
            session([node("TiledMatMul", names, outputs, K=INPUTS, **two)], X, outputs, weights)
    product = node("TiledMatMul", ["x", "bias", "w0", "w1"], ["y"], K=INPUTS, **two)
    model = session([product], X, ["y"], weights)
    with pytest.raises(Exception, match="bias has 249 elements, expected 233"):
        model.run(None, {"x": np.ones((1, INPUTS), np.float32)})
    with pytest.raises(Exception, match="x has 9 dimensions"):
        model.run(None, {"x": np.ones((1,) * 8 + (INPUTS,), np.float32)})


@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K", "Q8_0", "F16"])
def test_lookup_gives_rows_of_the_file_and_refuses_other_ids(kind: str) -> None:
    rows = random_rows(kind, 37, 512, np.random.default_rng(3))
    look_up = node("TiledLookup", ["ids", "tiles"], ["y"], K=512, type=interface.TYPES[kind], N=37)
    model = session([look_up], {"ids": TensorProto.INT64}, ["y"], {"tiles": packed(kind, rows, 512)})
    ids = np.array([[[3, 36], [0, 3]]])
    np.testing.assert_array_equal(model.run(None, {"ids": ids})[0], dequantised(kind, rows)[ids])
    assert model.run(None, {"ids": ids[:, :0]})[0].shape == (1, 0, 2, 512)
    for bad in (37, -1, 2**62):
        with pytest.raises(Exception, match=r"an id outside 0\.\.36"):
            model.run(None, {"ids": np.array([0, bad])})
    wrong = node("TiledLookup", ["ids", "tiles"], ["y"], K=512, type=interface.TYPES[kind], N=57)
    with pytest.raises(Exception, match=r"tiles has .* bytes"):
        session([wrong], {"ids": TensorProto.INT64}, ["y"], {"tiles": packed(kind, rows, 512)})


def test_what_codes_leave_of_a_row_adds_nothing_to_its_products_with_floats() -> None:
    rng = np.random.default_rng(7)
    tile = {name: packed(kind, random_rows(kind, 16, 64, rng), 64) for name, kind in (("w0", "Q8_0"), ("w1", "F16"))}
    types = [interface.TYPES["Q8_0"], interface.TYPES["F16"]]
    model = session([node("TiledMatMul", ["x", "", "w0", "w1"], ["y", "z"], K=64, types=types, outputs=[16, 16])], X,
                    ["z"], tile)  # fmt: skip
    x = rng.standard_normal((3, 64)).astype(np.float32)
    x[:, 5] = 900
    np.testing.assert_array_equal(bits(model.run(None, {"x": x})[0]), bits(tiled.product("F16", tile["w1"], 16, x)))
