"""A histogram of seconds in Prometheus' form."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate

# A model of 0.5B answers a short prompt in some ten milliseconds; one of 70B reads a long prompt for minutes.
BOUNDS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0)


class Histogram:
    """Counts values up to each of `bounds`, and their sum. One thread writes."""

    def __init__(self, bounds: Sequence[float] = BOUNDS_S) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def add(self, value: float) -> None:
        """Count one value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def include(self, other: Histogram) -> None:
        """Count all that `other`, of the same bounds, has counted."""
        self._counts = [mine + its for mine, its in zip(self._counts, other._counts, strict=True)]
        self._sum += other._sum

    def lines(self, name: str, help: str) -> Iterable[str]:
        """The text that Prometheus reads: buckets count all values up to their bound."""
        yield f"# HELP {name} {help}."
        yield f"# TYPE {name} histogram"
        totals = list(accumulate(self._counts))  # read once, so that the last bucket is the count
        for bound, total in zip((*map(repr, self._bounds), "+Inf"), totals, strict=True):
            yield f'{name}_bucket{{le="{bound}"}} {total}'
        yield f"{name}_sum {self._sum!r}"
        yield f"{name}_count {totals[-1]}"
