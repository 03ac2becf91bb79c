"""Watches a width class while it is in use: now and then the last tokens are scored again in a pass of another width.

A proof looks at a few hundred rows; what it missed shows here, on the user's own text. The watch costs a small share of
the time, and a class that is caught giving different bits is dropped.
"""

from __future__ import annotations

import logging
from time import perf_counter

import numpy as np

from edgespec.engines.proof import EVERY_WIDTH_TO
from edgespec.engines.sequence import CachedSequence
from edgespec.engines.widths import refute
from edgespec.types import Logits

logger = logging.getLogger("edgespec")
SHARE = 0.004  # of the time of passes, that may be spent on looking again


class ClassWatch:
    """One engine's watch. `rows_compared` so far; `has_failed` once any of them differed."""

    def __init__(self) -> None:
        self.rows_compared = 0
        self.has_failed = False
        self._credit_s = 0.0
        self._cost_s = 0.0  # of the last look, or a guess
        self._turn = 0

    def spent(self, seconds: float) -> None:
        """A pass took `seconds`: a share of it may be spent here."""
        self._credit_s += SHARE * seconds
        self._cost_s = self._cost_s or 2.0 * seconds

    def is_due(self, sequence: CachedSequence) -> bool:
        """Whether enough was saved up for a look, and there is a class to look after."""
        pinned = sequence.engine.facts.pinned_class
        return pinned is not None and pinned[0] < pinned[1] and 0.0 < self._cost_s <= self._credit_s

    def look(self, sequence: CachedSequence, logits: Logits) -> None:
        """Score the last n cached tokens again in a pass of another width; compare with their `logits` [n, vocabulary].

        The cache is as before afterwards; logits given out earlier are overwritten. A difference drops the class.
        Raises what a pass raises; the sequence is then shorter by the tokens that were to be scored again.
        """
        started_s = perf_counter()
        count = min(len(logits), sequence.length)
        width = self._other_width(sequence, count)
        if width is None:
            return
        expected = logits[len(logits) - min(count, width) :].copy()
        again = sequence.score_again(width)
        if not np.array_equal(again[width - len(expected) :], expected, equal_nan=True):
            self._fail(sequence, count, width)
        self.rows_compared += len(expected)
        self._cost_s = perf_counter() - started_s
        self._credit_s -= self._cost_s

    def _other_width(self, sequence: CachedSequence, used: int) -> int | None:
        """A width of the class that differs from the one in use; all of them get their turn."""
        pinned = sequence.engine.facts.pinned_class
        assert pinned is not None
        low, high = pinned[0], min(pinned[1], EVERY_WIDTH_TO, sequence.length)
        found = [width for width in range(low, high + 1) if width != max(used, low)]
        self._turn += 1
        # Steps coprime to the number of widths visit all of them, narrow and wide ones in turn.
        return found[(self._turn * 7) % len(found)] if found else None

    def _fail(self, sequence: CachedSequence, count: int, width: int) -> None:
        self.has_failed = True
        refute(sequence.engine)
        logger.warning(
            "reproducible mode ended: on this model a pass of %d rows gave other bits than one of %d rows, so texts "
            "may differ with and without drafting. This is remembered; use --no-reproducible, or other weights",
            width,
            count,
        )
