"""One thread for the matrix products of drafts.

Threads of a BLAS wait for more work by spinning, for longer than a draft takes, and would take cores from the target's
next pass. Their number is the whole process's. So drafts in several threads share one limit: the first sets it, and the
last one gives back what it found. Each with a limit of its own would give back that of another.
"""

from __future__ import annotations

import threading
from functools import cached_property
from types import TracebackType

from threadpoolctl import ThreadpoolController


class BlasLimit:
    """A context manager in which BLAS uses one thread; any thread may be in it, also several at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_inside = 0

    @cached_property
    def _controller(self) -> ThreadpoolController:
        return ThreadpoolController()  # finds the libraries that are loaded: milliseconds, so once

    def __enter__(self) -> None:
        with self._lock:
            if not self._num_inside:
                self._limiter = self._controller.limit(limits=1, user_api="blas")
            self._num_inside += 1

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            self._num_inside -= 1
            if not self._num_inside:
                self._limiter.restore_original_limits()


ONE_BLAS_THREAD = BlasLimit()
