"""How many threads a pass uses: fewer while something else keeps the CPU busy.

Threads wait for one another at every layer by spinning, and when one of them shares its core with another program all
of them wait for it: on two cores with one busy neighbour two threads of llama.cpp are a quarter as fast as on an idle
machine, and one alone is hardly slowed. When passes are suddenly late, fewer threads are tried, and kept if passes get
faster. Now and then more are tried again, so rarely that it costs little.

Lateness is the logarithm of a pass's time over that of passes with as many rows, and about as many tokens in the
cache, earlier in this run: where answers share passes, half of a pass may go to the caches of all of them. Late passes
alone are no sign of a busy machine: hosts and heat slow processors down by half for seconds, and then fewer threads
only cost more. Processor time tells the two apart: threads compute or spin through the whole pass, so what they got
less than that was taken from them. It also shows that a machine was busy from the start. This module knows nothing
about engines, drafts, or costs known in advance.
"""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter, process_time, thread_time
from typing import NamedTuple, Self

from edgespec.control import constants as c

_MOST_LATE, _CLIPPED = 1.0, 2.0  # most that one pass may add to the CUSUM; largest lateness that counts in a mean
_LACKING_S, _LACKING_RATE = 0.12, 0.33  # seconds that the lacking cores are averaged over; most weight of one pass
_LACKING_PRIOR_S = 0.03  # prior for that: so many seconds of passes that lacked nothing
_LATE_RUN = 8  # late passes whose mean is compared with that of fewer threads
_MOST_WORSE = 0.3  # more threads are given up at once if the first pass is slower by this
_PACE_RATE, _BASE_RATE, _LEVEL_RATE = 0.05, 0.1, 0.1  # per pass
_TRIED = 3  # passes that decide about a number of threads, after one to settle
_MOST_DOUBLINGS = 5  # how often the time between such trials doubles while fewer threads are of no use
_PAUSE_S = 5.0  # after such a pause, a new generation does not wait to try more threads
# Most that a change of threads which takes seconds can gain, as a share of the time: on a busy machine (two spinning
# threads reached .69 to .76 of two sleeping ones), and back on an idle one (5 to 12% with 1.2 billion weights).
_BUSY_GAIN, _IDLE_GAIN = 0.25, 0.1


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
class Trial:
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
    passes, `is_settled()`: from now on. A change keeps a core busy for `change_s`: it is made when the machine has
    been busy, or idle, for so long that not having made it cost as much. Then it is at most twice as dear as knowing
    the future would be (ski rental; Karlin et al. 1988, Competitive snoopy caching).
    """

    def __init__(
        self,
        steps: Sequence[int],
        use: Callable[[int], None],
        clock: Callable[[], float] = perf_counter,
        is_settled: Callable[[], bool] = lambda: True,
        change_s: float = 0.0,
    ) -> None:
        self.steps = list(steps)
        self._use, self._clock, self._is_settled = use, clock, is_settled
        self._at = 0  # index into `steps`
        self._trial: Trial | None = None
        self._settling = False  # the next pass is the first with this number of threads: it starts or stops some
        # By rows and steps of the context: logarithm of the usual seconds, without the pace.
        self._base: defaultdict[int, dict[int, float]] = defaultdict(dict)
        self._pace = 0.0  # lasting slowdown of all passes: a long context, heat
        self._level = 0.0  # mean lateness lately
        self._sum, self._run = 0.0, list[float]()  # of lateness, as CUSUM; latenesses since it was 0
        self._least_busy_s, self._busy_s = change_s / _BUSY_GAIN, 0.0  # how long it must be busy; how long it was
        self._wait_s = max(c.FIRST_WAIT_S, change_s / _IDLE_GAIN)  # until more threads are tried again
        self._next_s = self._hold_s = 0.0  # when more threads are tried next; before this, fewer are not
        self._recent_s, self._lacking_s = _LACKING_PRIOR_S, 0.0  # of recent passes, decaying
        self._tells_lacking = False
        self._failures = 0  # consecutive trials of fewer threads that failed
        self._last_s = clock()

    @property
    def threads(self) -> int:
        """In use now."""
        return self.steps[self._at]

    def begin(self) -> None:
        """A generation begins: after a pause the machine may be less busy."""
        if self._clock() - self._last_s > _PAUSE_S:
            self._next_s = min(self._next_s, self._last_s + self._wait_s)

    def reset(self) -> None:
        """Use all threads, for a measurement; the passes after it show whether to keep them."""
        self._trial = None
        if self._at:
            self._switch(0)
            self._level = 0.0

    @property
    def lacking(self) -> float | None:
        """Cores that the threads lacked in recent passes on average; None where that is not known."""
        return self._lacking_s / self._recent_s if self._tells_lacking else None

    def passed(self, rows: int, seconds: float, lacking_s: float | None = None, cached: int = 0) -> bool:
        """A pass over `rows` took `seconds`, in which its threads lacked `lacking_s` of processor time, where known.

        `cached`: tokens in the cache, of all its sequences.
        True if its time says nothing about what passes cost: it was disturbed, or part of a trial.
        """
        self._last_s = self._clock()
        late = self._lateness(rows, cached, seconds)
        if self._settling:
            self._settle(late, seconds)
            return True
        self._tells_lacking = lacking_s is not None
        kept = math.exp(-min(seconds / _LACKING_S, _LACKING_RATE))
        self._recent_s = kept * self._recent_s + seconds
        self._lacking_s = kept * self._lacking_s + (lacking_s or 0.0)
        if late is None:
            is_contended = (self.lacking or 0.0) > c.CONTENDED
            is_first = self._trial is None and not self._at and not self._failures and len(self._base) == 1
            if is_contended and is_first and not self._least_busy_s and len(self.steps) > 1:
                self._try(1, 0.0)  # busy from the start: each further pass on all threads is as slow
            return self._trial is not None or is_contended
        if self._trial is not None:
            self._compare(self._trial, late, seconds)
            return True
        usual = self._level if self._at else 0.0
        self._level += _LEVEL_RATE * (_clipped(late) - self._level)
        if self._at and self._last_s >= self._next_s:
            self._try(self._at - 1, self._level)
            return late - usual > 0.5
        return self._watch(late, late - usual, seconds)

    def _settle(self, late: float | None, seconds: float) -> None:
        """A pass with a number of threads that was just set."""
        trial, self._settling = self._trial, not self._is_settled()
        if trial is None:
            return
        if self._settling:
            trial.lost_s += seconds / 2  # making the change slows passes down
        elif trial.is_upward and late is not None and late > _MOST_LATE:
            self._compare(trial, late, seconds)  # late enough to decide without another pass

    def _lateness(self, rows: int, cached: int, seconds: float) -> float | None:
        """The lateness of a pass; None while its number of rows is new. Learns the usual time."""
        bases, step = self._base[rows], round(math.log(1.0 + cached / c.LONG_PROMPT) / c.SLACK)
        seen = math.log(max(seconds, 1e-7)) - self._pace
        is_usual = self._at == 0 and self._trial is None
        learns_new = is_usual and not self._sum
        if not bases:
            if learns_new:
                bases[step] = seen
            return None
        near = min(bases, key=lambda other: abs(other - step))
        if learns_new and near != step:  # a pass takes no longer than in proportion to what it reads of the cache
            bases[step], near = min(seen, bases[near] + c.SLACK * max(step - near, 0)), step
        late = seen - bases[near]
        if is_usual and late < c.SLACK:
            # Faster passes count more than slower ones: disturbances only slow a pass.
            factor = 3.0 if late < 0 else 1.0
            bases[near] += factor * _BASE_RATE * late
            self._pace += factor * _PACE_RATE * late
        return late

    def _watch(self, late: float, more: float, seconds: float) -> bool:
        """Whether a pass, `more` later than usual, was disturbed; tries fewer threads after too many of these."""
        self._sum = min(max(self._sum + min(more, _MOST_LATE) - c.SLACK, 0.0), 3 * c.ALARM)
        self._run = [*self._run[1 - _LATE_RUN :], _clipped(late)] if self._sum else []
        lacking, mean, is_late = self.lacking, _mean(self._run), self._sum > c.ALARM
        is_contended = is_late if lacking is None else lacking > c.CONTENDED
        was_always = not self._sum and not self._failures  # busy before the first pass, so that none is late
        self._busy_s = max(self._busy_s + (seconds if is_contended else -seconds), 0.0)
        if is_contended and (is_late or was_always):
            pays = self._busy_s >= self._least_busy_s
            if pays and self._at + 1 < len(self.steps) and self._last_s >= self._hold_s:
                self._try(self._at + 1, max(self._level, mean))
        elif self._sum >= 3 * c.ALARM:
            self._slowed(mean)
        # What takes long behind a longer context or on a slower machine is what passes cost now.
        return (lacking is None or lacking > c.CONTENDED / 2) and (more > 0.5 or self._sum > 0.5)

    def _slowed(self, lateness: float) -> None:
        """Passes are late, but not for lack of a core: the machine itself is slower now."""
        if self._at == 0:
            self._pace, self._level = self._pace + max(lateness, 0.0), 0.0
        else:
            self._level = max(self._level, lateness)
        self._sum, self._run = 0.0, []

    def _try(self, step: int, lateness: float) -> None:
        self._trial = Trial(self._at, lateness, step < self._at, self._at)
        self._sum, self._run = 0.0, []
        self._switch(step)

    def _switch(self, step: int) -> None:
        self._at, self._settling, self._busy_s = step, True, 0.0
        self._recent_s, self._lacking_s = _LACKING_PRIOR_S, 0.0
        self._use(self.steps[step])

    def _compare(self, trial: Trial, late: float, seconds: float) -> None:
        trial.seen.append(_clipped(late))
        trial.lost_s += seconds * (1.0 - math.exp(min(trial.lateness - late, 0.0)))
        is_contended = self.lacking is None or self.lacking > c.CONTENDED / 2  # a few passes tell no more
        is_much_worse = trial.is_upward and is_contended and late > trial.lateness + _MOST_WORSE
        if len(trial.seen) < _TRIED and not (is_much_worse and len(trial.seen) == 1):
            return
        self._trial, mean = None, _mean(trial.seen)
        if not trial.is_upward:
            self._compared_downward(trial, mean)
        # Where passes are on time again, the usual number of threads is taken even if it gains next to nothing.
        elif is_contended and mean >= trial.lateness - (0.0 if mean < c.BETTER else c.BETTER / 2):
            self._switch(trial.back)
            self._next_s = self._last_s + max(self._wait_s, trial.lost_s / c.PROBING)
        else:
            self._level, self._next_s = mean if self._at else 0.0, self._last_s

    def _compared_downward(self, trial: Trial, mean: float) -> None:
        """Continue with fewer until they are no better; if none was better, down to one: many cores may be busy."""
        if is_better := mean < trial.lateness - c.BETTER:
            trial.back, trial.lateness = self._at, mean
        if (is_better or trial.back == trial.first) and self._at + 1 < len(self.steps):
            self._trial = replace(trial, seen=[])
            self._switch(self._at + 1)
            return
        if self._at != trial.back:
            self._switch(trial.back)
        self._failures = min(self._failures + 1, _MOST_DOUBLINGS) if trial.back == trial.first else 0
        if self._failures:
            self._hold_s = self._last_s + 2.0 ** (self._failures - 1) * trial.lost_s / c.PROBING
        if self._at:
            self._level, self._next_s = trial.lateness, self._last_s + self._wait_s
        else:
            self._slowed(trial.lateness)


def _mean(lateness: Sequence[float]) -> float:
    """Log of the mean slowdown, so that a few stalled passes count for the time they cost; 0 without passes."""
    return math.log(sum(map(math.exp, lateness)) / len(lateness)) if lateness else 0.0


def _clipped(late: float) -> float:
    return max(-_MOST_LATE, min(_CLIPPED, late))
