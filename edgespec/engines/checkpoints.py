"""Copies of running states, which a text can return to where it cannot be rolled back."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MOST_CHECKPOINTS = 2


class Checkpoints:
    """Running states of the sequences of an engine, at earlier lengths: the latest MOST_CHECKPOINTS of each."""

    def __init__(self) -> None:
        self._kept: dict[int, dict[int, NDArray[np.uint8]]] = {}  # by sequence, then by length

    def add(self, length: int, sequence: int, read: Callable[[], NDArray[np.uint8]]) -> None:
        """Keep what `read` gives of a sequence as it was after `length` tokens."""
        kept = self._kept.setdefault(sequence, {})
        while len(kept) >= MOST_CHECKPOINTS and length not in kept:
            del kept[min(kept)]
        kept[length] = read()

    def at(self, length: int, sequence: int) -> NDArray[np.uint8] | None:
        return self._kept.get(sequence, {}).get(length)

    def latest(self, length: int, sequence: int) -> int:
        """The longest length up to `length` that there is one of; 0 without."""
        return max((each for each in self._kept.get(sequence, {}) if each <= length), default=0)

    def shorten(self, length: int, sequence: int) -> None:
        """The sequence holds `length` tokens now."""
        kept = self._kept.get(sequence, {})
        self._kept[sequence] = {each: state for each, state in kept.items() if each <= length}

    def fork(self, source: int, destination: int) -> None:
        self._kept[destination] = dict(self._kept.get(source, {}))
