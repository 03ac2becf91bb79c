"""How many threads a pass uses: fewer while something else keeps the processor busy.

Threads wait for one another at every layer by spinning, and when one of them shares its core with another program all
of them wait for it: on two cores with one busy neighbour two threads of llama.cpp are a quarter as fast as on an idle
machine, and one alone is hardly slowed. When passes are suddenly late, fewer threads are tried, and kept if passes get
faster. Now and then more are tried again, so rarely that it costs little.

Lateness is the logarithm of a pass's time over that of passes with as many rows earlier in this run. A machine that
was busy from the start is detected by processor time: the calling thread computes or spins through the whole pass, so
where it got much less processor time than that, something else used its core. This module knows nothing about engines,
drafts, or costs known in advance.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter

from edgespec.control import constants as c


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
    passes, `is_settled()`: from now on.
    """

    def __init__(
        self,
        steps: Sequence[int],
        use: Callable[[int], None],
        clock: Callable[[], float] = perf_counter,
        is_settled: Callable[[], bool] = lambda: True,
    ) -> None:
        self.steps = list(steps)
        self._use, self._clock, self._is_settled = use, clock, is_settled
        self._at = 0  # of the steps
        self._trial: Trial | None = None
        self._settling = False  # the next pass is the first with this number of threads: it starts or stops some
        self._base: dict[int, float] = {}  # by rows: logarithm of the usual seconds, without the pace
        self._pace = 0.0  # by which all passes are slower lastingly: a long context, heat
        self._level = 0.0  # mean lateness lately
        self._sum = self._stalls = 0.0
        self._run: list[float] = []  # latenesses since the sum was 0
        self._wait_s, self._next_s, self._returned_s = c.FIRST_WAIT_S, 0.0, -math.inf
        self._affordable_s = 0.0  # when more of them may be tried again within PROBING
        self._starved = 0.0  # passes in which the calling thread had no core, less half of the others
        self._hold_s = 0.0  # before which fewer threads are not tried again
        self._failures = 0  # of such trials in a row
        self._last_s = clock()

    @property
    def threads(self) -> int:
        """In use now."""
        return self.steps[self._at]

    def begin(self) -> None:
        """A generation begins: after a pause the machine may be less busy."""
        if self._at and self._clock() - self._last_s > c.PAUSE_S:
            self._next_s = min(self._next_s, self._affordable_s)

    def reset(self) -> None:
        """Use all threads, for a measurement; the passes after it show whether to keep them."""
        self._trial = None
        if self._at:
            self._switch(0)
            self._level = 0.0

    def passed(self, rows: int, seconds: float, cpu_s: float) -> bool:
        """A pass over `rows` took `seconds`, in which the calling thread had `cpu_s` of processor time.

        True if its time says nothing about what passes cost: it was disturbed, or part of a trial.
        """
        self._last_s = self._clock()
        self._starved = max(self._starved + (1.0 if cpu_s < c.STARVED * seconds else -0.5), 0.0)
        late = self._lateness(rows, seconds)
        if self._settling:
            if not self._is_settled():
                if self._trial is not None:
                    self._trial.lost_s += seconds / 2  # making the change slows passes down
                return True
            self._settling = False
            if self._trial is not None and self._trial.is_upward and late is not None and late > c.STALLED:
                self._judge(self._trial, late, seconds)  # late enough to decide without another pass
            return True
        if late is None:
            return self._trial is not None or cpu_s < c.STARVED * seconds
        if self._trial is not None:
            self._judge(self._trial, late, seconds)
            return True
        usual = self._level if self._at else 0.0
        self._level += c.LEVEL_RATE * (_clipped(late) - self._level)
        if self._at and self._last_s >= self._next_s:
            self._try(self._at - 1, self._level, is_upward=True)
            return late - usual > 0.5
        return self._watch(late, late - usual)

    def _lateness(self, rows: int, seconds: float) -> float | None:
        """The lateness of a pass; None while its number of rows is new. Learns the usual time."""
        base = self._base.get(rows)
        seen = math.log(max(seconds, 1e-7)) - self._pace
        if base is None:
            if self._at == 0 and self._trial is None and not self._sum:
                self._base[rows] = seen
            return None
        late = seen - base
        if self._at == 0 and self._trial is None and late < c.ON_TIME:
            # Faster passes count more than slower ones: disturbances only slow a pass.
            factor = 3.0 if late < 0 else 1.0
            self._base[rows] += factor * c.BASE_RATE * late
            self._pace += factor * c.PACE_RATE * late
        return late

    def _watch(self, late: float, more: float) -> bool:
        """Whether a pass, `more` later than usual, was disturbed; tries fewer threads after too many of these."""
        self._stalls = c.STALL_MEMORY * self._stalls + (more > c.STALLED)
        self._sum = min(max(self._sum + min(more, c.MOST_LATE) - c.SLACK, 0.0), 2 * c.ALARM)
        self._run = [*self._run[-7:], _clipped(late)] if self._sum else []
        is_too_much = self._sum > c.ALARM or self._stalls > c.MOST_STALLS or self._starved >= c.MOST_STARVED
        if is_too_much and self._at + 1 < len(self.steps) and self._last_s >= self._hold_s:
            self._try(self._at + 1, max(self._level, sum(self._run) / max(len(self._run), 1)), is_upward=False)
        return more > 0.5 or self._sum > 0.5

    def _try(self, step: int, lateness: float, *, is_upward: bool) -> None:
        self._trial = Trial(self._at, lateness, is_upward, self._at)
        self._sum = self._stalls = self._starved = 0.0
        self._run = []
        self._switch(step)

    def _switch(self, step: int) -> None:
        self._at, self._settling = step, True
        self._use(self.steps[step])

    def _judge(self, trial: Trial, late: float, seconds: float) -> None:
        trial.seen.append(_clipped(late))
        trial.lost_s += seconds * (1.0 - math.exp(min(trial.lateness - late, 0.0)))
        is_much_worse = trial.is_upward and len(trial.seen) == 1 and late > trial.lateness + c.MOST_WORSE
        if len(trial.seen) < c.TRIED and not is_much_worse:
            return
        mean = sum(trial.seen) / len(trial.seen)
        if trial.is_upward:
            # Where passes are on time again, the usual number of threads is taken even if it gains next to nothing.
            needed = 0.0 if mean < c.BETTER else c.BETTER / 2
            self._judged_upward(trial, mean, is_better=mean < trial.lateness - needed)
        else:
            self._judged_downward(trial, mean, is_better=mean < trial.lateness - c.BETTER)

    def _judged_downward(self, trial: Trial, mean: float, *, is_better: bool) -> None:
        """Continue with fewer until they are no better; if none was better, down to one: many cores may be busy."""
        self._trial = None
        if is_better:
            trial.back, trial.lateness = self._at, mean
        if (is_better or trial.back == trial.first) and self._at + 1 < len(self.steps):
            self._trial = replace(trial, seen=[])
            self._switch(self._at + 1)
            return
        if self._at != trial.back:
            self._switch(trial.back)
        self._failures = min(self._failures + 1, c.MOST_DOUBLINGS) if trial.back == trial.first else 0
        if self._failures:
            self._hold_s = self._last_s + 2.0 ** (self._failures - 1) * trial.lost_s / c.PROBING
        if self._at:
            self._level = trial.lateness
            is_new = self._last_s - self._returned_s > 3 * self._wait_s
            self._wait_s = c.FIRST_WAIT_S if is_new else self._wait_s
            self._next_s = self._last_s + self._wait_s
        else:
            # Slow, but not for lack of a core: the machine itself is slower now.
            self._pace += max(trial.lateness, 0.0)
            self._level = 0.0

    def _judged_upward(self, trial: Trial, mean: float, *, is_better: bool) -> None:
        self._trial = None
        if not is_better:
            self._switch(trial.back)
            self._wait_s = max(min(2 * self._wait_s, c.LONGEST_WAIT_S), trial.lost_s / c.PROBING)
            self._next_s, self._affordable_s = self._last_s + self._wait_s, self._last_s + trial.lost_s / c.PROBING
        elif self._at:
            self._level, self._next_s = mean, self._last_s
        else:
            self._returned_s = self._last_s
            self._level = 0.0


def _clipped(late: float) -> float:
    return max(-c.MOST_LATE, min(c.CLIPPED, late))
