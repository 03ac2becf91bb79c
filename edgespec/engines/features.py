"""The hidden states of a sequence's latest tokens, at most WINDOW of them, for drafters that read them.

They may begin anywhere in the text: earlier passes may have given none, and of a long prompt only the end is computed.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Features = NDArray[np.float32]
WINDOW = 256  # tokens; at a width of 4096 these are 4 MiB
LAYERS_WINDOW = 512  # tokens of which the inputs of layers are kept; at three layers of 4096 these are 24 MiB
PROMPT_FEATURES = 64  # last tokens of a prompt whose hidden states are computed


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
