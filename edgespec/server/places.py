"""Which of a server's models are in memory: as many as there are places for, in the order in which they are asked for.

One that is asked for waits in line. Whoever is first in line and finds no room has another model leave: the least
recently used one that is idle, else the one that was loaded longest ago, which takes no new requests from then on and
goes after its last answer. So requests without end for one model do not keep another one waiting for ever.
"""

from __future__ import annotations

import threading
from typing import Protocol


class Guest(Protocol):
    """A model that takes a place while it is loaded. All of it is read and written under `Places.changed`."""

    used_s: float  # when a request for it last ended
    loaded_s: float  # when it was last loaded
    is_loading: bool

    @property
    def is_wanted(self) -> bool:
        """Whether a request waits until it is loaded."""

    @property
    def is_changing(self) -> bool:
        """Whether it is being loaded or unloaded."""

    @property
    def is_idle(self) -> bool:
        """Whether no request uses it."""

    def make_way(self, has_to: bool) -> None:
        """Take no new requests and go once it is idle; `has_to` False: stay."""

    def fits(self) -> bool:
        """Whether there is memory for it beside those that are loaded. Takes its time."""


class Places:
    """`most`: models that may be loaded at once. One is loaded or unloaded at a time, so that plans of memory hold."""

    def __init__(self, most: int = 1) -> None:
        self.changed = threading.Condition()
        self._most = most
        self._in_line: list[Guest] = []
        self._taken: list[Guest] = []

    def keep(self, one: Guest) -> None:
        """`one` has a place from the start: its owner loads it."""
        with self.changed:
            self._taken.append(one)

    def take(self, one: Guest) -> bool:
        """Wait for a place for `one`, which counts as being loaded then; False where nobody wants it any more."""
        with self.changed:
            self._in_line.append(one)
        try:
            return self._has_come_first(one)
        finally:
            with self.changed:
                self._in_line.remove(one)
                for each in self._taken:  # who comes next in line chooses again
                    each.make_way(False)
                self.changed.notify_all()

    def release(self, one: Guest) -> None:
        """`one` is not in memory any more."""
        with self.changed:
            self._taken.remove(one)
            self.changed.notify_all()

    def _has_come_first(self, one: Guest) -> bool:
        beside: list[Guest] | None = None
        has_room = False
        while True:
            with self.changed:
                if not one.is_wanted:
                    return False
                is_next = self._in_line[0] is one and not any(each.is_changing for each in self._taken)
                if not is_next:
                    self.changed.wait()
                    continue
                if self._taken == beside:
                    if has_room:
                        one.is_loading = True
                        self._taken.append(one)
                        return True
                    self._clear()
                    self.changed.wait()
                    continue
                beside = list(self._taken)
            # Outside the lock, which requests take too: only who is first in line adds to those that are loaded.
            has_room = len(beside) < self._most and (not beside or one.fits())

    def _clear(self) -> None:
        """Have one of the loaded models make way."""
        idle = [each for each in self._taken if each.is_idle]
        leaving = min(idle, key=lambda each: each.used_s) if idle else min(self._taken, key=lambda each: each.loaded_s)
        for each in self._taken:
            each.make_way(each is leaving)
