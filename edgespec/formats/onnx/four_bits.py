"""Products of weights of 4 bits whose blocks have an offset of any size, as those of Q4_1 and Q4_K do.

MatMulNBits knows whole zero points only: `scale * (code - zero point)`. What that leaves of an offset, at most half a
scale where zero lies among the codes, is the same for all weights of a block and so multiplies the mean of the block's
inputs. These means become further inputs of the product, one for each block, and the remainders further weights of 4
bits: two small operators per input of a product and 1/32 more weights, and a GGUF's own 4-bit weights are kept but for
1/11 to 1/16 of what rounding them to another grid would change. Blocks without remainders (Q4_0) need neither.

The head, and what a GGUF of mostly 4 bits keeps in more, is stored in 8 bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from edgespec.formats.four_bits import LARGEST, LEAST_SCALE, Bytes, Floats, FourBits, fit
from edgespec.formats.onnx import MICROSOFT
from edgespec.formats.onnx.forms import HEAD, Blocks, RowWeights, quantise_blocks, stacked_rows, weight_name
from edgespec.formats.onnx.nodes import Nodes

HEAD_BITS, HEAD_GROUP = 8, 64
_MIDDLE = 8  # the zero point that MatMulNBits has where it is given none


@runtime_checkable
class StoredBlocks(Protocol):
    """Weights of which some are stored in blocks of 4 bits already."""

    def blocks(self, name: str, size: int) -> Iterator[FourBits] | None:
        """All rows of a matrix in their order in blocks of `size`, some rows at a time; None if it is not so stored."""

    def keeps_more(self, name: str) -> bool:
        """Whether a file of mostly 4 bits stores this matrix in more."""


class OffsetBlocks:
    """A `Form`: `size` weights of 4 bits share a scale and an offset, those of `stored` as they are stored."""

    def __init__(self, size: int, weights: RowWeights, stored: StoredBlocks | None, nodes: Nodes) -> None:
        self._size, self._weights, self._stored, self._nodes = size, weights, stored, nodes
        self._eight = Blocks(HEAD_BITS, HEAD_GROUP, weights, nodes)
        self._uneven = Blocks(4, size, weights, nodes)
        self._widened: dict[str, str] = {}
        self.vector = weights.vector

    def embed(self, output: str) -> None:
        self._eight.embed(output)

    def product(self, name: str, value: str, sources: Sequence[str], output: str) -> None:
        inputs = self._weights.shape(sources[0])[1]
        if sources[0] == HEAD or (self._stored and any(self._stored.keeps_more(source) for source in sources)):
            self._eight.product(name, value, sources, output)
        elif inputs % self._size:  # means of a last block that is padded would be wrong
            self._uneven.product(name, value, sources, output)
        else:
            self._offset_product(name, value, sources, output, inputs)

    def _offset_product(self, name: str, value: str, sources: Sequence[str], output: str, inputs: int) -> None:
        found = _joined([_centred(part) for source in sources for part in self._blocks(source)])
        codes, scales, zeros, remainders = found
        if remainders.any():
            value = self._with_means(value)
            further = quantise_blocks(remainders * np.float32(self._size), 4, self._size)
            inputs += remainders.shape[1]
            codes, scales = np.concatenate([codes, further[0]], axis=1), np.concatenate([scales, further[1]], axis=1)
        weight, store = weight_name(name), self._nodes.store
        names = [store(f"{weight}_Q4", codes), store(f"{weight}_scales", scales)]
        if (zeros != _MIDDLE).any():
            padded = np.full((len(zeros), codes.shape[1] + codes.shape[1] % 2), _MIDDLE, np.uint8)
            padded[:, : zeros.shape[1]] = zeros
            names.append(store(f"{weight}_zero_points", _in_pairs(padded)))
        self._nodes.add(
            "MatMulNBits",
            [value, *names],
            [output],
            f"{name}_Q4",
            domain=MICROSOFT,
            K=inputs,
            N=len(codes),
            bits=4,
            block_size=self._size,
            accuracy_level=4,
        )

    def _blocks(self, source: str) -> Iterator[FourBits]:
        found = self._stored.blocks(source, self._size) if self._stored else None
        return (fit(rows, self._size) for _, rows in stacked_rows(self._weights, [source])) if found is None else found

    def _with_means(self, value: str) -> str:
        """`value` [batch, rows, inputs] with the mean of each block of inputs behind it, made once."""
        if value not in self._widened:
            means, widened = f"{value}/means", f"{value}/with_means"
            self._nodes.add("AveragePool", [value], [means], means, kernel_shape=[self._size], strides=[self._size])
            self._nodes.add("Concat", [value, means], [widened], widened, axis=-1)
            self._widened[value] = widened
        return self._widened[value]


class _Centred(NamedTuple):
    """Rows of codes in pairs, with whole zero points, and what these leave of the offsets: all [rows, blocks, ...]."""

    codes: Bytes
    scales: Floats
    zeros: Bytes
    remainders: Floats


def _centred(part: FourBits) -> _Centred:
    scales: Floats = np.where(part.scales == 0, LEAST_SCALE, part.scales)  # a block of zeros, or of offsets alone
    with np.errstate(over="ignore"):
        zeros = np.clip(np.rint(-part.offsets / scales), 0, LARGEST)
    remainders: Floats = part.offsets + scales * zeros
    return _Centred(_in_pairs(part.codes), scales, zeros.astype(np.uint8), remainders)


def _joined(parts: Sequence[_Centred]) -> _Centred:
    return _Centred(
        np.concatenate([part.codes for part in parts]),
        np.concatenate([part.scales for part in parts]),
        np.concatenate([part.zeros for part in parts]),
        np.concatenate([part.remainders for part in parts]),
    )


def _in_pairs(codes: Bytes) -> Bytes:
    """Two codes in each byte, the first in its lower half."""
    found: Bytes = codes[..., ::2] | np.left_shift(codes[..., 1::2], 4)
    return found
