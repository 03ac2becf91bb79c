"""A race: one prompt and seed decoded plainly and with speculation, each run alone, timed on its own clock.

Run at the same time, the two would slow each other down; alternating token by token, they would share caches. So the
plain run comes first and is recorded; then the speculative run executes alone, and a caller may replay the recording
beside it by the same clock. This needs one target in memory at a time. Both runs are warmed up first. If memory allows,
the plain target stays loaded and decodes a few tokens again at the end, to report a change of the machine's speed.

The plain run uses the fastest mode, with no draft loaded and no padding of single tokens. Its text may therefore differ
from a reproducible speculative run in a near-tie of rounding; then plain decoding in reproducible mode is run too, and
the texts of that mode are compared.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from edgespec.config import GenerateOptions
from edgespec.control.cost import CostCurve
from edgespec.control.run_cost import DraftCost
from edgespec.errors import Cancelled
from edgespec.loading.sample_prompts import PROMPTS
from edgespec.runtime import Model, load
from edgespec.sampling import Sampling
from edgespec.tuning.verify import Divergence, first_divergence
from edgespec.types import Closing, RoundRecord, Stats, TokenEvent

_WARM_UP_TOKENS = 16
_CHECK_S, _CHECK_TOKENS = 1.5, 8  # the pace is checked for so long, and with so many tokens at least


@dataclass(frozen=True, slots=True)
class Mark:
    """One token, and the seconds on its run's own clock when it came; the clock starts with the prompt."""

    event: TokenEvent
    at_s: float


@dataclass(slots=True)
class Lap:
    """One run as it was recorded; grows while it runs."""

    marks: list[Mark] = field(default_factory=list)
    rounds: list[RoundRecord] = field(default_factory=list)
    stats: Stats = field(default_factory=Stats)

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(mark.event.token_id for mark in self.marks)

    @property
    def logprobs(self) -> tuple[float, ...]:
        return tuple(mark.event.logprob for mark in self.marks if mark.event.logprob is not None)

    @property
    def text(self) -> str:
        return "".join(mark.event.text for mark in self.marks)

    @property
    def is_over(self) -> bool:
        return self.stats.finish_reason is not None

    def seen_at(self, clock_s: float) -> Sequence[Mark]:
        """What had come by then."""
        return self.marks[: bisect_right(self.marks, clock_s, key=lambda mark: mark.at_s)]

    def rate_of(self, marks: Sequence[Mark]) -> float:
        """Tokens per second up to the last of `marks`, prompt and first token left out; 0 when there is no second."""
        seconds = marks[-1].at_s - self.marks[0].at_s if len(marks) > 1 else 0.0
        return (len(marks) - 1) / seconds if seconds > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """A finished race. `proof`: plain decoding in the speculative run's own mode, where that had to be run as well.

    `divergence`: first token in which the speculative text parts from plain decoding's, of `proof` where there is one;
    `rounding`: the same against the fastest plain run, when padding alone explains it. `pace`: plain decoding's rate
    at the end over its rate at first, None when it could not be measured again.
    """

    plain: Lap
    drafted: Lap
    proof: Lap | None
    divergence: Divergence | None
    rounding: Divergence | None
    is_reproducible: bool
    is_greedy: bool
    pace: float | None
    curve: CostCurve | None
    draft_costs: dict[str, DraftCost]

    @property
    def speed_ratio(self) -> float:
        """Tokens per second with speculation over those of plain decoding; 0 when there was too little to time."""
        plain = self.plain.stats.tokens_per_second
        return self.drafted.stats.tokens_per_second / plain if plain else 0.0


