"""How the matrices of a graph are stored and multiplied: blocks of 8 or 4 bits, float32.

A form asks for the weights it stores while the graph is written, so that one matrix is in memory at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import ModelFileError
from edgespec.formats.onnx import MICROSOFT
from edgespec.formats.onnx.graph import Nodes

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
Floats = NDArray[np.float32]
ByteCodes = tuple[NDArray[np.uint8], Floats]
GROUP_SIZES = (64, 32, 16)  # weights of an embedding that share a scale: the first that divides its width


class NamedWeights(Protocol):
    """Weights by their Hugging Face names; `lm_head.weight` is there if tied (`is_tied`), too."""

    is_tied: bool

    def vector(self, name: str) -> Floats:
        """A norm's weights or a bias [width]."""

    def shape(self, name: str) -> tuple[int, int]:
        """(outputs, inputs) of a matrix."""


class RowWeights(NamedWeights, Protocol):
    """Weights as floats."""

    def rows(self, name: str) -> Iterator[Floats]:
        """All rows of a matrix in their order, some of them [n, inputs] at a time."""


class WeightForm(Protocol):
    """The writer of one graph's matrices."""

    def vector(self, name: str) -> Floats:
        """A norm's weights or a bias [width]."""

    def embed(self, output: str) -> None:
        """Look the embeddings of `input_ids` up: [batch, tokens, width]."""

    def product(self, name: str, value: str, sources: Sequence[str], output: str) -> None:
        """Multiply `value` [..., inputs] by the matrices `sources` side by side."""


