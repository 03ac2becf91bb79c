"""A race: one prompt and seed decoded plainly and with speculation, each run alone, timed on its own clock.

Run at the same time, the two would slow each other down; alternating token by token, they would share caches. So the
plain run comes first and is recorded; then the speculative run executes alone, and a caller may replay the recording
beside it by the same clock. Both runs are warmed up first, and use one loaded model in one mode, so that in
reproducible mode their texts are equal. Plain decoding decodes a few tokens again at the end, to report a change of the
machine's speed.

Reproducible mode may slow plain decoding down, and the baseline of all our claims is its fastest mode. So before the
race both modes decode a few tokens plainly, one after the other, and the result tells the ratio.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from edgespec.closing import Closing
from edgespec.config import GenerateOptions, keywords_of
from edgespec.control.cost import CostCurve
from edgespec.control.draft_cost import DraftCost
from edgespec.errors import Cancelled
from edgespec.loading.sample_prompts import PROMPTS
from edgespec.reports import RoundRecord, Stats, TokenEvent
from edgespec.runtime import Model, load
from edgespec.sampling import Sampling
from edgespec.tuning.verify import Divergence, first_divergence

_WARM_UP_TOKENS = 16
_TRIALS = 3  # of either mode; the fastest counts, as a model is slow at first and other programs disturb
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
    """A finished race. `divergence`: the first token in which the texts differ.

    `fastest`: plain decoding's rate in the fastest mode over that in the race's, None where it is the same mode or too
    little was decoded to tell. `pace`: plain decoding's rate at the end over its rate at first, None when it was not
    measured again.
    """

    plain: Lap
    drafted: Lap
    divergence: Divergence | None
    is_reproducible: bool
    is_greedy: bool
    pace: float | None
    fastest: float | None
    curve: CostCurve | None
    draft_costs: dict[str, DraftCost]

    @property
    def has_drafted(self) -> bool:
        """Whether the speculative side drafted at all; without a draft it decoded plainly, too."""
        return self.drafted.stats.drafted_tokens > 0

    @property
    def speed_ratio(self) -> float:
        """Tokens per second with speculation over those of plain decoding; 0 where nothing was drafted or too little
        was decoded to time it.
        """
        plain = self.plain.stats.tokens_per_second
        return self.drafted.stats.tokens_per_second / plain if plain and self.has_drafted else 0.0


class Race(Closing):
    """Runs both sides of one race; takes over `model` and closes it."""

    def __init__(self, model: Model, prompt_ids: Sequence[int], sampling: Sampling, options: GenerateOptions) -> None:
        self.plain, self.drafted = Lap(), Lap()
        self._prompt_ids, self._sampling, self._options = list(prompt_ids), sampling, options
        self._without_draft = dataclasses.replace(options, drafter="none")
        self._model = model
        self._fastest: float | None = None
        self._is_cancelled = False
        model.stream(self._prompt_ids, sampling, options)  # checks the prompt; nothing runs
        self._measure()

    @property
    def model(self) -> Model:
        """The model of both sides as it is loaded now."""
        return self._model

    def get_ready(self) -> None:
        """Compare the modes, and warm up, so that neither side pays for first touches of memory. Raises Cancelled."""
        if self._model.target.facts.pinned_class is not None:
            self._compare_modes()
        self._warm_up(self._options)

    def plain_lap(self) -> Iterator[Lap]:
        """Decode plainly; the lap after every token. `get_ready` comes before."""
        yield from _run(self.plain, self._model, self._prompt_ids, self._sampling, self._without_draft)

    def change_sides(self) -> None:
        """Between the laps: the plain side has just read the prompt, and the other one has to read it too."""
        self._model.forget()

    def drafted_lap(self) -> Iterator[Lap]:
        """Decode with speculation; the lap after every token."""
        yield from _run(self.drafted, self._model, self._prompt_ids, self._sampling, self._options)

    def outcome(self, *, checks_pace: bool = True) -> Outcome:
        """Compare the texts and, with `checks_pace`, the pace of the machine now with that of the plain lap."""
        model = self._model
        can_draft = model.target.facts.can_speculate
        return Outcome(
            plain=self.plain,
            drafted=self.drafted,
            divergence=first_divergence(self.plain, self.drafted),
            is_reproducible=model.is_reproducible(self._options.verify or model.options.verify),
            is_greedy=self._sampling.temperature == 0,
            pace=self._pace() if checks_pace else None,
            fastest=self._fastest,
            curve=model.cost_curve if can_draft else None,
            draft_costs=model.draft_costs if can_draft else {},
        )

    def cancel(self) -> None:
        """End whichever side runs; before the first one, `get_ready` raises Cancelled."""
        self._is_cancelled = True
        self._model.cancel()

    def close(self) -> None:
        self._model.close()

    def _compare_modes(self) -> None:
        """How much faster plain decoding is in the fastest mode. Only one model is loaded at a time."""
        loaded = keywords_of(self._model.options)
        self._model.close()
        plainly = {"drafter": "none", "draft_length": "auto", "reproducible": False}
        with load(**loaded | plainly) as self._model:
            fastest_rate = self._plain_rate()
        self._model = load(**loaded)
        self._measure()
        rate = self._plain_rate()
        self._fastest = fastest_rate / rate if fastest_rate and rate else None

    def _plain_rate(self) -> float:
        """Tokens per second of plain decoding, the best of a few trials; 0 for too few tokens."""
        return max(self._warm_up(self._without_draft).tokens_per_second for _ in range(_TRIALS))

    def _measure(self) -> None:
        """What passes cost is measured before the race, and recalled where it was measured before."""
        if self._model.target.facts.can_speculate:
            _ = self._model.cost_curve, self._model.draft_costs

    def _warm_up(self, options: GenerateOptions) -> Stats:
        """Decode another text than the prompt, of which nothing may be cached when the race begins."""
        if self._is_cancelled:
            raise Cancelled("the race was stopped before it began")
        few = dataclasses.replace(options, max_tokens=_WARM_UP_TOKENS, stop=(), ignore_eos=True)
        found = self._model.generate(PROMPTS[-1].text, self._sampling, few).stats
        self._model.forget()
        return found

    def _pace(self) -> float | None:
        again = Lap()
        for _ in _run(again, self._model, self._prompt_ids, self._sampling, self._without_draft):
            if len(again.marks) > _CHECK_TOKENS and again.marks[-1].at_s > _CHECK_S:
                break
        now, before = again.rate_of(again.marks), self.plain.rate_of(self.plain.marks[: len(again.marks)])
        return now / before if now and before and len(again.marks) > _CHECK_TOKENS else None


def _run(lap: Lap, model: Model, prompt_ids: list[int], sampling: Sampling, options: GenerateOptions) -> Iterator[Lap]:
    """Record one generation in `lap`. The run's own clock stands still while the caller looks at a token."""
    generation = model.stream(prompt_ids, sampling, options, lap.rounds.append)
    lap.stats = generation.stats
    for event in generation:
        lap.marks.append(Mark(event, lap.stats.wall_s))
        yield lap
