"""One thread for the matrix products of drafts.

Threads of a BLAS wait for more work by spinning, for longer than a draft takes, and would take cores from the target's
next pass. Their number is the whole process's: two threads that each set and restore it would restore what they saw of
one another. So one at a time does, and what another drafts meanwhile goes by its limit, for the milliseconds it lasts.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

from threadpoolctl import ThreadpoolController

_LIMITING = threading.Lock()


@cache
def _controller() -> ThreadpoolController:
    return ThreadpoolController()  # finds the libraries that are loaded: milliseconds, so once


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """BLAS uses one thread within the block, unless a draft in another thread ends before it."""
    if not _LIMITING.acquire(blocking=False):
        yield
        return
    try:
        with _controller().limit(limits=1, user_api="blas"):
            yield
    finally:
        _LIMITING.release()
