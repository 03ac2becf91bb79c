"""Keeps a loaded pair within its budget: looks once a second, between rounds, at the process's own memory."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic

from edgespec.engines.limits import own_bytes

_LOOK_EVERY_S = 1.0


class MemoryWatch:
    """`limit_bytes`: most that the process's own memory may grow to; None: it is never over."""

    def __init__(
        self,
        limit_bytes: int | None,
        used: Callable[[], int | None] = own_bytes,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self.limit_bytes = limit_bytes
        self._used, self._clock = used, clock
        self._next_s = clock()

    def stop(self) -> None:
        """Do not look any more."""
        self.limit_bytes = None

    def excess(self) -> int:
        """Bytes over the limit now; 0 within it, and between two looks."""
        now_s = self._clock()
        if self.limit_bytes is None or now_s < self._next_s:
            return 0
        self._next_s = now_s + _LOOK_EVERY_S
        used = self._used()
        return 0 if used is None else max(used - self.limit_bytes, 0)
