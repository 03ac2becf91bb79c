"""A head of a part of the vocabulary: its logits, spread over all tokens, for drafts (FR-Spec, arXiv:2502.14856).

Reading the rows of the likeliest tokens only makes a draft's pass cheaper. The others get a logit that is no chance in
any softmax, so that all readers see a whole vocabulary and every acceptance rule the distribution that was drawn from.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from edgespec.formats.onnx.forms import HEAD, Floats, RowWeights
from edgespec.formats.onnx.graph import Nodes

LACKS = np.float32(-1e30)  # finite, so that a bias or a mask on it is no NaN
MOST_RUNS = 64  # runs of consecutive tokens to join; more are scattered: 81 microseconds for 32,768 instead of 6


class ReducedHead:
    """`RowWeights` whose head has the rows of the tokens `ids` only, ascending; a table of its own, tied or not."""

    is_tied = False

    def __init__(self, weights: RowWeights, ids: Sequence[int]) -> None:
        self._weights, self._ids = weights, np.array(ids)
        self.vector = weights.vector

    def shape(self, name: str) -> tuple[int, int]:
        outputs, inputs = self._weights.shape(name)
        return (self._ids.size if name == HEAD else outputs), inputs

    def rows(self, name: str) -> Iterator[Floats]:
        start = 0
        for rows in self._weights.rows(name):
            if name != HEAD:
                yield rows
                continue
            first, last = np.searchsorted(self._ids, (start, start + len(rows)))
            if last > first:
                yield rows[self._ids[first:last] - start]
            start += len(rows)


def spread(nodes: Nodes, value: str, ids: Sequence[int], size: int, output: str) -> None:
    """Make `output` [batch, rows, size] of `value` [batch, rows, n], the logits of the tokens `ids` [n], ascending."""
    found = np.array(ids, np.int64)
    starts = np.flatnonzero(np.diff(found, prepend=found[0] - 2) > 1)
    if len(starts) <= MOST_RUNS:
        _join(nodes, value, found, starts, size, output)
    else:
        _scatter(nodes, value, found, size, output)


def _join(nodes: Nodes, value: str, ids: NDArray[np.int64], starts: NDArray[np.intp], size: int, output: str) -> None:
    """Runs of consecutive tokens, each padded up to the next, side by side."""
    here = "/lm_head/spread"
    lengths = np.diff(starts, append=ids.size)
    places = [0, *ids[starts][1:].tolist(), size]  # where the padded pieces begin
    pieces = [f"{here}/Split/output_{place}" for place in range(len(starts))] if len(starts) > 1 else [value]
    if len(starts) > 1:
        stored = nodes.store("edgespec.spread.lengths", lengths.astype(np.int64))
        nodes.add("Split", [value, stored], pieces, f"{here}/Split", axis=-1)
    lacks = nodes.store("edgespec.spread.lacks", np.array(LACKS))
    last_axis = nodes.store("edgespec.spread.axis", np.array([2]))
    padded = []
    for place, ((begin, end), piece, first, length) in enumerate(
        zip(pairwise(places), pieces, ids[starts], lengths, strict=True)
    ):
        pads = nodes.store(f"edgespec.spread.pads.{place}", np.array([first - begin, end - first - length]))
        padded.append(f"{here}/Pad/output_{place}" if len(pieces) > 1 else output)
        nodes.add("Pad", [piece, pads, lacks, last_axis], [padded[-1]], f"{here}/Pad_{place}")
    if len(pieces) > 1:
        nodes.add("Concat", padded, [output], f"{here}/Concat", axis=-1)


def _scatter(nodes: Nodes, value: str, ids: NDArray[np.int64], size: int, output: str) -> None:
    """Tokens first, so that each is one slice of a scatter into rows of nothing."""
    here = "/lm_head/spread"
    tokens, rows, shape, empty, whole = (f"{here}/{name}" for name in ("tokens", "rows", "shape", "empty", "whole"))
    nodes.add("Transpose", [value], [tokens], f"{here}/Transpose", perm=[2, 0, 1])
    nodes.add("Shape", [tokens], [rows], f"{here}/Shape", start=1)
    nodes.add(
        "Concat", [nodes.store("edgespec.spread.size", np.array([size])), rows], [shape], f"{here}/Concat", axis=0
    )
    lacks = nodes.store("edgespec.spread.lacks", np.array(LACKS))
    nodes.add("Expand", [lacks, shape], [empty], f"{here}/Expand")
    places = nodes.store("edgespec.spread.ids", ids[:, None])
    nodes.add("ScatterND", [empty, places, tokens], [whole], f"{here}/ScatterND")
    nodes.add("Transpose", [whole], [output], f"{here}/Transpose_back", perm=[1, 2, 0])
