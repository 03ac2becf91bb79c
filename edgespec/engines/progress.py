"""Progress of long work during a load, reported to the listener of this thread.

Work deep inside an engine can report without every call in between passing a listener on.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from edgespec.types import Progress

_listener: ContextVar[Progress | None] = ContextVar("edgespec_on_progress", default=None)


@contextmanager
def reporting_to(on_progress: Progress | None) -> Iterator[None]:
    """Inside the block, in this thread, work reports to `on_progress`, if it is not None."""
    before = _listener.set(on_progress)
    try:
        yield
    finally:
        _listener.reset(before)


class Work:
    """Work of `total` steps, described as `what`: reported when it begins and after every step."""

    def __init__(self, total: int, what: str) -> None:
        self.done, self.total, self.what = 0, total, what
        self._report()

    def step(self, count: int = 1) -> None:
        """`count` more steps are done."""
        self.done = min(self.done + count, self.total)
        self._report()

    def _report(self) -> None:
        if (listener := _listener.get()) is not None:
            listener(self.done, self.total, self.what)
