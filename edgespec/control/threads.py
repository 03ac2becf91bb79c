"""How many threads a pass uses: fewer while something else keeps the CPU busy.

Threads wait for one another at every layer by spinning, and when one of them shares its core with another program all
of them wait for it: on two cores with one busy neighbour two threads of llama.cpp are a quarter as fast as on an idle
machine, and one alone is hardly slowed. When threads lack cores, fewer are tried, and kept if passes get faster. Now
and then more are tried again, so rarely that it costs little.

Late passes alone are no sign of a busy machine: hosts and heat slow processors down by half for seconds, and then fewer
threads only cost more. Processor time tells the two apart: threads compute or spin through the whole pass, so what they
got less than that was taken from them. Where its clock is too coarse, the number of threads stays as it is. This module
knows nothing about engines, drafts, or costs known in advance.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter, process_time, thread_time
from typing import NamedTuple, Self

from edgespec.control import constants as c

_LEAST_LATE, _MOST_LATE = -1.0, 2.0  # limits of what the lateness of one pass counts for in a mean
_LACKING_S, _LACKING_RATE = 0.12, 0.33  # seconds that the lacking cores are averaged over; most weight of one pass
_LACKING_PRIOR_S = 0.03  # prior for that: so many seconds of passes that lacked nothing
_MOST_WORSE = 0.3  # more threads are given up at once if the first pass is slower by this
_LEVEL_RATE = 0.2  # per pass
_TRIED = 3  # passes that decide about a number of threads, after one to settle
_MOST_DOUBLINGS = 5  # how often the time between such trials doubles while fewer threads are of no use
_PAUSE_S = 5.0  # after such a pause, a new generation does not wait to try more threads


class Started(NamedTuple):
    """When a pass began: seconds of the wall, and of processor time of the calling thread and of the process."""

    wall_s: float
    own_s: float
    all_s: float

    @classmethod
    def now(cls) -> Self:
        return cls(perf_counter(), thread_time(), process_time())

    def lacking_s(self, threads: int) -> float | None:
        """Core seconds that a pass on `threads` threads did not get; None if the clock is too coarse for that.

        Other threads of the process may have used what the pass did not get, so the calling thread is counted apart.
        """
        if os.name == "nt":  # processor time has a resolution of 16 ms
            return None
        seconds = perf_counter() - self.wall_s
        own_s, all_s = thread_time() - self.own_s, process_time() - self.all_s
        return max(threads * seconds - all_s, seconds - own_s, 0.0)


@dataclass(slots=True)
class ThreadTrial:
    """A trial of numbers of threads. `first`: the step before it; `back`: the best step so far, with its `lateness`."""

    first: int
    lateness: float
    is_upward: bool
    back: int
    seen: list[float] = field(default_factory=list)
    lost_s: float = 0.0


class ThreadControl:
    """Chooses the number of threads after every pass.

    `steps`: those to choose from, descending; the first one is for an idle machine. `use(n)` sets the number for later
    passes.
    """

    def __init__(
        self, steps: Sequence[int], use: Callable[[int], None], clock: Callable[[], float] = perf_counter
    ) -> None:
        self.steps = list(steps)
        self._use, self._clock = use, clock
        self._at = 0  # index into `steps`
        self._trial: ThreadTrial | None = None
        self._settling = False  # the next pass is the first with this number of threads: it starts or stops some
        self._usual: dict[int, float] = {}  # logarithm of a pass's seconds by rows, with all threads and cores
        self._level = 0.0  # mean lateness lately: logarithm of a pass's time over the usual one
        self._next_s = self._hold_s = 0.0  # when more threads are tried next; before this, fewer are not
        self._recent_s, self._lacking_s = _LACKING_PRIOR_S, 0.0  # of recent passes, decaying
        self._failures = 0  # consecutive trials of fewer threads that failed
        self._last_s = clock()

    @property
    def threads(self) -> int:
        """In use now."""
        return self.steps[self._at]

    def begin(self) -> None:
        """A generation begins: after a pause the machine may be less busy."""
        if self._clock() - self._last_s > _PAUSE_S:
            self._next_s = min(self._next_s, self._last_s + c.FIRST_WAIT_S)

    @property
    def lacking(self) -> float:
        """Cores that the threads lacked in recent passes on average."""
        return self._lacking_s / self._recent_s

    def passed(self, rows: int, seconds: float, lacking_s: float | None) -> None:
        """A pass over `rows` took `seconds`, in which its threads lacked `lacking_s` of processor time, where known."""
        if lacking_s is None:
            return
        self._last_s = self._clock()
        seen = math.log(max(seconds, 1e-7))
        late = seen - self._usual.setdefault(rows, seen)
        if self._settling:
            self._settling = False
            return
        kept = math.exp(-min(seconds / _LACKING_S, _LACKING_RATE))
        self._recent_s = kept * self._recent_s + seconds
        self._lacking_s = kept * self._lacking_s + lacking_s
        if self._trial is not None:
            self._compare(self._trial, late, seconds)
            return
        is_contended = self.lacking > c.CONTENDED
        if not self._at and not is_contended:
            self._usual[rows] += c.COST_RATE * (3.0 if late < 0 else 1.0) * late  # disturbances only slow a pass
        self._level += _LEVEL_RATE * (_clipped(late) - self._level)
        if self._at and self._last_s >= self._next_s:
            self._try(self._at - 1)
        elif is_contended and self._last_s >= self._hold_s and self._at + 1 < len(self.steps):
            self._try(self._at + 1)

    def _try(self, step: int) -> None:
        self._trial = ThreadTrial(self._at, self._level, step < self._at, self._at)
        self._switch(step)

    def _switch(self, step: int) -> None:
        self._at, self._settling = step, True
        self._recent_s, self._lacking_s = _LACKING_PRIOR_S, 0.0
        self._use(self.steps[step])

    def _compare(self, trial: ThreadTrial, late: float, seconds: float) -> None:
        trial.seen.append(_clipped(late))
        trial.lost_s += seconds * (1.0 - math.exp(min(trial.lateness - late, 0.0)))
        is_contended = self.lacking > c.CONTENDED / 2  # a few passes tell no more
        is_much_worse = trial.is_upward and is_contended and late > trial.lateness + _MOST_WORSE
        if len(trial.seen) < _TRIED and not (is_much_worse and len(trial.seen) == 1):
            return
        # Log of the mean slowdown, so that a few stalled passes count for the time they cost.
        self._trial, mean = None, math.log(sum(map(math.exp, trial.seen)) / len(trial.seen))
        if not trial.is_upward:
            self._compared_downward(trial, mean)
        elif is_contended and mean >= trial.lateness - c.BETTER / 2:
            self._switch(trial.back)
            self._next_s = self._last_s + max(c.FIRST_WAIT_S, trial.lost_s / c.PROBING)
        else:  # kept even if it gains next to nothing, and yet more are tried
            self._level, self._next_s = mean, self._last_s

    def _compared_downward(self, trial: ThreadTrial, mean: float) -> None:
        """Continue with fewer until they are no better; if none was better, down to one: many cores may be busy."""
        if is_better := mean < trial.lateness - c.BETTER:
            trial.back, trial.lateness = self._at, mean
        if (is_better or trial.back == trial.first) and self._at + 1 < len(self.steps):
            self._trial, trial.seen = trial, []
            self._switch(self._at + 1)
            return
        if self._at != trial.back:
            self._switch(trial.back)
        self._level, self._next_s = trial.lateness, self._last_s + c.FIRST_WAIT_S
        self._failures = min(self._failures + 1, _MOST_DOUBLINGS) if trial.back == trial.first else 0
        if self._failures:
            self._hold_s = self._last_s + 2.0 ** (self._failures - 1) * trial.lost_s / c.PROBING


def _clipped(late: float) -> float:
    return max(_LEAST_LATE, min(_MOST_LATE, late))