class Blocks:
    """Products of MatMulNBits: `size` weights of 8 or 4 bits share a scale, inputs are quantised by the operator.

    Operator and names are those of onnxruntime-genai's builder, tied embeddings are stored once.
    """

    def __init__(self, bits: int, size: int, weights: RowWeights, nodes: Nodes) -> None:
        self._bits, self._size, self._weights, self._nodes = bits, size, weights, nodes
        self.vector = weights.vector

    def embed(self, output: str) -> None:
        tokens, width = self._weights.shape(EMBEDDING)
        if self._weights.is_tied and width % self._size == 0:
            stored, scale = self._store("/lm_head/MatMul", (HEAD,))
            view = self._nodes.view(f"{EMBEDDING}_Q{self._bits}", stored, [tokens, width * self._bits // 8])
            look_up(self._nodes, view, scale, output, bits=self._bits, size=self._size)
            return
        size = next((size for size in GROUP_SIZES if width % size == 0), None)
        if size is None:
            raise ModelFileError(f"embeddings of width {width} cannot be stored in groups of {GROUP_SIZES}")
        codes, scales = np.empty((tokens, width), np.uint8), np.empty((tokens, width // size), np.float32)
        for part, rows in stacked_rows(self._weights, [EMBEDDING]):
            found, scales[part] = quantise_blocks(rows, 8, size)
            codes[part] = found.reshape(len(rows), width)
        names = self._nodes.store("embedding_w8", codes), self._nodes.store("embedding_scale", scales)
        look_up(self._nodes, *names, output, bits=8, size=size)

    def product(self, name: str, value: str, sources: Sequence[str], output: str) -> None:
        codes, scales = self._store(name, sources)
        outputs, inputs = stacked_shape(self._weights, sources)
        multiply(self._nodes, name, [value, codes, scales], output, (outputs, inputs), self._bits, self._size)

    def _store(self, name: str, sources: Sequence[str]) -> tuple[str, str]:
        """Names of codes [outputs, blocks, bytes] and scales [outputs, blocks], stored once."""
        weight = weight_name(name)
        names = f"{weight}_Q{self._bits}", f"{weight}_scales"
        if self._nodes.has(names[0]):
            return names
        outputs, inputs = stacked_shape(self._weights, sources)
        blocks = -(-inputs // self._size)
        codes = np.empty((outputs, blocks, self._size * self._bits // 8), np.uint8)
        scales = np.empty((outputs, blocks), np.float32)
        for part, rows in stacked_rows(self._weights, sources):
            codes[part], scales[part] = quantise_blocks(rows, self._bits, self._size)
        self._nodes.store(names[0], codes)
        self._nodes.store(names[1], scales)
        return names


class Plain:
    """float32, what the other forms of the same weights are compared with."""

    def __init__(self, weights: RowWeights, nodes: Nodes) -> None:
        self._weights, self._nodes = weights, nodes
        self.vector = weights.vector

    def embed(self, output: str) -> None:
        found = np.empty(self._weights.shape(EMBEDDING), np.float32)
        for part, rows in stacked_rows(self._weights, [EMBEDDING]):
            found[part] = rows
        self._nodes.store(EMBEDDING, found)
        self._nodes.add("Gather", [EMBEDDING, "input_ids"], [output], "/model/embed_tokens/Gather")

    def product(self, name: str, value: str, sources: Sequence[str], output: str) -> None:
        outputs, inputs = stacked_shape(self._weights, sources)
        found = np.empty((inputs, outputs), np.float32)
        for part, rows in stacked_rows(self._weights, sources):
            found[:, part] = rows.T
        self._nodes.add("MatMul", [value, self._nodes.store(weight_name(name), found)], [output], name)


def weight_name(product: str) -> str:
    """The builder's name for the weights of an operator."""
    return f"{product.removeprefix('/').replace('/', '.')}.weight"


def stacked_shape(weights: RowWeights, sources: Sequence[str]) -> tuple[int, int]:
    """(outputs, inputs) of matrices side by side."""
    shapes = [weights.shape(source) for source in sources]
    return sum(outputs for outputs, _ in shapes), shapes[0][1]


def stacked_rows(weights: RowWeights, sources: Sequence[str]) -> Iterator[tuple[slice, Floats]]:
    """Some rows [n, inputs] of matrices side by side at a time, each time with their places among all outputs."""
    start = 0
    for source in sources:
        for rows in weights.rows(source):
            yield slice(start, start + len(rows)), rows
            start += len(rows)


def multiply(
    nodes: Nodes, name: str, inputs: Sequence[str], output: str, shape: tuple[int, int], bits: int, size: int
) -> None:
    """The product of `inputs`: a value, codes in blocks of `size`, scales and maybe zero points; `shape` (N, K)."""
    nodes.add(
        "MatMulNBits",
        inputs,
        [output],
        f"{name}_Q{bits}",
        domain=MICROSOFT,
        K=shape[1],
        N=shape[0],
        bits=bits,
        block_size=size,
        accuracy_level=4,
    )


def look_up(nodes: Nodes, codes: str, scales: str, output: str, *, bits: int, size: int) -> None:
    """The embeddings of `input_ids`, from rows in groups of `size`."""
    nodes.add(
        "GatherBlockQuantized",
        [codes, "input_ids", scales],
        [output],
        "/model/embed_tokens/GatherBlockQuantized",
        domain=MICROSOFT,
        bits=bits,
        block_size=size,
        gather_axis=0,
        quantize_axis=1,
    )


def quantise_blocks(rows: Floats, bits: int, size: int) -> ByteCodes:
    """Codes [n, blocks, size * bits / 8] and scales [n, blocks] of rows [n, inputs]; the last block may be padded.

    As ONNX Runtime's quantiser and ggml do, the weight that is largest by its size becomes the code 0, so that the one
    code more on that side is used; two codes of 4 bits share a byte, the first in its lower half. Raises
    ModelFileError for weights that are no finite numbers.
    """
    middle = 1 << bits - 1
    padding = -rows.shape[1] % size
    groups = (np.pad(rows, ((0, 0), (0, padding))) if padding else rows).reshape(len(rows), -1, size)
    low, high = groups.min(axis=2), groups.max(axis=2)
    extreme = np.where(-low >= high, low, high)
    if not np.isfinite(extreme).all():
        raise ModelFileError("the model is damaged: it has weights that are not finite numbers")
    # ONNX Runtime's products of groups add `128 * scale * sum(activations)` and take it off again, each rounded: with a
    # scale of 1 a group of zeros adds a thousandth, layer for layer.
    least = np.maximum(np.abs(extreme) / np.float32(middle), np.finfo(np.float32).tiny)
    scales = np.copysign(least, -extreme)
    with np.errstate(over="ignore"):  # a scale below the smallest normal number
        codes = np.clip(np.rint(groups / scales[..., None]) + middle, 0, 2 * middle - 1).astype(np.uint8)
    return (codes if bits == 8 else in_pairs(codes)), scales


def in_pairs(codes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Two codes in each byte, the first in its lower half."""
    found: NDArray[np.uint8] = codes[..., ::2] | np.left_shift(codes[..., 1::2], 4)
    return found
