"""Checks a width class while it is in use: now and then it scores the last tokens again at another width.

The test at load compares a few hundred rows; this one continues on the user's own text, for a small share of the time.
A class whose passes turn out to give different bits is dropped.
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
SHARE = 0.004  # most of the time of all passes that these checks may take


class ClassWatch:
    """The checks of one engine. `rows_compared` so far; `has_failed` once any of them differed."""

    def __init__(self) -> None:
        self.rows_compared = 0
        self.has_failed = False
        self._credit_s = 0.0
        self._cost_s = 0.0  # time of the last check, or an estimate
        self._turn = 0

    def spent(self, seconds: float) -> None:
        """A pass took `seconds`: a share of that may be spent on checks."""
        self._credit_s += SHARE * seconds
        self._cost_s = self._cost_s or 2.0 * seconds

    def is_due(self, sequence: CachedSequence) -> bool:
        """Whether there is a class to check, and time for it."""
        pinned = None if sequence.engine.facts.is_exact else sequence.engine.facts.pinned_class
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
        start = sequence.length - width
        if sequence.engine.reachable(start, sequence.sequence) != start:  # within a loaded state of a window
            return
        expected = logits[len(logits) - min(count, width) :].copy()
        again = sequence.score_again(width)
        if not np.array_equal(again[width - len(expected) :], expected, equal_nan=True):
            self._fail(sequence, count, width)
        self.rows_compared += len(expected)
        self._cost_s = perf_counter() - started_s
        self._credit_s -= self._cost_s

    def _other_width(self, sequence: CachedSequence, used: int) -> int | None:
        """A width of the class other than the one in use; all of them are used in turn.

        It reaches only over tokens that were read in such passes.
        """
        pinned = sequence.engine.facts.pinned_class
        assert pinned is not None
        low, high = pinned[0], sequence.latest_in_class(min(pinned[1], EVERY_WIDTH_TO))
        found = [width for width in range(low, high + 1) if width != max(used, low)]
        self._turn += 1
        # Steps of 7 alternate between narrow and wide ones and reach all unless their number is a multiple of 7.
        return found[(self._turn * 7) % len(found)] if found else None

    def _fail(self, sequence: CachedSequence, count: int, width: int) -> None:
        self.has_failed = True
        refute(sequence.engine)
        logger.warning(
            "reproducible mode is off from here on: on this model a pass of %d rows gave different bits from one "
            "of %d, so texts may differ with and without drafting. Later runs remember this; use --no-reproducible, "
            "or other weights",
            width,
            count,
        )
