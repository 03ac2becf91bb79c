"""The largest elements of a row of logits, without sorting the row."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edgespec.types import Logits, TokenIds

# Elements per column of the top-k prefilter. In a short row, comparing all elements is cheaper than selecting columns.
_FOLD, _SHORT_FOLD, _SHORT_ROW = 64, 16, 8192


def top_ids(row: Logits, count: int) -> TokenIds:
    """Ids of the `count` largest elements of a row, descending, ties by lower id; all ids if the row is shorter.

    The row is folded into columns. The count-th largest column maximum is a lower bound of the count-th largest
    element, so only columns whose maximum reaches that bound are searched.
    """
    fold = _FOLD if row.size > _SHORT_ROW else _SHORT_FOLD
    num_columns = row.size // fold
    if num_columns <= count:
        return _sorted_ids(row, np.arange(row.size))[:count]
    folded = row[: num_columns * fold].reshape(fold, num_columns)
    maxima = folded.max(axis=0)
    bound = np.partition(maxima, num_columns - count)[num_columns - count]
    if row.size <= _SHORT_ROW:
        return _sorted_ids(row, np.flatnonzero(row >= bound))[:count]
    columns = np.flatnonzero(maxima >= bound)
    depth, column = np.nonzero(folded[:, columns] >= bound)
    rest = np.flatnonzero(row[num_columns * fold :] >= bound) + num_columns * fold
    return _sorted_ids(row, np.concatenate((depth * num_columns + columns[column], rest)))[:count]


def _sorted_ids(row: Logits, candidates: NDArray[np.intp]) -> TokenIds:
    """Ascending candidate ids [n], sorted by descending logit."""
    return candidates[(-row[candidates]).argsort(kind="stable")].astype(np.int32)