class Race(Closing):
    """Runs both sides of one race; takes over `model`, the speculative side, and closes it."""

    def __init__(self, model: Model, prompt_ids: Sequence[int], sampling: Sampling, options: GenerateOptions) -> None:
        self.plain, self.drafted = Lap(), Lap()
        self._prompt_ids, self._sampling, self._options = list(prompt_ids), sampling, options
        self._without_draft = dataclasses.replace(options, drafter="none")
        self._model = model
        self._plain_model: Model | None = None
        self._keeps_both = model.target.facts.pinned_class is None or fits_twice(model)
        model.stream(self._prompt_ids, sampling, options)  # checks the prompt; nothing runs
        self._measure()

    @property
    def model(self) -> Model:
        """The speculative side as it is loaded now."""
        return self._model

    def get_ready(self) -> None:
        """Load what is missing and warm up, so that neither side pays for first touches of memory."""
        if self._keeps_both:
            self._warm_up(self._model, self._options)
        else:
            self._model.close()
        self._plain_model = self._open_plain()
        self._warm_up(self._plain_model, self._without_draft)

    def plain_lap(self) -> Iterator[Lap]:
        """Decode plainly; the lap after every token. `get_ready` comes before."""
        assert self._plain_model is not None
        yield from _run(self.plain, self._plain_model, self._prompt_ids, self._sampling, self._without_draft)

    def change_sides(self) -> None:
        """Between the laps: where memory holds one target only, the other one takes its place."""
        if not self._keeps_both and self._plain_model is not None:
            self._plain_model.close()
            self._plain_model = None
            self._model = load(**_fields(self._model))
            self._measure()
            self._warm_up(self._model, self._options)
        if self._plain_model is self._model:
            self._model.forget()  # the other side has just read the prompt

    def drafted_lap(self) -> Iterator[Lap]:
        """Decode with speculation; the lap after every token."""
        yield from _run(self.drafted, self._model, self._prompt_ids, self._sampling, self._options)

    def outcome(self, *, checks_pace: bool = True) -> Outcome:
        """Compare the texts and, with `checks_pace`, the pace of the machine now with that of the plain lap.

        Raises Cancelled after `cancel`.
        """
        model = self._model
        is_reproducible = model.is_reproducible(self._options.verify or model.options.verify)
        found = first_divergence(self.plain, self.drafted)
        proof: Lap | None = None
        divergence, rounding = found, None
        if found is not None and is_reproducible:
            proof = Lap()
            for _ in _run(proof, model, self._prompt_ids, self._sampling, self._without_draft):
                pass
            if proof.stats.finish_reason == "cancelled":
                raise Cancelled("the race was stopped while its texts were being compared")
            divergence, rounding = first_divergence(proof, self.drafted), found
        can_draft = model.target.facts.can_rollback
        return Outcome(
            plain=self.plain,
            drafted=self.drafted,
            proof=proof,
            divergence=divergence,
            rounding=rounding,
            is_reproducible=is_reproducible,
            is_greedy=self._sampling.temperature == 0,
            pace=self._pace() if checks_pace else None,
            curve=model.cost_curve if can_draft else None,
            draft_costs=model.draft_costs if can_draft else {},
        )

    def cancel(self) -> None:
        """End whichever side runs."""
        for model in (self._model, self._plain_model):
            if model is not None:
                model.cancel()

    def close(self) -> None:
        """Free both sides."""
        self._model.close()
        if self._plain_model is not None:
            self._plain_model.close()

    def _open_plain(self) -> Model:
        if self._model.target.facts.pinned_class is None:
            return self._model
        return load(**_fields(self._model) | {"drafter": "none", "draft_length": "auto", "reproducible": False})

    def _measure(self) -> None:
        """What passes cost is measured before the race, and recalled where it was measured before."""
        if self._model.target.facts.can_rollback:
            _ = self._model.cost_curve, self._model.draft_costs

    def _warm_up(self, model: Model, options: GenerateOptions) -> None:
        """Another text than the prompt, of which nothing may be cached when the race begins."""
        few = dataclasses.replace(options, max_tokens=_WARM_UP_TOKENS, stop=())
        model.generate(PROMPTS[-1].text, self._sampling, few)
        model.forget()

    def _pace(self) -> float | None:
        if self._plain_model is None:
            return None
        again = Lap()
        for _ in _run(again, self._plain_model, self._prompt_ids, self._sampling, self._without_draft):
            if len(again.marks) > _CHECK_TOKENS and again.marks[-1].at_s > _CHECK_S:
                break
        now, before = again.rate_of(again.marks), self.plain.rate_of(self.plain.marks[: len(again.marks)])
        return now / before if now and before and len(again.marks) > _CHECK_TOKENS else None


def fits_twice(model: Model) -> bool:
    """Whether the memory that is left holds the target once more; never assumed of a device's own memory."""
    from edgespec.export.resources import available_memory

    facts = model.target.facts
    if facts.device != "cpu":
        return False
    files = sum(path.stat().st_size for path in model.pair.paths("target"))
    needed = 1.2 * files + facts.kv_bytes_per_token * facts.context_length
    available = available_memory()
    return available is None or needed < available


def _fields(model: Model) -> dict[str, Any]:
    return {field.name: getattr(model.options, field.name) for field in dataclasses.fields(model.options)}


def _run(lap: Lap, model: Model, prompt_ids: list[int], sampling: Sampling, options: GenerateOptions) -> Iterator[Lap]:
    """Record one generation in `lap`. The run's own clock stands still while the caller looks at a token."""
    generation = model.stream(prompt_ids, sampling, options, lap.rounds.append)
    lap.stats = generation.stats
    for event in generation:
        lap.marks.append(Mark(event, lap.stats.wall_s))
        yield lap
