"""Who is told how an export goes; the command line implements it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

Progress = Callable[[int, int, str], None]
"""Called with (done, total, what is being done)."""


def no_progress(_done: int, _total: int, _what: str) -> None:
    pass


class Reporter(Protocol):
    """Told of notes and stages."""

    def note(self, text: str) -> None:
        """One thing a user should know."""

    def stage(self, title: str) -> AbstractContextManager[Progress]:
        """A piece of work; what it yields is called with (done, total, what)."""
