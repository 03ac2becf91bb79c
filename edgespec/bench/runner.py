"""Times plain and speculative decoding of prompts, in alternating order, with empty caches and after a warm-up.

The baseline is plain decoding at its fastest: where reproducible mode pads single-token passes, it is a second copy of
the target without that mode. It is timed twice for each prompt: what it differs from itself is noise.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from edgespec.bench.energy import EnergyMeter
from edgespec.bench.record import Measurement, Trial, digest_of
from edgespec.config import GenerateOptions, keywords_of
from edgespec.reports import RoundRecord, TokenEvent
from edgespec.runtime import Model, load
from edgespec.sampling import Sampling
from edgespec.tuning.workload import BenchPrompt

_WARM_UP_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Task:
    """One decoding of a prompt. `index`: number of the prompt; `repeat`: number of the repetition, from 0."""

    prompt: BenchPrompt
    prompt_ids: tuple[int, ...]
    sampling: Sampling
    index: int
    repeat: int

    @property
    def key(self) -> tuple[str, int]:
        return self.prompt.digest, self.repeat


def needs_second_model(model: Model) -> bool:
    """Whether the mode of `model` slows down plain decoding."""
    pinned = model.target.facts.pinned_class
    return pinned is not None and pinned[0] > 1


def load_standard(model: Model) -> Model:
    """The baseline model: `model` itself, or its target loaded again without reproducible mode."""
    if not needs_second_model(model):
        return model
    return load(**{**keywords_of(model.options), "reproducible": False, "drafter": "none"})


def tasks_of(
    prompts: Sequence[BenchPrompt], encode: Callable[[BenchPrompt], list[int]], sampling: Sampling, repeat: int
) -> list[Task]:
    """Tasks for all prompts, `repeat` times over, so that load on the machine affects all domains alike."""
    encoded = [tuple(encode(prompt)) for prompt in prompts]
    return [
        Task(prompt, encoded[index], prompt.sampling(sampling), index, turn)
        for turn in range(repeat)
        for index, prompt in enumerate(prompts)
    ]


class Runner:
    """Runs tasks. `speculative` and `standard` may be one model; `is_over` is called between generations."""

    def __init__(
        self,
        speculative: Model,
        standard: Model,
        options: GenerateOptions,
        is_over: Callable[[], bool] = lambda: False,
    ) -> None:
        self._speculative, self._standard = speculative, standard
        self._options = dataclasses.replace(options, logprobs=False)
        self._plain = dataclasses.replace(self._options, drafter="none")
        self._is_over = is_over
        self._meter = EnergyMeter()

    def run(self, tasks: Iterable[Task]) -> Iterator[Trial]:
        """One trial per task, after a warm-up. Ends early if `is_over` returns True or a generation is cancelled."""
        for number, task in enumerate(tasks):
            if not number:
                self._warm_up(task)
            trial = None if self._is_over() else self._trial(task)
            if trial is None:
                return
            yield trial

    def _warm_up(self, task: Task) -> None:
        for model, options in ((self._standard, self._plain), (self._speculative, self._options)):
            self._measure(model, dataclasses.replace(options, max_tokens=_WARM_UP_TOKENS), task)

    def _trial(self, task: Task) -> Trial | None:
        sides = {"standard": (self._standard, self._plain), "speculative": (self._speculative, self._options)}
        if task.repeat == 0:
            sides["again"] = self._standard, self._plain
            if self._standard is not self._speculative:
                sides["plain"] = self._speculative, self._plain
        turn = (task.index + task.repeat) % len(sides)
        order = (*sides, *sides)[turn : turn + len(sides)]
        found: dict[str, Measurement] = {}
        for name in order:
            measured = self._measure(*sides[name], task)
            if measured is None:
                return None
            found[name] = measured
        for name in found.keys() - {"speculative"}:
            found[name] = dataclasses.replace(found[name], pieces=())
        others = found.get("plain"), found.get("again")
        return Trial(*task.key, order, found["standard"], found["speculative"], *others)

    def _measure(self, model: Model, options: GenerateOptions, task: Task) -> Measurement | None:
        """One generation that begins with empty caches; None if it was cancelled."""
        if self._is_over():
            return None
        model.forget()
        rounds: list[RoundRecord] = []
        before = self._meter.read()
        generation = model.stream(task.prompt_ids, task.sampling, options, rounds.append)
        events = list(generation)
        energy_j = self._meter.joules_since(before)
        stats = generation.stats
        if stats.finish_reason == "cancelled":
            return None
        assert stats.reused_tokens == 0, "caches must be empty in a benchmark"
        return Measurement(stats, digest_of(events), tuple(rounds), _pieces(events), energy_j)


def _pieces(events: Iterable[TokenEvent]) -> tuple[tuple[str, str | None], ...]:
    return tuple((event.text, event.drafter) for event in events)
