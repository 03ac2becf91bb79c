"""Weights of 4 bits in blocks that share a scale and an offset: as a GGUF stores them, or fitted to floats.

A weight is `scale * code + offset` with a code of 0 to 15. ggml's Q4_0 has offsets of -8 scales, Q4_1 any; Q4_K has
eight blocks in one of 256 weights, whose scales and offsets are codes of 6 bits themselves (ggml-common.h; the layout
of these codes: `get_scale_min_k4` in ggml-quants.c).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

STORED_SIZE = 32  # weights in a block of the types below
STORED_TYPES = ("Q4_0", "Q4_1", "Q4_K")
LARGEST = 15
_MIDDLE = 8  # the code of zero in Q4_0
Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]
LEAST_SCALE = np.finfo(np.float32).tiny


class FourBits(NamedTuple):
    """Some rows in blocks: `codes` [rows, blocks, weights of a block], `scales` and `offsets` [rows, blocks]."""

    codes: Bytes
    scales: Floats
    offsets: Floats

    def floats(self) -> Floats:
        """The weights [rows, inputs]."""
        found: Floats = self.codes * self.scales[..., None] + self.offsets[..., None]
        return found.reshape(len(found), -1)

    def split(self, size: int) -> FourBits:
        """The same in blocks of `size`, which divides theirs."""
        times = self.codes.shape[2] // size
        codes = self.codes.reshape(len(self.codes), -1, size)
        return FourBits(codes, np.repeat(self.scales, times, axis=1), np.repeat(self.offsets, times, axis=1))


def take_apart(raw: Bytes, kind: str) -> FourBits:
    """The blocks of 32 in the bytes [rows, bytes] of one of `STORED_TYPES`; their floats are what ggml decodes."""
    rows = len(raw)
    if kind == "Q4_K":
        blocks = raw.reshape(-1, 144)
        steps, least = _six_bits(blocks[:, 4:16])
        scales, offsets = _halves(blocks, 0) * steps, -_halves(blocks, 2) * least
        nibbles = blocks[:, 16:].reshape(-1, 4, STORED_SIZE)
    else:
        has_offsets = kind == "Q4_1"
        blocks = raw.reshape(-1, 20 if has_offsets else 18)
        scales = _halves(blocks, 0)
        offsets = _halves(blocks, 2) if has_offsets else -_MIDDLE * scales
        nibbles = blocks[:, 4 if has_offsets else 2 :].reshape(-1, 1, STORED_SIZE // 2)
    codes = np.stack([nibbles & LARGEST, nibbles >> 4], axis=2)
    return FourBits(codes.reshape(rows, -1, STORED_SIZE), scales.reshape(rows, -1), offsets.reshape(rows, -1))


def fit(rows: Floats, size: int) -> FourBits:
    """Rows [n, inputs] in blocks of `size`, which divides inputs.

    The codes first span a block from its least weight to its largest; then, twice, scale and offset are those of least
    squares for the codes, and the codes are found anew. On normal deviates that leaves .73 of the squared error of
    blocks around zero.
    """
    groups = rows.reshape(len(rows), -1, size)
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
