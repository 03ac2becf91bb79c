"""The hidden states of a sequence's latest tokens, or the inputs of layers, for drafters that read them.

At most WINDOW are kept. They may begin anywhere in the text: earlier passes may have given none, and of a long prompt
only the end may be computed.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from edgespec.engines.base import StatesOf

Features = NDArray[np.float32]
WINDOW = 512  # tokens; at three layers of 4096 these are 24 MiB
PROMPT_FEATURES = 64  # last tokens of a prompt whose hidden states are computed where that takes their logits, too
# How many of the last tokens of a prompt have states; the very last one has logits anyway.
PROMPT_STATES: dict[StatesOf, int] = {"rows with logits": 1, "scored rows": PROMPT_FEATURES, "all rows": WINDOW}


class FeatureRows:
    """Hidden states [n, hidden size] of the tokens from `start` up to `end`, n at most `window`."""

    def __init__(self, window: int = WINDOW) -> None:
        self._window = window
        self._rows: Features = np.zeros((0, 0), np.float32)
        self._first = 0  # row of the token at `start`
        self.start = self.end = 0

    @property
    def states(self) -> Features:
        """All that is known, oldest first; a view that the next `append` may change."""
        return self._rows[self._first : self._first + self.end - self.start]

    def append(self, length: int, states: Features) -> None:
        """`states` [n, hidden size] of the tokens from `length` on; older ones that are not contiguous are dropped."""
        if len(states) > self._window:
            length, states = length + len(states) - self._window, states[-self._window :]
        count = len(states)
        self.truncate(length)
        if self.end != length or len(self._rows) == 0:
            if len(self._rows) == 0:
                self._rows = np.zeros((2 * self._window, states.shape[1]), np.float32)
            self._first, self.start, self.end = 0, length, length
        if self._first + self.end - self.start + count > len(self._rows):
            kept = self.states[-self._window :].copy()
            self._rows[: len(kept)] = kept
            self._first, self.start = 0, self.end - len(kept)
        place = self._first + self.end - self.start
        self._rows[place : place + count] = states
        self.end = length + count
        surplus = max(self.end - self.start - self._window, 0)
        self._first, self.start = self._first + surplus, self.start + surplus

    def truncate(self, length: int) -> None:
        """Drop the tokens from position `length` on."""
        if length < self.end:
            self.end = length
            self.start = min(self.start, length)


class KeptFeatures:
    """Rows that passes give besides logits (hidden states, or inputs of layers), kept for the latest tokens.

    `read` returns a copy [rows, size] of those of the engine's last pass.
    """

    def __init__(self, read: Callable[[], Features]) -> None:
        self._read = read
        self._kept: FeatureRows | None = None
        self._scored: Features | None = None  # the rows that `keep` chooses from
        self.given: Features | None = None  # this sequence's rows of a shared pass; None: the whole pass is its own

    @property
    def are_kept(self) -> bool:
        return self._kept is not None

    def switch(self, on: bool) -> None:
        """Keep rows from the next pass on, or drop them and stop."""
        self._kept = FeatureRows() if on else None

    def latest(self, length: int) -> Features | None:
        """Rows [n, size] of the last n of `length` tokens, a view; None unless they are kept."""
        if self._kept is None:
            return None
        return self._kept.states if self._kept.end == length else self._kept.states[:0]

    def _of_pass(self) -> Features:
        return self._read() if self.given is None else self.given

    def append(self, length: int, last: int | None = None) -> None:
        """The last pass read the tokens from position `length` on; the rows of the `last` of them are kept."""
        if self._kept is not None:
            rows = self._of_pass()
            skipped = 0 if last is None else max(len(rows) - last, 0)
            self._kept.append(length + skipped, rows[skipped:])

    def score(self) -> None:
        """The last pass scored draft rows; `keep` will say which of them became tokens."""
        self._scored = None if self._kept is None else self._of_pass()

    def keep(self, length: int, rows: list[int]) -> None:
        """These of the scored rows are the tokens from position `length` on."""
        if self._kept is not None and self._scored is not None:
            self._kept.append(length, self._scored[rows])

    def truncate(self, length: int) -> None:
        """Drop the tokens from position `length` on."""
        if self._kept is not None:
            self._kept.truncate(length)
