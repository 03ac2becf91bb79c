"""Products and rows of tiles: right for every type; a row has the same bits whatever is beside it, on every path."""

import hashlib

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import quantize

import tiled
from edgespec.formats.onnx.tiles import LAYOUT_VERSION
from edgespec.kernels import interface
from tiled import FLOATS, SCALES, SMALL_BLOCKS, Floats, activation_block, bits, dequantised, packed, random_rows

Q4_0 = GGMLQuantizationType.Q4_0
SHAPES = [(200, 512), (16, 256), (7, 256), (33, 1280)]
CASES = [(kind, *shape) for kind in interface.TYPES for shape in SHAPES]
CASES += [(kind, *shape) for kind in SMALL_BLOCKS for shape in ((50, 96), (576, 576), (1, 32))]
CASES += [(kind, 5, 7) for kind in interface.TYPES if kind not in SCALES]


def activations(rows: int, inputs: int, rng: np.random.Generator) -> Floats:
    """Ordinary rows, and rows with outliers, zeros, tiny values."""
    x = rng.standard_normal((rows, inputs)).astype(np.float32)
    x[1 % rows] *= 50
    x[2 % rows, : inputs // 2] = 0
    x[3 % rows] = -0.0
    x[4 % rows, 17 % inputs] = 300
    x[5 % rows] *= 1e-34
    return x


def as_kernels_see(x: Floats, block: int) -> np.ndarray:
    """Activations after quantising, exactly, in float64."""
    if block == 1:
        return x.astype(np.float64)
    blocks = x.reshape(len(x), -1, block)
    top = np.abs(blocks).max(2, keepdims=True)
    inverse = np.divide(np.float32(127), top, out=np.zeros_like(top), where=top > 2.0**-100)
    return (np.rint(blocks * inverse).astype(np.float64) * (top / np.float32(127))).reshape(x.shape)


@pytest.mark.parametrize(("kind", "outputs", "inputs"), CASES)
def test_product_and_lookup_are_those_of_the_file(kind: str, outputs: int, inputs: int) -> None:
    rng = np.random.default_rng(inputs + outputs)
    rows = random_rows(kind, outputs, inputs, rng)
    tile, weights = packed(kind, rows, inputs), dequantised(kind, rows)
    ids = np.arange(outputs)[::-1].copy()
    np.testing.assert_array_equal(bits(tiled.lookup(kind, tile, outputs, inputs, ids)), bits(weights[ids]))

    x = activations(9, inputs, rng)
    expected = as_kernels_see(x, activation_block(kind)) @ weights.T.astype(np.float64)
    size = np.linalg.norm(x.astype(np.float64), axis=1)[:, None] * np.linalg.norm(weights, axis=1)
    assert np.all(np.abs(tiled.product(kind, tile, outputs, x) - expected) <= 2e-6 * size)


@pytest.mark.parametrize("kind", interface.TYPES)
def test_row_has_the_same_bits_whatever_is_beside_it_on_every_path(kind: str, paths: list[str]) -> None:
    rng = np.random.default_rng(0)
    outputs, inputs = 40, 768
    rows = random_rows(kind, outputs, inputs, rng)
    if kind in SCALES and kind != "MXFP4":  # an output of the largest codes and group scales
        blocks = rows.reshape(outputs, -1, GGML_QUANT_SIZES[GGMLQuantizationType[kind]][1])
        kept = blocks[7].copy()
        blocks[7] = 255
        for at in SCALES[kind]:
            blocks[7, :, at : at + 2] = kept[:, at : at + 2]
    tile = packed(kind, rows, inputs)
    bias = rng.standard_normal(outputs).astype(np.float32)
    x = activations(70, inputs, rng)
    x[20], x[21] = 1, -1
    x[40, 3], x[41, 700], x[42] = np.nan, -np.inf, np.finfo(np.float32).max
    expected = bits(tiled.product(kind, tile, outputs, x, bias))
    for path in paths:
        assert tiled.choose_path(path)
        for count in range(1, 71):
            start = 7 * count % (71 - count)
            part = tiled.product(kind, tile, outputs, x[start : start + count], bias)
            np.testing.assert_array_equal(bits(part), expected[start : start + count], f"{path}, {count} rows")
    broken = np.isnan(expected.view(np.float32)).any(1)
    assert broken[40] and not broken[:40].any() and not broken[43:].any()


def fused(a: Floats, b: Floats, c: Floats) -> Floats:
    """a * b + c with one rounding."""
    return (a.astype(np.float64) * b.astype(np.float64) + c.astype(np.float64)).astype(np.float32)


def test_float_weights_are_summed_one_input_after_another() -> None:
    rng = np.random.default_rng(1)
    weights, x = (rng.standard_normal(shape).astype(np.float32) for shape in ((20, 33), (3, 33)))
    expected = np.zeros((3, 20), np.float32)
    for i in range(33):
        expected = fused(x[:, i, None], weights[:, i][None], expected)
    got = tiled.product("F32", packed("F32", weights.view(np.uint8), 33), 20, x)
    np.testing.assert_array_equal(bits(got), bits(expected))


def test_blocks_are_exact_integers_and_one_fused_multiply_add_each() -> None:
    rng = np.random.default_rng(2)
    rows = random_rows("Q8_0", 20, 96, rng)
    blocks = rows.reshape(20, 3, 34)
    scales = blocks[..., :2].copy().view(np.float16)[..., 0].astype(np.float32)
    x = rng.standard_normal((4, 3, 32)).astype(np.float32)
    top = np.abs(x).max(2)
    codes = np.rint(x * (np.float32(127) / top)[..., None]).astype(np.int32)
    expected = np.zeros((4, 20), np.float32)
    for b in range(3):
        sums = (codes[:, b] @ blocks[:, b, 2:].view(np.int8).astype(np.int32).T).astype(np.float32)
        expected = fused(sums, scales[:, b] * (top[:, b] / np.float32(127))[:, None], expected)
    got = tiled.product("Q8_0", packed("Q8_0", rows, 96), 20, x.reshape(4, 96))
    np.testing.assert_array_equal(bits(got), bits(expected))


@pytest.mark.parametrize("kind", interface.TYPES)
def test_parts_of_a_matrix_are_packed_on_their_own(kind: str) -> None:
    rows = random_rows(kind, 55, 256, np.random.default_rng(3))
    whole = packed(kind, rows, 256)
    parts = [packed(kind, rows[start : start + 16], 256) for start in range(0, 55, 16)]
    np.testing.assert_array_equal(np.concatenate(parts), whole)


@pytest.mark.parametrize("kind", interface.TYPES)
def test_scale_that_is_not_finite_is_reported(kind: str) -> None:
    rows = random_rows(kind, 20, 512, np.random.default_rng(4))
    out = np.empty(interface.packed_bytes(kind, 20, 512), np.uint8)
    exponent = {"F32": (2, 0x7F80), "BF16": (0, 0x7F80)}.get(kind, (0, 0x7C00))
    block = GGML_QUANT_SIZES[GGMLQuantizationType[kind]][1]
    for at in SCALES.get(kind, (exponent[0],)):
        broken = rows.copy()
        broken[19, block + at : block + at + 2] = np.array([exponent[1]], np.uint16).view(np.uint8)
        assert interface.pack(kind, rows, 512, out)
        assert not interface.pack(kind, broken, 512, out)
        assert interface.narrow(kind, rows, 512) is not None and interface.narrow(kind, broken, 512) is None


@pytest.mark.parametrize("kind", ["Q5_0", "Q5_1", "Q5_K", "Q6_K", "Q8_0", *FLOATS])
def test_weights_of_a_draft_are_made_narrow_as_ggml_does_it(kind: str) -> None:
    rows = random_rows(kind, 7, 768, np.random.default_rng(5))
    found, weights = interface.narrow(kind, rows, 768), dequantised(kind, rows)
    # Not bit for bit: of two weights as far from zero as each other ggml takes the first.
    errors = [np.square(dequantised("Q4_0", each) - weights).mean() for each in (found, quantize(weights, Q4_0))]
    assert 0 < errors[0] <= 1.02 * errors[1]


@pytest.mark.parametrize("kind", interface.TYPES)
def test_sizes_that_no_tile_has_are_refused(kind: str) -> None:
    block = activation_block(kind)
    refused = [(0, 256), (-1, 256), (16, 0), (16, -256), (2**62, 256), (2**40, 2**40)]
    refused += [(16, block + 1), (16, block // 2)] if block > 1 else []
    assert [interface.packed_bytes(kind, *shape) for shape in refused] == [None] * len(refused)
    assert interface.packed_bytes(kind, 17, 256) == 2 * interface.packed_bytes(kind, 16, 256)
    assert interface.packed_bytes("Q9_K", 16, 256) is None


def test_ids_outside_a_matrix_are_refused() -> None:
    tile = packed("Q4_K", random_rows("Q4_K", 16, 256, np.random.default_rng(5)), 256)
    for ids in ([16], [-1], [0, 2**62]):
        with pytest.raises(IndexError, match=r"outside 0\.\.15"):
            tiled.lookup("Q4_K", tile, 16, 256, np.array(ids))


def test_kinds_of_this_file_are_all_that_the_kernels_have() -> None:
    assert set(FLOATS) | set(SCALES) | {"BF16"} == set(interface.TYPES)


def test_layout_of_tiles_in_files_has_a_version() -> None:
    """Where this digest changes, exported files hold something else: increase LAYOUT_VERSION with it."""
    digest = hashlib.sha256()
    for kind in interface.TYPES:
        block, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
        rows = np.resize(np.arange(113, dtype=np.uint8), (19, 512 // block * size))
        digest.update(packed(kind, rows, 512).tobytes())
    assert (LAYOUT_VERSION, digest.hexdigest()[:16]) == (2, "57b59da3119e1b65")
