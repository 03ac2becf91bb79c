"""Every drafter and draft length on the same prompts, beside plain decoding and `auto` (`bench --sweep`), and why
speculation is fast or slow here (`--explain`): costs, acceptance, the speed to expect, and what would have to change.

All settings decode a prompt one after another, each on empty caches and beginning with another one for every prompt,
so that a machine that slows down meanwhile does not favour one of them.

With s seconds per token of plain decoding, a round that emits m tokens in r seconds gains m / (r / s). The speedup to
expect of a draft length is Leviathan's (arXiv 2211.17192, theorem 3.8) with the cost of each width. It assumes that
tokens are accepted independently with one probability. Real text differs, so the measured speedup stands beside it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from edgespec.bench.report import Side, shown
from edgespec.bench.runner import Measurement, Task, runs
from edgespec.config.options import GenerateOptions
from edgespec.config.values import DrafterName, DraftLength, aligned
from edgespec.reports import RoundRecord
from edgespec.runtime import Model

LENGTHS = (1, 2, 4, 8, 12)
NEAR = 0.05  # speeds that differ by less count as equal
_MOST_DRAFTED = 15
_ENOUGH_DRAFTED = 16  # tokens, to take their price from these runs
_GOALS = (1.25, 1.5, 2.0, 3.0, 5.0)


@dataclass(frozen=True, slots=True)
class SweptSetting:
    """A drafter with a draft length, as `GenerateOptions` takes them."""

    drafter: DrafterName
    length: DraftLength

    @property
    def is_fixed(self) -> bool:
        return self.length != "auto"

    def __str__(self) -> str:
        return f"{self.drafter}, {self.length}" if self.is_fixed else self.drafter


PLAIN = SweptSetting("none", "auto")


class Sweep:
    """The measurements so far, by setting and kind of text."""

    def __init__(self, model: Model, options: GenerateOptions) -> None:
        self.model = model
        self.auto = SweptSetting(model.drafter_name, "auto")
        drafters = model.drafters.names if model.drafter_name == "auto" else [model.drafter_name]
        lengths = [length for length in LENGTHS if length < model.target.widest_pass]
        self.choices = [PLAIN, self.auto, *(SweptSetting(name, length) for name in drafters for length in lengths)]
        self._options = replace(options, logprobs=False)
        self._runs: dict[tuple[SweptSetting, str], list[Measurement]] = defaultdict(list)

    def run(
        self, tasks: Sequence[Task], is_over: Callable[[], bool]
    ) -> Iterator[tuple[Task, SweptSetting, Measurement]]:
        """Measure every setting on every task; ends early as `runs`."""
        sides = {
            choice: replace(self._options, drafter=choice.drafter, draft_length=choice.length)
            for choice in self.choices
        }
        for task, choice, measured in runs(self.model, tasks, lambda task: sides, is_over):
            self._runs[choice, task.prompt.domain].append(measured)
            yield task, choice, measured

    @property
    def domains(self) -> list[str]:
        """Those in which every setting was measured."""
        names = dict.fromkeys(domain for _, domain in self._runs)
        return [name for name in names if all((choice, name) in self._runs for choice in self.choices)]

    def side(self, choice: SweptSetting, domain: str | None = None) -> Side:
        """All runs of a setting; of one kind of text, or of all (None)."""
        return Side(
            run for (one, name), runs in self._runs.items() if one == choice and domain in (None, name) for run in runs
        )

    def speedup(self, choice: SweptSetting, domain: str | None = None) -> float | None:
        """Over plain decoding of the same model; None where the answers are too short."""
        plain, rate = (self.side(each, domain).pooled_rate for each in (PLAIN, choice))
        return rate / plain if plain and rate else None

    def best(self, domain: str | None = None) -> SweptSetting | None:
        """The fastest fixed setting, plain decoding among them; None where no rate is known."""
        fixed = [choice for choice in self.choices if choice.is_fixed or choice == PLAIN]
        best = max(fixed, key=lambda choice: self.speedup(choice, domain) or 0.0)
        return best if self.speedup(best, domain) else None

    @property
    def drafted(self) -> Side:
        """The runs of every length of the drafter that has the fastest fixed setting."""
        fixed = [choice for choice in self.choices if choice.is_fixed]
        best = max(fixed, key=lambda choice: self.speedup(choice) or 0.0, default=self.auto)
        return Side(run for choice in fixed if choice.drafter == best.drafter for run in self.side(choice).runs)


def sweep_lines(sweep: Sweep) -> Iterator[str]:
    """The best fixed setting for each kind of text beside `auto`, then the speedup of every setting over all texts."""
    rows = [("domain", "plain", "best fixed setting", "speedup", "auto", "auto/best")]
    for domain in (*sweep.domains, None) if len(sweep.domains) > 1 else sweep.domains:
        best = sweep.best(domain)
        if best is None:
            continue
        own, auto = sweep.speedup(best, domain), sweep.speedup(sweep.auto, domain)
        name, rate = "plain decoding" if best == PLAIN else str(best), f"{sweep.side(PLAIN, domain).pooled_rate:.1f}"
        rows.append(
            (domain or "all", rate, name, shown(own), shown(auto), f"{auto / own:.2f}" if own and auto else "-")
        )
    yield from aligned(rows, right=range(1, 6))
    yield "plain: tokens/s without speculation; speedups are over it. A fixed setting was chosen on these very prompts"
    yield ""
    lengths = sorted({choice.length for choice in sweep.choices if isinstance(choice.length, int)})
    table = [("draft length", *map(str, lengths))]
    for drafter in dict.fromkeys(choice.drafter for choice in sweep.choices if choice.is_fixed):
        table.append((drafter, *(shown(sweep.speedup(SweptSetting(drafter, length))) for length in lengths)))
    yield from aligned(table, right=range(1, len(lengths) + 1))


def sweep_json(sweep: Sweep) -> dict[str, Any]:
    """Every setting for each kind of text, and the best one that is fixed; keys are a contract."""
    found: dict[str, Any] = {}
    for domain in (*sweep.domains, None):
        best = sweep.best(domain)
        found[domain or "all"] = {
            "best": None if best is None else {"drafter": best.drafter, "draft_length": best.length},
            "settings": [
                {
                    "drafter": choice.drafter,
                    "draft_length": choice.length,
                    "tokens_per_second": sweep.side(choice, domain).pooled_rate or None,
                    "speedup": sweep.speedup(choice, domain),
                    "acceptance_rate": sweep.side(choice, domain).acceptance_rate,
                }
                for choice in sweep.choices
            ],
        }
    return found


# -- why


def expected_speedup(acceptance_rate: float, num_drafted: int, pass_s: Sequence[float], token_s: float) -> float:
    """Leviathan 2211.17192 theorem 3.8 with a pass that costs what its width costs, every token alike and independent.

    With pass_s flat and token_s = c * pass_s[1] it is their (1 - a^(k+1)) / ((1 - a) (k c + 1)).
    """
    if acceptance_rate >= 1:
        tokens = num_drafted + 1.0
    else:
        tokens = (1 - acceptance_rate ** (num_drafted + 1)) / (1 - acceptance_rate)
    return tokens * pass_s[1] / (pass_s[1 + num_drafted] + num_drafted * token_s)


@dataclass(frozen=True, slots=True)
class Costs:
    """What decides the speedup.

    `plain_s`: seconds of a token of plain decoding; `round_s[w]`: of a round with a target pass of width w, drafting
    left out; `token_s`: of a drafted token; `acceptance`: accepted / tested tokens, where a token is tested if all
    before it were accepted; `drafting`: share of rounds in which the drafter proposed something.
    """

    plain_s: float
    round_s: Sequence[float]
    token_s: float
    acceptance: float = 0.0
    drafting: float = 1.0

    def expected(self, length: int) -> float:
        """Speedup over plain decoding."""
        tokens = expected_speedup(self.acceptance, length, [1.0] * len(self.round_s), 0.0)  # of a round that drafts
        times = tokens / expected_speedup(self.acceptance, length, self.round_s, self.token_s)  # a plain one's
        return (self.drafting * tokens + 1 - self.drafting) / (self.drafting * times + 1 - self.drafting)

    def best(self) -> tuple[float, int]:
        """(speedup, draft length) of the best length; (1, 0) where no length gains."""
        return max((1.0, 0), *((self.expected(length), length) for length in range(1, _MOST_DRAFTED + 1)))

    @property
    def pays_from(self) -> float | None:
        """The acceptance from which drafting pays off; None if it never does."""
        return _least(lambda rate: replace(self, acceptance=rate, drafting=1.0), 1.0, 0.0, 1.0)


def costs_of(model: Model, plain: Side, drafted: Side) -> Costs | None:
    """From the runs of both sides, and the costs that the model has learnt; None where too little was decoded."""
    if not plain.pooled_rate or not model.target.facts.can_speculate:
        return None
    records = [record for run in drafted.runs for record in run.rounds]
    drafting = [record for record in records if record.drafted_tokens]
    plain_s = 1 / plain.pooled_rate
    rounds = max(drafted.total("rounds"), 1)
    overhead_s = drafted.total("overhead_s") / rounds
    pass_s = model.drafters.costs.curve.shape
    # The curve is that of a quiet machine; these runs may have been slower.
    pace = sum(r.verify_s for r in records) / sum(pass_s[r.width] for r in records) if records else 1.0
    round_s = [plain_s if width == 1 else pace * seconds + overhead_s for width, seconds in enumerate(pass_s)]
    tested = sum(record.accepted_tokens + (record.accepted_tokens < record.depth) for record in drafting)
    accepted = sum(record.accepted_tokens for record in drafting)
    share = len(drafting) / len(records) if records else 1.0
    token_s = _token_s(model, drafting)
    return Costs(plain_s, round_s, token_s, accepted / tested if tested else 0.0, share)


def _token_s(model: Model, drafting: Sequence[RoundRecord]) -> float:
    """Seconds per drafted token: of these runs, or what the model knows where hardly any was drafted."""
    drafted, costs = sum(record.drafted_tokens for record in drafting), model.drafters.costs
    if drafted >= _ENOUGH_DRAFTED:
        return sum(record.draft_s for record in drafting) / drafted
    return max((costs.draft(name).token_s for name in costs.drafts), default=0.0)


def balance(plain: Side, drafted: Side) -> str:
    """What a round yields, and what it takes."""
    rounds, ratio = max(drafted.total("rounds"), 1), drafted.pooled_rate / plain.pooled_rate
    verdict = "faster" if ratio > 1 + NEAR else "slower" if ratio < 1 - NEAR else "about as fast"
    tokens = (drafted.total("new_tokens") - len(drafted.runs)) / rounds
    count = drafted.total("drafted_tokens")
    accepted = (
        f" ({drafted.total('accepted_tokens') / count:.0%} of {count:.0f} draft tokens accepted)" if count else ""
    )
    parts = {name: drafted.total(f"{name}_s") / rounds * plain.pooled_rate for name in ("verify", "draft", "overhead")}
    return (
        f"{verdict}: a round emitted {tokens:.2f} tokens{accepted} in the time of {sum(parts.values()):.2f} plain "
        f"tokens: target pass {parts['verify']:.2f}, drafting {parts['draft']:.2f}, other {parts['overhead']:.2f}"
    )


def threshold(costs: Costs, width: int = 4) -> str:
    """What drafting costs here, and the acceptance from which it pays off."""
    token = costs.token_s / costs.plain_s
    price = f"a drafted token {token:.2f}" if token >= 0.005 else "a lookup nothing"
    limit = "drafting would not pay off even if every token were accepted"
    if costs.pays_from is not None:
        most = replace(costs, acceptance=1.0, drafting=1.0).best()[0]
        limit = f"drafting pays off above {costs.pays_from:.0%} acceptance and gains at most {most:.2f}x"
    return f"on this machine a pass over {width} tokens costs {_passes(costs, width):.2f} plain ones, {price}: {limit}"


def changes(costs: Costs) -> str:
    """What would have to change, one thing at a time, to reach the next round speedup."""
    speedup, length = costs.best()
    goal = next((goal for goal in _GOALS if goal > speedup + NEAR / 5), None)
    if goal is None:
        return f"expected speedup {speedup:.2f}x at a draft length of {length}"
    acceptance = _least(lambda rate: replace(costs, acceptance=rate), goal, costs.acceptance, 1.0)
    # 0: as it is, 1: free
    saved = _least(lambda share: replace(costs, token_s=(1 - share) * costs.token_s), goal, 0.0, 1.0)
    flatter = _least(lambda share: replace(costs, round_s=_flattened(costs, share)), goal, 0.0, 1.0)
    width = max(length, 3) + 1
    ways = [] if acceptance is None else [f"an acceptance of {acceptance:.0%} instead of {costs.acceptance:.0%}"]
    price = costs.token_s / costs.plain_s
    if saved is not None and price >= 0.005:
        ways.append(f"drafted tokens at {(1 - saved) * price:.2f} instead of {price:.2f} of a plain one")
    if flatter is not None:
        flat = _passes(replace(costs, round_s=_flattened(costs, flatter)), width)
        ways.append(f"passes over {width} tokens at {flat:.2f} instead of {_passes(costs, width):.2f} plain ones")
    begin = f"expected speedup {speedup:.2f}x" + (f" at a draft length of {length}" if length else " (plain decoding)")
    return f"{begin}; {goal:.4g}x would take {', or '.join(ways) if ways else 'several of these to change at once'}"


def _passes(costs: Costs, width: int) -> float:
    return costs.round_s[width] / costs.plain_s


def _flattened(costs: Costs, share: float) -> list[float]:
    """Round costs with `share` of what they take over a plain one left out."""
    return [s - share * max(s - costs.plain_s, 0.0) for s in costs.round_s]


def _least(changed: Callable[[float], Costs], goal: float, low: float, high: float) -> float | None:
    """The least value between `low` and `high` at which the best length gains more than `goal`; None: not even high."""
    if changed(high).best()[0] <= goal:
        return None
    for _ in range(20):
        middle = (low + high) / 2
        low, high = (low, middle) if changed(middle).best()[0] > goal else (middle, high)
    return high


def reasons(costs: Costs, plain: Side, drafted: Side) -> Iterator[str]:
    """Why the runs `drafted` were fast or slow."""
    has_drafted = drafted.total("drafted_tokens") > 0
    if has_drafted:
        yield balance(plain, drafted)
    widths = [record.width for run in drafted.runs for record in run.rounds if record.drafted_tokens]
    yield threshold(costs, round(fmean(widths)) if widths else 4)
    if has_drafted:
        yield changes(costs)


def explain_lines(costs: Costs | None, plain: Side, drafted: Side) -> Iterator[str]:
    """The speedup to expect by draft length, and `reasons`."""
    if costs is None:
        yield "nothing to explain: too few tokens were decoded, or this model cannot speculate"
        return
    if not drafted.total("drafted_tokens"):
        yield "nothing was drafted, so how much is accepted is not known: --draft-length 4 drafts all the same"
        yield threshold(costs)
        return
    yield f"{costs.acceptance:.0%} of tested tokens accepted, drafts in {costs.drafting:.0%} of rounds"
    passes = (f"{_passes(costs, length + 1):.2f}" for length in LENGTHS)
    expected = (shown(costs.expected(length)) for length in LENGTHS)
    rows = [("draft length", *map(str, LENGTHS)), ("a pass", *passes), ("expected", *expected)]
    yield from aligned(rows, right=range(1, len(LENGTHS) + 1))
    yield ""
    yield from reasons(costs, plain, drafted)


def explain_json(costs: Costs | None) -> dict[str, Any] | None:
    if costs is None:
        return None
    return {
        "acceptance": costs.acceptance,
        "drafting_share": costs.drafting,
        "plain_s": costs.plain_s,
        "token_s": costs.token_s,
        "round_s": {str(each + 1): costs.round_s[each + 1] for each in LENGTHS},
        "expected": {str(each): costs.expected(each) for each in LENGTHS},
        "pays_from": costs.pays_from,
    }
