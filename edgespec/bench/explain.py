"""Why speculation is fast or slow here: costs, acceptance, the speed to expect of them, and what would have to change.

With s seconds per token of plain decoding, a round that emits m tokens in r seconds gains m / (r / s). Two formulas
give the speedup to expect of a draft length: Leviathan's (arXiv 2211.17192, theorem 3.8), in which a pass costs the
same whatever its width, and the same with the cost of each width. Both assume that tokens are accepted independently
with one probability. Real text differs, so the measured speedup stands beside them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from edgespec.bench.report import Side
from edgespec.bench.sweep import PLAIN, Choice, Sweep
from edgespec.config.values import DrafterName
from edgespec.control.prices import ceiling, expected_speedup
from edgespec.errors import ConfigError
from edgespec.reports import RoundRecord
from edgespec.runtime import Model

LENGTHS = (1, 2, 3, 4, 6, 8, 12)
NEAR = 0.05  # speeds that differ by less count as equal
_MOST_DRAFTED = 15
_ENOUGH_DRAFTED = 16  # tokens, to take their price from these runs
_GOALS = (1.25, 1.5, 2.0, 3.0, 5.0)


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

    def expected(self, length: int, *, is_flat: bool = False) -> float:
        """Speedup over plain decoding. `is_flat`: a pass costs the same whatever its width."""
        round_s = [self.plain_s] * len(self.round_s) if is_flat else self.round_s
        tokens = expected_speedup(self.acceptance, length, [1.0] * len(round_s), 0.0)  # of a round that drafts
        times = tokens / expected_speedup(self.acceptance, length, round_s, self.token_s)  # a plain one's
        return (self.drafting * tokens + 1 - self.drafting) / (self.drafting * times + 1 - self.drafting)

    def best(self) -> tuple[float, int]:
        """(speedup, draft length) of the best length; (1, 0) where no length gains."""
        return max((1.0, 0), *((self.expected(length), length) for length in range(1, _MOST_DRAFTED + 1)))

    @property
    def ceiling(self) -> tuple[int, float]:
        """(draft length, speedup) if every token were accepted."""
        return ceiling(self.round_s, self.token_s, _MOST_DRAFTED)

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
    pass_s = model.cost_curve.table()
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
    drafted = sum(record.drafted_tokens for record in drafting)
    if drafted >= _ENOUGH_DRAFTED:
        return sum(record.draft_s for record in drafting) / drafted
    return max((cost.token_s for cost in model.draft_costs.values()), default=0.0)


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
        limit = f"drafting pays off above {costs.pays_from:.0%} acceptance and gains at most {costs.ceiling[1]:.2f}x"
    return f"on this machine a pass over {width} tokens costs {_passes(costs, width):.2f} plain ones, {price}: {limit}"


def typical_width(drafted: Side) -> int:
    """Tokens in an average verifying pass of rounds that drafted; 4 where none did."""
    widths = [record.width for run in drafted.runs for record in run.rounds if record.drafted_tokens]
    return round(fmean(widths)) if widths else 4


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

    def gains(value: float) -> bool:
        costs = changed(value)
        return max(costs.expected(length) for length in range(1, _MOST_DRAFTED + 1)) > goal

    if not gains(high):
        return None
    for _ in range(20):
        middle = (low + high) / 2
        low, high = (low, middle) if gains(middle) else (middle, high)
    return high


def explained_drafter(model: Model) -> DrafterName:
    """The drafter whose lengths are swept: the one named, else the draft model, else the first that there is."""
    if model.drafter_name != "auto":
        return model.drafter_name
    names = model.drafter_names
    if not names:
        raise ConfigError("--explain needs a drafter, and this model has none")
    return "model" if "model" in names else names[0]


def explain_choices(model: Model) -> list[Choice]:
    drafter, widest = explained_drafter(model), model.target.widest_pass
    return [Choice(drafter, length) for length in LENGTHS if length < widest]


def explained(sweep: Sweep) -> Costs | None:
    """Costs from the runs of every length of the explained drafter."""
    drafter = explained_drafter(sweep.model)
    lengths = [choice for choice in sweep.choices if choice.drafter == drafter and choice.is_fixed]
    drafted = Side(run for choice in lengths for run in sweep.side(choice).runs)
    return costs_of(sweep.model, sweep.side(PLAIN), drafted)


def explain_lines(sweep: Sweep) -> Iterator[str]:
    """Expected against measured speedup by draft length, and what follows."""
    costs = explained(sweep)
    drafter = explained_drafter(sweep.model)
    if costs is None:
        yield "nothing to explain: too few tokens were decoded, or this model cannot speculate"
        return
    shares = f"{costs.acceptance:.0%} of tested tokens accepted, drafts in {costs.drafting:.0%} of rounds"
    yield f"drafter {drafter}: {shares}"
    yield f"{'draft length':>12}  {'a pass':>7}  {'flat cost (Leviathan)':>21}  {'expected':>8}  {'measured':>8}"
    for length in LENGTHS:
        measured = sweep.speedup(Choice(drafter, length))
        shown = "-" if measured is None else f"{measured:.2f}x"
        yield (
            f"{length:>12}  {_passes(costs, length + 1):>7.2f}  {costs.expected(length, is_flat=True):>20.2f}x  "
            f"{costs.expected(length):>7.2f}x  {shown:>8}"
        )
    auto = sweep.speedup(sweep.auto)
    yield f"auto: {'-' if auto is None else f'{auto:.2f}x'} of plain decoding's {1 / costs.plain_s:.1f} tokens/s"
    yield ""
    yield threshold(costs)
    yield changes(costs)


def explain_json(sweep: Sweep) -> dict[str, Any] | None:
    costs = explained(sweep)
    if costs is None:
        return None
    drafter = explained_drafter(sweep.model)
    length, speedup = costs.ceiling
    return {
        "drafter": drafter,
        "acceptance": costs.acceptance,
        "drafting_share": costs.drafting,
        "plain_s": costs.plain_s,
        "token_s": costs.token_s,
        "round_s": {str(each + 1): costs.round_s[each + 1] for each in LENGTHS},
        "lengths": [
            {
                "draft_length": each,
                "flat": costs.expected(each, is_flat=True),
                "expected": costs.expected(each),
                "measured": sweep.speedup(Choice(drafter, each)),
            }
            for each in LENGTHS
        ],
        "auto": sweep.speedup(sweep.auto),
        "pays_from": costs.pays_from,
        "ceiling": {"draft_length": length, "speedup": speedup},
    }
