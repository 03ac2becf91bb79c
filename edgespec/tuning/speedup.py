"""Expected and measured speedup of speculation by draft length, on one model.

Two formulas: Leviathan's (arXiv 2211.17192, theorem 3.8), in which the cost of a pass does not depend on its width, and
the same with the measured cost of each width. Both assume that tokens are accepted independently with the same
probability. Real text differs, so the measured speedup is shown beside them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median

from edgespec.config import DrafterName, GenerateOptions
from edgespec.control.cost import WIDEST, CostCurve
from edgespec.control.length import ceiling, expected_speedup
from edgespec.errors import ConfigError, PromptError
from edgespec.reports import RoundRecord, Stats
from edgespec.runtime import Model
from edgespec.sampling import Sampling

LENGTHS = tuple(range(13))
_WARM_UP_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds: `pass_s[w]` of a target pass of width w, `token_s` of a drafted token."""

    pass_s: Sequence[float]
    token_s: float

    @property
    def flat(self) -> Sequence[float]:
        """Pass costs without the dependence on width, for Leviathan's formula."""
        return [self.pass_s[1]] * len(self.pass_s)

    def ceiling(self, most: int) -> tuple[int, float]:
        """(draft length, speedup): the upper limit for a drafter of this cost with up to `most` tokens a round."""
        return ceiling(self.pass_s, self.token_s, most)


@dataclass(frozen=True, slots=True)
class Row:
    """Speedup over plain decoding at one draft length, by both formulas and measured (None: not measured)."""

    draft_length: int
    flat_speedup: float
    speedup: float
    measured: float | None = None


def given_costs(text: str, draft_ms: float) -> Costs:
    """Costs from text such as "1:24.6,8:70": milliseconds by width, interpolated linearly. Raises ConfigError."""
    wrong = f"--pass-ms {text!r} must list milliseconds by width, including width 1, such as 1:24.6,2:28,8:70"
    try:
        pairs = [part.split(":") for part in text.split(",")]
        measured = {int(width): float(ms) / 1e3 for width, ms in pairs}
    except ValueError:
        raise ConfigError(wrong) from None
    is_sound = 1 in measured and max(measured) <= WIDEST and all(0 < s < float("inf") for s in measured.values())
    if not (is_sound and min(measured) == 1):
        raise ConfigError(f"{wrong}; widths 1..{WIDEST}, times above 0")
    if not 0 <= draft_ms < float("inf"):
        raise ConfigError(f"--draft-ms must be at least 0, got {draft_ms}")
    return Costs(CostCurve(measured).table(0), draft_ms / 1e3)


def plan(acceptance: float, costs: Costs, lengths: Sequence[int] = LENGTHS, drafting: float = 1.0) -> list[Row]:
    """Expected speedup at each draft length, if every token is accepted with probability `acceptance`.

    `drafting`: share of rounds in which the drafter proposes something; lookups often find nothing to copy.
    """
    return [
        Row(
            length,
            _expected(acceptance, length, costs.flat, costs.token_s, drafting),
            _expected(acceptance, length, costs.pass_s, costs.token_s, drafting),
        )
        for length in lengths
    ]


def _expected(acceptance: float, length: int, pass_s: Sequence[float], token_s: float, drafting: float) -> float:
    tokens = expected_speedup(acceptance, length, [1.0] * len(pass_s), 0.0)  # of a round that drafts
    plain_passes = tokens / expected_speedup(acceptance, length, pass_s, token_s)  # that take as long as it does
    return (drafting * tokens + 1 - drafting) / (drafting * plain_passes + 1 - drafting)


@dataclass(slots=True)
class Trials:
    """Measurements at several draft lengths; length 0 is plain decoding in the same mode. Times in seconds."""

    seconds: dict[int, dict[int, list[float]]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(list)))
    tokens: dict[int, dict[int, int]] = field(default_factory=lambda: defaultdict(dict))
    verify_s: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    token_s: list[float] = field(default_factory=list)
    judged: int = 0
    accepted: int = 0
    rounds: int = 0  # with a drafter
    drafting_rounds: int = 0
    decode_s: float = 0.0
    overhead_s: float = 0.0

    @property
    def acceptance(self) -> float:
        """Accepted / tested tokens; a drafted token is tested if all tokens before it were accepted."""
        return self.accepted / self.judged if self.judged else 0.0

    @property
    def drafting(self) -> float:
        """Share of the rounds with a drafter in which it proposed something."""
        return self.drafting_rounds / self.rounds if self.rounds else 1.0

    @property
    def overhead_share(self) -> float:
        """Fraction of decoding time outside drafting and target passes."""
        return self.overhead_s / self.decode_s if self.decode_s else 0.0

    def tokens_per_second(self, length: int) -> float:
        """Speed over all prompts, with the median time of each prompt's repetitions."""
        taken = sum(median(times) for times in self.seconds[length].values())
        return sum(self.tokens[length].values()) / taken if taken else 0.0

    def speedup(self, length: int) -> float | None:
        """Speedup over plain decoding; None if either decoded nothing."""
        plain, drafted = self.tokens_per_second(0), self.tokens_per_second(length)
        return drafted / plain if plain and drafted else None

    def add(self, length: int, prompt: int, stats: Stats) -> None:
        self.rounds += stats.rounds if length else 0
        if stats.new_tokens < 2:
            return
        self.seconds[length][prompt].append(stats.decode_s)
        self.tokens[length][prompt] = stats.new_tokens - 1
        self.decode_s += stats.decode_s
        self.overhead_s += stats.overhead_s

    def observe(self, record: RoundRecord) -> None:
        self.drafting_rounds += record.drafted_tokens > 0
        self.verify_s[record.width].append(record.verify_s)
        if record.drafted_tokens:
            self.token_s.append(record.draft_s / record.drafted_tokens)
        self.accepted += record.accepted_tokens
        self.judged += record.accepted_tokens + (record.accepted_tokens < record.drafted_tokens)

    @property
    def costs(self) -> Costs:
        """Median costs of passes and drafted tokens in these runs; widths in between are interpolated linearly."""
        measured = {width: median(times) for width, times in self.verify_s.items() if width <= WIDEST}
        return Costs(CostCurve(measured).table(0), median(self.token_s) if self.token_s else 0.0)


def run_trials(
    model: Model,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    drafter: DrafterName,
    lengths: Sequence[int],
    max_tokens: int,
    repeats: int,
    advance: Callable[[int], None],
) -> Trials:
    """Decode every prompt at every length, `repeats` times.

    Both lengths and prompts alternate: a prompt that was decoded just before would still be in the draft model's cache.
    `advance(n)` is called after n runs. Raises PromptError if every answer ends with its first token.
    """
    trials = Trials()
    for length in (0, max(lengths)):
        model.generate(prompts[-1], sampling, _options(drafter, length, _WARM_UP_TOKENS))
    for turn in range(repeats * len(prompts)):
        for index, length in enumerate(lengths):
            prompt = (turn + index) % len(prompts)
            options = _options(drafter, length, max_tokens)
            result = model.generate(prompts[prompt], sampling, options, trials.observe)
            trials.add(length, prompt, result.stats)
            advance(1)
    if not trials.verify_s:
        raise PromptError("every answer ended with its first token, so there is nothing to measure: give other prompts")
    return trials


def _options(drafter: DrafterName, length: int, max_tokens: int) -> GenerateOptions:
    if not length:
        return GenerateOptions(max_tokens=max_tokens, drafter="none", logprobs=False)
    return GenerateOptions(max_tokens=max_tokens, drafter=drafter, draft_length=length, logprobs=False)
