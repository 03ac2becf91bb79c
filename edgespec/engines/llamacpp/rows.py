"""Batches in llama.cpp's layout.

llama.cpp has no parents of rows. A tree is given by sets of sequence ids: each branch has an id, a row has the ids of
all branches that pass through it, and so attends to its own ancestors only.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.engines.booked import SequenceRows
from edgespec.engines.llamacpp.library import library
from edgespec.types import NO_PARENT, Batch, TokenIds

Selection = slice | NDArray[np.intp]
Branches = dict[int, list[list[int]]]  # sequence -> per row of its tree, the ids of the branches through it


def leaves(parents: Sequence[int]) -> list[int]:
    """Rows without children, ascending: one per branch, that of the main chain first."""
    inner = set(parents)
    return [row for row in range(len(parents)) if row not in inner]


def branches_through(parents: Sequence[int], leaf_ids: Sequence[int]) -> list[list[int]]:
    """For every row, the ids of the branches that pass through it; `leaf_ids` in the order of `leaves`."""
    found: list[list[int]] = [[] for _ in parents]
    for leaf, branch in zip(leaves(parents), leaf_ids, strict=True):
        row = leaf
        while row != NO_PARENT:
            found[row].append(branch)
            row = parents[row]
    return found


class RowBuffer:
    """A `llama_batch` whose fields point to arrays owned here. Never pass `struct` to `llama_batch_free`."""

    def __init__(self, capacity: int, ids_per_row: int) -> None:
        self.token_ids = np.zeros(capacity, np.int32)
        self.positions = np.zeros(capacity, np.int32)
        self.num_ids = np.ones(capacity, np.int32)
        self.ids = np.zeros((capacity, ids_per_row), np.int32)
        self.outputs = np.zeros(capacity, np.int8)
        self._counting = np.arange(capacity, dtype=np.int32)
        stride = self.ids.strides[0]
        self._id_pointers = self.ids.ctypes.data + np.arange(capacity, dtype=np.uintp) * np.uintp(stride)
        self.struct = self._point_at_arrays()

    def _point_at_arrays(self) -> Any:
        return library().llama_batch(
            n_tokens=0,
            token=_pointer(self.token_ids, ctypes.c_int32),
            embd=None,
            pos=_pointer(self.positions, ctypes.c_int32),
            n_seq_id=_pointer(self.num_ids, ctypes.c_int32),
            seq_id=_pointer(self._id_pointers, ctypes.POINTER(ctypes.c_int32)),
            logits=_pointer(self.outputs, ctypes.c_int8),
        )

    def fill(self, batch: Batch, placed: dict[int, SequenceRows], branches: Branches) -> None:
        """Write all rows of `batch`; `branches` of its trees."""
        width = batch.width
        self.token_ids[:width] = batch.token_ids
        self.outputs[:width] = batch.outputs
        self.num_ids[:width] = 1
        self.struct.n_tokens = width
        for sequence, part in placed.items():
            if sequence in branches:
                self.positions[part.rows] = part.positions()
                for row, ids in enumerate(branches[sequence], part.start):
                    self.num_ids[row] = len(ids)
                    self.ids[row, : len(ids)] = ids
            else:
                np.add(self._counting[: part.count], part.base, out=self.positions[part.rows])
                self.ids[part.rows, 0] = sequence

    def pad(self, low: int) -> None:
        """Append scratch rows behind the last one up to `low` rows."""
        width = self.struct.n_tokens
        if width >= low:
            return
        scratch = slice(width, low)
        self.token_ids[scratch] = 0
        self.positions[scratch] = self._counting[: low - width] + self.positions[width - 1] + 1
        self.num_ids[scratch] = 1
        self.ids[scratch, 0] = self.ids[width - 1, 0]
        self.outputs[scratch] = 0
        self.struct.n_tokens = low

    def widen_outputs(self, wanted: NDArray[np.bool_], low: int) -> Selection:
        """Request at least `low` rows of logits, the last ones first; where the `wanted` rows will be among them."""
        outputs = self.outputs[: self.struct.n_tokens]
        asked = int(np.count_nonzero(outputs))
        count = int(np.count_nonzero(wanted))
        if asked == count >= low:
            return slice(0, count)
        if asked < low:
            outputs[np.flatnonzero(outputs == 0)[asked - low :]] = 1
        is_ours = np.zeros(outputs.size, np.bool_)
        is_ours[: wanted.size] = wanted
        found = np.flatnonzero(is_ours[outputs != 0])
        first, last = int(found[0]), int(found[-1])
        return slice(first, last + 1) if last - first == count - 1 else found


class PairRows(RowBuffer):
    """Rows of one sequence that are floats, tokens, or both, for heads that read states."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity, 1)
        self._floats: NDArray[np.float32] | None = None  # the library reads them where they are

    def fill_pairs(
        self,
        position: int,
        token_ids: TokenIds | None,
        floats: NDArray[np.float32] | None,
        *,
        outputs: bool = True,
        last_only: bool = False,
        sequence: int = 0,
    ) -> None:
        """`outputs`: whether all rows give logits, or with `last_only` the last one."""
        given = floats if token_ids is None else token_ids
        width = 0 if given is None else len(given)
        self.struct.n_tokens = width
        np.add(self._counting[:width], position, out=self.positions[:width])
        self.ids[:width, 0] = sequence
        self.outputs[:width] = outputs and not last_only
        self.outputs[width - 1] = outputs
        self._floats = floats
        self.struct.embd = None if floats is None else _pointer(floats, ctypes.c_float)
        self.struct.token = None
        if token_ids is not None:
            self.token_ids[:width] = token_ids
            self.struct.token = _pointer(self.token_ids, ctypes.c_int32)


def _pointer(array: NDArray[Any], kind: Any) -> Any:
    return ctypes.cast(array.ctypes.data, ctypes.POINTER(kind))
