"""Thread counts under load, on a simulated machine: found soon, given back soon, and nearly free on an idle one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest

from edgespec.config.options import Sampling
from edgespec.control.auto import AutoController
from edgespec.control.cost import DraftCost
from edgespec.control.prices import RunCosts
from edgespec.control.threads import ThreadControl
from edgespec.drafters.base import DraftRequest
from edgespec.engines.base import usual_steps
from edgespec.engines.sequence import at_once
from edgespec.sampling.sampler import Sampler
from simulation import LLAMA_Q8_0, PLAIN_S, Clock, Machine, TracedDrafter, beta_chances, honest, made_up, simulate

SLOWED = 12.0  # times as long a pass takes in which a spinning thread waits for one that lost its core
Busy = Callable[[float], int]


@dataclass
class Cores:
    """Passes on `cores` cores of which `busy(now_s)` run something else; two rows cost 1.6 times one.

    As measured with llama.cpp: with a core too few every pass takes 1.9 times as long and one in ten much longer.
    """

    cores: int
    busy: Busy
    pass_s: float = 0.011
    heat: Callable[[float], float] = lambda now_s: 1.0
    noise: float = 0.06
    lacking_s: float = 0.0  # of the last pass, that its threads had less than one core each
    clock: Clock = field(default_factory=Clock)
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))

    def seconds(self, threads: int, rows: int) -> float:
        now_s = self.clock()
        share = 0.45 + 0.55 / threads  # one thread takes 1.38 times as long as two: half of the work waits for memory
        ideal_s = self.pass_s * (1.0 + 0.6 * (rows - 1)) * share / (0.45 + 0.55 / 2)
        seconds = ideal_s * self.heat(now_s) * float(np.exp(self.noise * self.rng.standard_normal()))
        if threads > self.cores - self.busy(now_s):
            seconds *= SLOWED if self.rng.random() < 0.1 else 1.9
        self.clock.now_s += seconds
        over = max(threads - self.cores + self.busy(now_s), 0)
        self.lacking_s = seconds * max(0.6 * over + 0.1 * self.rng.standard_normal(), 0.05)
        return seconds


@dataclass
class Seen:
    """What a run did: by pass, when it ended, and threads; `seconds`, in all."""

    ends_s: list[float] = field(default_factory=list)
    threads: list[int] = field(default_factory=list)
    seconds: float = 0.0

    def between(self, start_s: float, end_s: float) -> int:
        return sum(start_s <= end < end_s for end in self.ends_s)


def run(machine: Cores, threads: int | None, until_s: float, widths: tuple[int, ...] = (1,)) -> Seen:
    """Passes of these widths in turn, adaptive for None."""
    used = [threads or machine.cores]
    steps = usual_steps(machine.cores)
    control = None if threads else ThreadControl(steps, lambda n: used.__setitem__(0, n), machine.clock)
    seen, turn = Seen(), 0
    while machine.clock() < until_s:
        rows = widths[turn % len(widths)]
        turn += 1
        seconds = machine.seconds(used[0], rows)
        seen.threads.append(used[0])
        seen.ends_s.append(machine.clock())
        if control is not None:
            control.passed(rows, seconds, machine.lacking_s)
    seen.seconds = machine.clock()
    return seen


def never(now_s: float) -> int:
    return 0


def always(now_s: float) -> int:
    return 1


@pytest.mark.parametrize("widths", [(1,), (1, 5, 2, 5, 3)])
@pytest.mark.parametrize("noise", [0.02, 0.15])
def test_an_idle_machine_keeps_its_threads(noise: float, widths: tuple[int, ...]) -> None:
    adaptive = run(Cores(2, never, noise=noise), None, 120.0, widths)
    fixed = run(Cores(2, never, noise=noise), 2, 120.0, widths)
    assert len(adaptive.ends_s) >= 0.99 * len(fixed.ends_s)


@pytest.mark.parametrize("widths", [(1,), (1, 5, 2, 5, 3)])
@pytest.mark.parametrize("begins_s", [0.0, 3.0])
def test_a_busy_core_is_left_alone_soon_and_for_long(begins_s: float, widths: tuple[int, ...]) -> None:
    def busy(now_s: float) -> int:
        return int(now_s >= begins_s)

    adaptive = run(Cores(2, busy), None, begins_s + 40.0, widths)
    best, worst = (run(Cores(2, busy), threads, begins_s + 40.0, widths) for threads in (1, 2))
    start_s, end_s = begins_s, begins_s + 40.0
    assert adaptive.between(start_s, end_s) >= 0.85 * best.between(start_s, end_s)
    assert worst.between(start_s, end_s) < 0.6 * best.between(start_s, end_s)
    first = next(end for end, threads in zip(adaptive.ends_s, adaptive.threads, strict=True) if threads == 1)
    assert first - begins_s < 1.0


def test_a_machine_that_is_busy_from_the_start_takes_one_pass_of_a_large_model() -> None:
    """A second one to compare with would take as long again."""
    assert run(Cores(2, always, pass_s=0.2), None, 10.0).threads[:8] == [2] + 7 * [1]
    assert set(run(Cores(2, never, pass_s=0.2), None, 10.0).threads) == {2}


def test_threads_come_back_when_the_load_goes() -> None:
    adaptive = run(Cores(2, lambda now_s: int(3.0 <= now_s < 30.0)), None, 70.0)
    back = next(
        end for end, n in zip(adaptive.ends_s, adaptive.threads, strict=True) if end > 30.0 and n == 2
    )  # a probe that finds all well
    assert back - 30.0 < 11.0
    late = [n for end, n in zip(adaptive.ends_s, adaptive.threads, strict=True) if end > 42.0]
    assert np.mean(np.array(late) == 2) > 0.99


def test_answers_that_share_passes_and_change_their_contexts_keep_their_threads() -> None:
    """The contexts of four answers at once jump when one ends and the next begins: passes vary by 2.4, rows do not."""
    counts = []
    for is_fixed in (True, False):
        machine, used = Cores(2, never), [2]
        control = ThreadControl(usual_steps(2), lambda n, used=used: used.__setitem__(0, n), machine.clock)
        lengths, passes = [32, 400, 32, 200], 0
        machine.heat = lambda now_s, lengths=lengths: 1.0 + sum(lengths) / 1000
        while machine.clock() < 60.0:
            seconds = machine.seconds(used[0], 4)
            if not is_fixed:
                control.passed(4, seconds, machine.lacking_s + 0.3 * seconds)
            passes += 1
            lengths[:] = [length + 1 for length in lengths]
            if passes % 40 == 0:
                lengths[passes // 40 % 4] = (30, 900, 60, 400)[passes // 160 % 4]
        counts.append(passes)
    assert counts[1] > 0.99 * counts[0]


def test_a_clock_that_tells_no_processor_time_changes_nothing() -> None:
    machine, used = Cores(2, always), [2]
    control = ThreadControl(usual_steps(2), lambda n: used.__setitem__(0, n), machine.clock)
    for _ in range(200):
        control.passed(1, machine.seconds(used[0], 1), None)
    assert used == [2]


@pytest.mark.parametrize("slowed", [1.4, 1.8])
@pytest.mark.parametrize("period_s", [0.3, 2.0, 20.0])
def test_a_host_that_slows_the_machine_down_for_a_while_takes_no_threads(slowed: float, period_s: float) -> None:
    """Passes are late, as often as not, and no thread lacks its core."""

    def heat(now_s: float) -> float:
        return slowed if now_s % period_s < period_s / 2 else 1.0

    adaptive = run(Cores(2, never, heat=heat), None, 60.0)
    fixed = run(Cores(2, never, heat=heat), 2, 60.0)
    assert np.mean(np.array(adaptive.threads) == 2) > 0.99
    assert len(adaptive.ends_s) > 0.98 * len(fixed.ends_s)


def test_a_load_that_comes_and_goes_is_followed() -> None:
    def busy(now_s: float) -> int:
        return int(now_s % 20.0 < 10.0)

    adaptive, one, two = (run(Cores(2, busy), threads, 200.0) for threads in (None, 1, 2))
    assert len(adaptive.ends_s) > 0.95 * max(len(one.ends_s), len(two.ends_s))


@pytest.mark.parametrize("busy, best", [(1, 7), (3, 4), (7, 1)])
def test_more_cores_give_up_as_many_as_are_taken(busy: int, best: int) -> None:
    adaptive = run(Cores(8, lambda now_s: busy if now_s > 2.0 else 0), None, 40.0)
    late = [n for end, n in zip(adaptive.ends_s, adaptive.threads, strict=True) if end > 10.0]
    assert max(set(late), key=late.count) == best


def test_a_generation_after_a_pause_tries_all_threads_at_once() -> None:
    machine, used = Cores(2, lambda now_s: int(3.0 <= now_s < 20.0)), [2]
    control = ThreadControl(usual_steps(2), lambda n: used.__setitem__(0, n), machine.clock)
    while machine.clock() < 20.0:
        control.passed(1, machine.seconds(used[0], 1), machine.lacking_s)
    machine.clock.now_s += 60.0
    control.begin()
    for _ in range(6):
        control.passed(1, machine.seconds(used[0], 1), machine.lacking_s)
    assert used == [2]


STEEP = {width: ratio**1.4 for width, ratio in LLAMA_Q8_0.items()}
TEXTS = [made_up(400, beta_chances(0.7, seed), honest, seed) for seed in range(3)]


def controlled(machine: Machine) -> AutoController:
    clock = Clock()
    drafter = TracedDrafter(clock, 0.04 * PLAIN_S)
    costs = RunCosts(machine.curve(), {"model": DraftCost(0.04 * PLAIN_S)}, 2)
    controller = AutoController({"model": drafter}, costs, 0.02, clock)
    for text in TEXTS:
        simulate(controller, text, machine, clock)
    return controller


@pytest.mark.parametrize(
    ("steeper", "slower_draft", "least"),
    [(1.0, 2.0, 1.4), (1.0, 24.0, 0.97), (2.0, 2.0, 0.96)],
    ids=["all passes alike", "the draft model more", "wider passes more"],
)
def test_other_programs_delay_passes_and_drafting_goes_on_where_it_pays(steeper, slower_draft, least) -> None:
    controller = controlled(Machine(LLAMA_Q8_0))
    drafter = controller.drafters["model"]
    assert isinstance(drafter, TracedDrafter)
    drafter._token_s *= slower_draft
    busy = Machine({width: ratio**steeper for width, ratio in LLAMA_Q8_0.items()}, plain_s=2 * PLAIN_S)
    records = [record for text in TEXTS * 3 for record in simulate(controller, text, busy, drafter._clock)]
    taken_s = sum(record.draft_s + record.verify_s for record in records)
    assert sum(record.accepted_tokens + 1 for record in records) * 2 * PLAIN_S > least * taken_s


def test_each_number_of_threads_has_costs_of_its_own() -> None:
    controller = controlled(Machine(LLAMA_Q8_0))
    drafter = controller.drafters["model"]
    assert isinstance(drafter, TracedDrafter)
    before = [controller.costs.curve.at(width) for width in (1, 2, 4, 8)]
    controller.costs.use_threads(1)
    for text in TEXTS * 2:
        simulate(controller, text, Machine(STEEP, plain_s=1.3 * PLAIN_S), drafter._clock)
    steep = controller.costs.curve
    assert steep.at(4) / steep.at(1) > 1.15 * before[2] / before[0]
    controller.costs.use_threads(2)
    request = DraftRequest(TEXTS[0].token_ids[:40], 8, Sampler(Sampling(temperature=0.0), 5000))
    drafter.take(TEXTS[0])
    at_once(controller.proposing(request))
    assert [controller.costs.curve.at(width) for width in (1, 2, 4, 8)] == pytest.approx(before)
    controller.costs.use_threads(1)
    at_once(controller.proposing(request))
    assert controller.costs.curve is steep
