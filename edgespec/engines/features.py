"""The hidden states of a sequence's latest tokens, for drafters that read them.

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


class KeptFeatures:
    """Hidden states, kept for the latest tokens.

    They are of the tokens from `start` up to `end`, at most WINDOW. `read` returns a copy [rows, size] of those of the
    engine's last pass.
    """

    def __init__(self, read: Callable[[], Features]) -> None:
        self._read = read
        self._scored: Features | None = None  # the rows that `keep` chooses from
        self.given: Features | None = None  # this sequence's rows of a shared pass; None: the whole pass is its own
        self.switch(False)

    def switch(self, on: bool) -> None:
        """Keep rows from the next pass on, or drop them and stop."""
        self.are_kept = on
        self._rows: Features = np.zeros((0, 0), np.float32)
        self._first = 0  # row of the token at `start`
        self.start = self.end = 0

    def latest(self, length: int) -> Features | None:
        """Rows [n, size] of the last n of `length` tokens, a view; None unless they are kept."""
        if not self.are_kept:
            return None
        return self._rows[self._first : self._first + (self.end - self.start if self.end == length else 0)]

    def _of_pass(self) -> Features:
        return self._read() if self.given is None else self.given

    def append(self, length: int, last: int | None = None) -> None:
        """The last pass read the tokens from position `length` on; the rows of the `last` of them are kept."""
        if self.are_kept:
            rows = self._of_pass()
            skipped = 0 if last is None else max(len(rows) - last, 0)
            self._put(length + skipped, rows[skipped:])

    def score(self) -> None:
        """The last pass scored draft rows; `keep` will say which of them became tokens."""
        self._scored = self._of_pass() if self.are_kept else None

    def keep(self, length: int, rows: list[int]) -> None:
        """These of the scored rows are the tokens from position `length` on."""
        if self.are_kept and self._scored is not None:
            self._put(length, self._scored[rows])

    def truncate(self, length: int) -> None:
        """Drop the tokens from position `length` on."""
        if length < self.end:
            self.end = length
            self.start = min(self.start, length)

    def _put(self, length: int, states: Features) -> None:
        """`states` [n, size] of the tokens from `length` on; older ones that are not contiguous are dropped."""
        if len(states) > WINDOW:
            length, states = length + len(states) - WINDOW, states[-WINDOW:]
        count = len(states)
        self.truncate(length)
        if not len(self._rows):
            self._rows = np.zeros((2 * WINDOW, states.shape[1]), np.float32)
        if self.end != length:
            self._first, self.start, self.end = 0, length, length
        place = self._first + self.end - self.start
        if place + count > len(self._rows):
            kept = self._rows[max(place - WINDOW, self._first) : place].copy()
            self._rows[: len(kept)] = kept
            self._first, self.start, place = 0, self.end - len(kept), len(kept)
        self._rows[place : place + count] = states
        self.end = length + count
        surplus = max(self.end - self.start - WINDOW, 0)
        self._first, self.start = self._first + surplus, self.start + surplus
