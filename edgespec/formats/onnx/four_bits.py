"""Weights of 4 bits in blocks that share a scale and an offset: as a GGUF stores them, or fitted to floats; and their
products in a graph.

A weight is `scale * code + offset` with a code of 0 to 15. ggml's Q4_0 has offsets of -8 scales, Q4_1 any; Q4_K has
eight blocks in one of 256 weights, whose scales and offsets are codes of 6 bits themselves (ggml-common.h; the layout
of these codes: `get_scale_min_k4` in ggml-quants.c).

MatMulNBits knows whole zero points only: `scale * (code - zero point)`. What that leaves of an offset, at most half a
scale where zero lies among the codes, is the same for all weights of a block and so multiplies the mean of the block's
inputs. These means become further inputs of the product, one for each block, and the remainders further weights of 4
bits: two small operators per input of a product and 1/32 more weights, and a GGUF's own 4-bit weights are kept but for
1/11 to 1/16 of what rounding them to another grid would change. Blocks without remainders (Q4_0) need neither.

The head, and what a GGUF of mostly 4 bits keeps in more, is stored in 8 bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from edgespec.formats.onnx.forms import (
    HEAD,
    Blocks,
    Floats,
    RowWeights,
    in_pairs,
    multiply,
    quantise_blocks,
    stacked_rows,
    weight_name,
)
from edgespec.formats.onnx.graph import Nodes

BLOCK = 32  # weights in a block, of the types below and of a graph
STORED_TYPES = ("Q4_0", "Q4_1", "Q4_K")
LARGEST = 15
_MIDDLE = 8  # the code of zero in Q4_0, and the zero point that MatMulNBits has where it is given none
Bytes = NDArray[np.uint8]
LEAST_SCALE = np.finfo(np.float32).tiny


class FourBits(NamedTuple):
    """Some rows in blocks: `codes` [rows, blocks, weights of a block], `scales` and `offsets` [rows, blocks]."""

    codes: Bytes
    scales: Floats
    offsets: Floats


def take_apart(raw: Bytes, kind: str) -> FourBits:
    """The blocks of 32 in the bytes [rows, bytes] of one of `STORED_TYPES`; their floats are what ggml decodes."""
    rows = len(raw)
    if kind == "Q4_K":
        blocks = raw.reshape(-1, 144)
        steps, least = _six_bits(blocks[:, 4:16])
        scales, offsets = _halves(blocks, 0) * steps, -_halves(blocks, 2) * least
        nibbles = blocks[:, 16:].reshape(-1, 4, BLOCK)
    else:
        has_offsets = kind == "Q4_1"
        blocks = raw.reshape(-1, 20 if has_offsets else 18)
        scales = _halves(blocks, 0)
        offsets = _halves(blocks, 2) if has_offsets else -_MIDDLE * scales
        nibbles = blocks[:, 4 if has_offsets else 2 :].reshape(-1, 1, BLOCK // 2)
    codes = np.stack([nibbles & LARGEST, nibbles >> 4], axis=2)
    return FourBits(codes.reshape(rows, -1, BLOCK), scales.reshape(rows, -1), offsets.reshape(rows, -1))


def fit(rows: Floats) -> FourBits:
    """Rows [n, inputs] in blocks, which divide inputs.

    The codes first span a block from its least weight to its largest; then, twice, scale and offset are those of least
    squares for the codes, and the codes are found anew. On normal deviates that leaves .73 of the squared error of
    blocks around zero.
    """
    groups = rows.reshape(len(rows), -1, BLOCK)
    offsets = groups.min(axis=2)
    scales = np.maximum((groups.max(axis=2) - offsets) / np.float32(LARGEST), LEAST_SCALE)
    codes = _codes(groups, scales, offsets)
    for _ in range(2):
        centred = codes - codes.mean(axis=2, keepdims=True)
        spread = (centred**2).sum(axis=2)
        scales = np.divide((centred * groups).sum(axis=2), spread, out=scales, where=spread > 0)
        scales = np.maximum(scales, LEAST_SCALE)
        offsets = groups.mean(axis=2) - scales * codes.mean(axis=2)
        codes = _codes(groups, scales, offsets)
    return FourBits(codes.astype(np.uint8), scales, offsets)


def _codes(groups: Floats, scales: Floats, offsets: Floats) -> Floats:
    found: Floats = np.clip(np.rint((groups - offsets[..., None]) / scales[..., None]), 0, LARGEST)
    return found


def _halves(blocks: Bytes, start: int) -> Floats:
    """The half precision numbers at byte `start` of each block: [blocks, 1]."""
    return np.ascontiguousarray(blocks[:, start : start + 2]).view(np.float16).astype(np.float32)


def _six_bits(packed: Bytes) -> tuple[Bytes, Bytes]:
    """Scales and offsets [blocks, 8] of 6 bits: 4 of each in the low bits of 8 bytes, the others in what is left."""
    first, second, low = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate([first & 63, low & LARGEST | (first >> 2) & 48], axis=1)
    return scales, np.concatenate([second & 63, low >> 4 | (second >> 2) & 48], axis=1)


HEAD_BITS, HEAD_GROUP = 8, 64


class StoredBlocks(RowWeights, Protocol):
    """Weights of which some are stored in blocks of 4 bits already."""

    def blocks(self, name: str) -> Iterator[FourBits] | None:
        """All rows of a matrix in their order in blocks, some rows at a time; None if it is not so stored."""

    def keeps_more(self, name: str) -> bool:
        """Whether a file of mostly 4 bits stores this matrix in more."""


class OffsetBlocks:
    """A `WeightForm`: the weights of a block of 4 bits share a scale and an offset, as stored where they are so."""

    def __init__(self, weights: StoredBlocks, nodes: Nodes) -> None:
        self._weights, self._nodes = weights, nodes
        self._eight = Blocks(HEAD_BITS, HEAD_GROUP, weights, nodes)
        self._uneven = Blocks(4, BLOCK, weights, nodes)
        self._widened: dict[str, str] = {}
        self.vector = weights.vector

    def embed(self, output: str) -> None:
        self._eight.embed(output)

    def product(self, name: str, value: str, sources: Sequence[str], output: str) -> None:
        inputs = self._weights.shape(sources[0])[1]
        if sources[0] == HEAD or any(self._weights.keeps_more(source) for source in sources):
            self._eight.product(name, value, sources, output)
        elif inputs % BLOCK:  # means of a last block that is padded would be wrong
            self._uneven.product(name, value, sources, output)
        else:
            self._offset_product(name, value, sources, output, inputs)

    def _offset_product(self, name: str, value: str, sources: Sequence[str], output: str, inputs: int) -> None:
        parts = zip(*(_centred(part) for source in sources for part in self._blocks(source)), strict=True)
        codes, scales, zeros, remainders = map(np.concatenate, parts)
        if remainders.any():
            value = self._with_means(value)
            further = quantise_blocks(remainders * np.float32(BLOCK), 4, BLOCK)
            inputs += remainders.shape[1]
            codes, scales = np.concatenate([codes, further[0]], axis=1), np.concatenate([scales, further[1]], axis=1)
        weight, store = weight_name(name), self._nodes.store
        names = [store(f"{weight}_Q4", codes), store(f"{weight}_scales", scales)]
        if (zeros != _MIDDLE).any():
            padded = np.full((len(zeros), codes.shape[1] + codes.shape[1] % 2), _MIDDLE, np.uint8)
            padded[:, : zeros.shape[1]] = zeros
            names.append(store(f"{weight}_zero_points", in_pairs(padded)))
        multiply(self._nodes, name, [value, *names], output, (len(codes), inputs), 4, BLOCK)

    def _blocks(self, source: str) -> Iterator[FourBits]:
        found = self._weights.blocks(source)
        return (fit(rows) for _, rows in stacked_rows(self._weights, [source])) if found is None else found

    def _with_means(self, value: str) -> str:
        """`value` [batch, rows, inputs] with the mean of each block of inputs behind it, made once."""
        if value not in self._widened:
            means, widened = f"{value}/means", f"{value}/with_means"
            self._nodes.add("AveragePool", [value], [means], means, kernel_shape=[BLOCK], strides=[BLOCK])
            self._nodes.add("Concat", [value, means], [widened], widened, axis=-1)
            self._widened[value] = widened
        return self._widened[value]


def _centred(part: FourBits) -> tuple[Bytes, Floats, Bytes, Floats]:
    """Codes in pairs, scales, whole zero points, what these leave of the offsets: all [rows, blocks, ...]."""
    scales: Floats = np.where(part.scales == 0, LEAST_SCALE, part.scales)  # a block of zeros, or of offsets alone
    with np.errstate(over="ignore"):
        zeros = np.clip(np.rint(-part.offsets / scales), 0, LARGEST)
    remainders: Floats = part.offsets + scales * zeros
    return in_pairs(part.codes), scales, zeros.astype(np.uint8), remainders
