"""Times plain and speculative decoding of prompts, in alternating order, with empty caches and after a warm-up.

The baseline is plain decoding by the same model, timed twice for each prompt: what it differs from itself is noise.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import TypeVar

from edgespec.config.options import GenerateOptions, Sampling
from edgespec.loading.drafts import Prompt
from edgespec.reports import RoundRecord, Stats, TokenEvent
from edgespec.runtime import Model

_WARM_UP_TOKENS = 16
OnToken = Callable[[str, TokenEvent, float], None]
Side = TypeVar("Side")


@dataclass(frozen=True, slots=True)
class Task:
    """One decoding of a prompt. `index`: number of the prompt; `repeat`: number of the repetition, from 0."""

    prompt: Prompt
    prompt_ids: tuple[int, ...]
    sampling: Sampling
    index: int = 0
    repeat: int = 0


@dataclass(frozen=True, slots=True)
class Measurement:
    """One generation that began with empty caches. `logprobs`: of its tokens, where they were asked for."""

    stats: Stats
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    rounds: tuple[RoundRecord, ...] = ()

    @property
    def is_long_enough(self) -> bool:
        """Whether a decoding speed is defined: the first token comes from prefill."""
        return self.stats.new_tokens > 1 and self.stats.decode_s > 0


@dataclass(frozen=True, slots=True)
class BenchTrial:
    """One task with and without speculation.

    `standard`: plain decoding, which must give the same tokens. `again`: once more, which shows the noise; None in
    repeats.
    """

    task: Task
    standard: Measurement
    speculative: Measurement
    again: Measurement | None = None

    @property
    def speedup(self) -> float | None:
        """Decoding speed with speculation / without; None if an answer is too short."""
        return self._over_standard(self.speculative)

    @property
    def noise(self) -> float | None:
        """The same ratio where it should be 1: plain decoding once more / plain decoding."""
        return None if self.again is None else self._over_standard(self.again)

    def _over_standard(self, other: Measurement) -> float | None:
        if not (self.standard.is_long_enough and other.is_long_enough):
            return None
        return other.stats.tokens_per_second / self.standard.stats.tokens_per_second


def tasks_of(
    prompts: Sequence[Prompt], encode: Callable[[Prompt], list[int]], sampling: Sampling, repeat: int
) -> list[Task]:
    """Tasks for all prompts, `repeat` times over, so that load on the machine affects all domains alike."""
    encoded = [tuple(encode(prompt)) for prompt in prompts]
    return [
        Task(prompt, encoded[index], sampling, index, turn)
        for turn in range(repeat)
        for index, prompt in enumerate(prompts)
    ]


def run_trials(
    model: Model,
    options: GenerateOptions,
    tasks: Iterable[Task],
    is_over: Callable[[], bool] = lambda: False,
    on_token: OnToken | None = None,
    *,
    compares: bool = False,
) -> Iterator[BenchTrial]:
    """One trial per task; ends early as `runs`. `compares`: for their text; log probabilities are kept then, and
    nothing runs for the noise.
    """
    drafted = dataclasses.replace(options, logprobs=compares)
    plain = dataclasses.replace(drafted, drafter="none")
    both = {"standard": plain, "speculative": drafted}

    def sides(task: Task) -> dict[str, GenerateOptions]:
        return both if task.repeat or compares else {**both, "again": plain}

    done: dict[str, Measurement] = {}
    for task, side, measured in runs(model, tasks, sides, is_over, on_token):
        done[side] = measured
        if done.keys() == sides(task).keys():
            yield BenchTrial(task, **done)
            done = {}


def runs(
    model: Model,
    tasks: Iterable[Task],
    sides: Callable[[Task], Mapping[Side, GenerateOptions]],
    is_over: Callable[[], bool],
    on_token: Callable[[Side, TokenEvent, float], None] | None = None,
) -> Iterator[tuple[Task, Side, Measurement]]:
    """Each task once on each of its `sides`, after a warm-up, beginning with another side for every task.

    Ends early if `is_over`, which is called between generations, returns True or a generation is cancelled.
    `on_token(side, event, seconds)` is called for every token, in seconds of its run's own clock, which begins with the
    prompt and stands still during the call.
    """
    for number, task in enumerate(tasks):
        named = sides(task)
        for options in () if number else named.values():
            if is_over() or measure(model, dataclasses.replace(options, max_tokens=_WARM_UP_TOKENS), task) is None:
                return
        turn = (task.index + task.repeat) % len(named)
        for side in (*named, *named)[turn : turn + len(named)]:
            each = None if on_token is None else partial(on_token, side)
            measured = None if is_over() else measure(model, named[side], task, each)
            if measured is None:
                return
            yield task, side, measured


def measure(
    model: Model, options: GenerateOptions, task: Task, on_token: Callable[[TokenEvent, float], None] | None = None
) -> Measurement | None:
    """One generation that begins with empty caches; None if it was cancelled."""
    model.forget()
    rounds: list[RoundRecord] = []
    generation = model.stream(task.prompt_ids, task.sampling, options, rounds.append)
    stats = generation.stats
    events: list[TokenEvent] = []
    for event in generation:
        events.append(event)
        if on_token is not None:
            on_token(event, stats.wall_s)
    if stats.finish_reason == "cancelled":
        return None
    assert stats.reused_tokens == 0, "caches must be empty in a benchmark"
    logprobs = tuple(event.logprob for event in events if event.logprob is not None)
    return Measurement(stats, tuple(event.token_id for event in events), logprobs, tuple(rounds))


# -- where two texts differ


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first token that differs. `position` counts from 0 in the answer; a token id is None if that answer ended.

    `logit_margin`: difference of the target's log probabilities of the two tokens (natural log). Close to 0 means a
    near-tie that rounding decided; large means a defect. None if one answer ended. The token ids are the same where
    only their log probabilities differ.
    """

    position: int
    plain_token_id: int | None
    drafted_token_id: int | None
    logit_margin: float | None


def first_divergence(plain: Measurement, drafted: Measurement, *, exact: bool) -> Divergence | None:
    """The first difference of two answers to one prompt, whose log probabilities are kept; None if they are equal.

    `exact`: their log probabilities have to be equal too, as they are in reproducible mode.
    """
    for position, (one, other) in enumerate(zip_longest(plain.token_ids, drafted.token_ids)):
        if one is None or other is None:
            return Divergence(position, one, other, None)
        # Both rows follow the same text, so their normalisers are equal and log probabilities differ as the logits do.
        margin = plain.logprobs[position] - drafted.logprobs[position]
        if one != other or (exact and margin):
            return Divergence(position, one, other, margin)
    return None
