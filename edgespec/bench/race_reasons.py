"""What a race showed, in plain sentences: whether the texts agree, and why speculation was fast or slow.

Every figure is the race's own or one that the controller works with: with s seconds of plain decoding per token, a
round that yields m tokens in r seconds gains exactly m / (r / s), so these two numbers are the explanation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

from edgespec.bench.race import Lap, Outcome
from edgespec.control.length import ceiling, expected_speedup
from edgespec.tuning.verify import Divergence
from edgespec.types import RoundRecord

NEAR = 0.05  # speeds that differ by less are called equal
_ENOUGH_DRAFTED = 16
_MOST_DRAFTED = 15  # as far as passes are measured when a model is loaded
_PACE_CHANGE = 0.1  # of plain decoding's rate from the race's begin to its end, beyond which it is told
_SELDOM = 0.25  # share of rounds with a draft up to which the choice was mostly plain decoding


@dataclass(frozen=True, slots=True)
class Prices:
    """What things cost in this race, in plain tokens (seconds per token of the plain run).

    `round`, `verify`, `draft`, `rest`: of a round on average; `drafter`: whose prices these are; `width`: of a typical
    verifying pass, and `pass_`: what it costs over a plain pass; `token`: of a drafted one; `pays_from`: the share of
    drafted tokens that must stand for drafting to pay, None where it never does; `best`: (draft length, speedup) that
    nothing can beat, since every drafted token would stand; `lone`: a pass of one token in the speculative run's mode.
    """

    round: float
    verify: float
    draft: float
    rest: float
    drafter: str | None
    width: int
    pass_: float
    token: float
    pays_from: float | None
    best: tuple[int, float]
    lone: float


def speed(outcome: Outcome) -> str:
    """The result in one line."""
    plain, drafted = outcome.plain.stats, outcome.drafted.stats
    if not outcome.speed_ratio:
        return "too few tokens to compare speeds: give a larger -n"
    return (
        f"{outcome.speed_ratio:.2f}x: {drafted.tokens_per_second:.1f} tokens/s with speculation, "
        f"{plain.tokens_per_second:.1f} without ({drafted.wall_s:.2f} s and {plain.wall_s:.2f} s with the prompt)"
    )


def proof(outcome: Outcome, token_name: Callable[[int], str]) -> str:
    """Whether the texts are the same token by token, or where and why they part."""
    count = len(outcome.drafted.marks)
    if outcome.divergence is None and outcome.rounding is None:
        return f"identical: all {count} tokens, compared one by one"
    if outcome.divergence is None and outcome.rounding is not None:
        return (
            f"identical: all {count} tokens to plain decoding in the same mode, compared one by one. The plain run "
            "shown is the faster one, without the padding that makes bits reproducible, and rounds differently: "
            f"{_parting(outcome, outcome.rounding, token_name)}"
        )
    assert outcome.divergence is not None
    parting = _parting(outcome, outcome.divergence, token_name)
    if outcome.is_reproducible:
        return f"DIFFERENT, though this mode promises the same text: {parting}. Please report it"
    return (
        f"different, which this mode allows: {parting}. The rule lets the text depend on the draft, or a pass over "
        "several tokens rounds another way than one over a single token; only the reproducible mode excludes both"
    )


def reasons(outcome: Outcome, drafter: str, *, is_automatic: bool) -> list[str]:
    """Why it was fast or slow, in two or three sentences. `drafter`: as it was asked for."""
    if not outcome.speed_ratio:
        return []
    if outcome.curve is None:
        return ["This model cannot take tokens back, so nothing can be drafted."]
    costs = prices(outcome)
    found = [_balance(outcome, costs), _threshold(costs)]
    found.append(_choice(outcome.drafted, drafter) if is_automatic else _fixed(outcome))
    lone_rounds = sum(record.drafter is None for record in outcome.drafted.rounds)
    if outcome.is_reproducible and costs.lone > 1 + NEAR and lone_rounds > len(outcome.drafted.rounds) / 4:
        found.append(
            f"Of its passes {lone_rounds} were over a single token, which is padded so that the text can be reproduced "
            f"and takes {costs.lone:.2f} times as long; --no-reproducible avoids that."
        )
    if outcome.pace is not None and abs(outcome.pace - 1) > _PACE_CHANGE:
        found.append(
            f"Plain decoding once more at the end ran at {outcome.pace:.0%} of its first speed: other programs or heat "
            "changed the machine's pace, so take the ratio with a grain of salt."
        )
    return found


def prices(outcome: Outcome) -> Prices:
    """What a round cost, from the clocks of both runs, and what the machine would allow, from the cost curve."""
    assert outcome.curve is not None
    stats, plain, lap = outcome.drafted.stats, outcome.plain.stats, outcome.drafted
    plain_s, rounds = 1 / plain.tokens_per_second, max(stats.rounds, 1)
    rest_s = stats.overhead_s / rounds
    drafting = [record for record in lap.rounds if record.drafter is not None]
    names = Counter(record.drafter for record in drafting)
    drafter = names.most_common(1)[0][0] if names else next(iter(outcome.draft_costs), None)
    token_s = _token_s(outcome, drafting, drafter)
    table = outcome.curve.table(stats.prompt_tokens + stats.new_tokens // 2)
    scale = stats.verify_s / sum(table[record.width] for record in lap.rounds) if lap.rounds else 1.0
    pass_s = [scale * seconds for seconds in table]
    whole_s = [plain_s if width == 1 else seconds + rest_s for width, seconds in enumerate(pass_s)]
    pays_from, length = break_even(whole_s, token_s)
    width = round(fmean(record.width for record in drafting)) if drafting else length + 1
    plain_pass_s = plain.verify_s / max(plain.rounds, 1)
    return Prices(
        round=stats.decode_s / rounds / plain_s,
        verify=stats.verify_s / rounds / plain_s,
        draft=stats.draft_s / rounds / plain_s,
        rest=rest_s / plain_s,
        drafter=drafter,
        width=width,
        pass_=pass_s[width] / plain_pass_s,
        token=token_s / plain_s,
        pays_from=pays_from,
        best=ceiling(whole_s, token_s, _MOST_DRAFTED),
        lone=pass_s[1] / plain_pass_s,
    )


def break_even(pass_s: Sequence[float], token_s: float) -> tuple[float | None, int]:
    """(share of drafted tokens that must stand for drafting to pay, the draft length that pays first).

    `pass_s[w]`: seconds of a pass of width w. Tokens alike and independent, as `expected_speedup` takes them; None:
    drafting does not pay even if all of them stand.
    """

    def best_at(rate: float) -> tuple[float, int]:
        return max((expected_speedup(rate, k, pass_s, token_s), k) for k in range(1, _MOST_DRAFTED + 1))

    low, high = 0.0, 1.0
    if best_at(high)[0] <= 1:
        return None, best_at(high)[1]
    for _ in range(20):
        middle = (low + high) / 2
        low, high = (low, middle) if best_at(middle)[0] > 1 else (middle, high)
    return high, best_at(high)[1]


def _token_s(outcome: Outcome, drafting: Sequence[RoundRecord], drafter: str | None) -> float:
    """Seconds of a drafted token: what it took in this race, or the controller's figure where hardly any was drafted.

    The race's own includes what the draft model reads of the target's text, and our sampling.
    """
    if drafter not in outcome.draft_costs:
        return 0.0
    own = [record for record in drafting if record.drafter == drafter]
    count = sum(record.drafted_tokens for record in own)
    if count < _ENOUGH_DRAFTED:
        return outcome.draft_costs[drafter].token_s
    return sum(record.draft_s for record in own) / count


def _balance(outcome: Outcome, costs: Prices) -> str:
    stats, ratio = outcome.drafted.stats, outcome.speed_ratio
    verdict = "Faster" if ratio > 1 + NEAR else "Slower" if ratio < 1 - NEAR else "About as fast"
    stood = (
        f" ({stats.acceptance_rate:.0%} of {stats.drafted_tokens} drafted ones stood)" if stats.drafted_tokens else ""
    )
    return (
        f"{verdict}: a round yielded {stats.mean_accepted_length:.2f} tokens{stood} and took the time of "
        f"{costs.round:.2f} plain ones: {costs.verify:.2f} the target's pass, {costs.draft:.2f} drafting and deciding, "
        f"{costs.rest:.2f} the rest."
    )


def _threshold(costs: Prices) -> str:
    price = f"a token of the draft model {costs.token:.2f}" if costs.token else "one looked up in the text nothing"
    limit = "drafting would not pay even if every token stood"
    if costs.pays_from is not None:
        share, best = costs.pays_from, costs.best[1]
        limit = f"drafting pays where over {share:.0%} of the draft stands, and gains {best:.2f}x at best"
    return f"Here a pass over {costs.width} tokens costs {costs.pass_:.2f} plain ones and {price}: {limit}."


def _choice(lap: Lap, drafter: str) -> str:
    rounds = [record for record in lap.rounds if record.drafter is not None]
    if not rounds:
        return "Left to choose, edgespec expected less than that and decoded plainly all the way."
    names = Counter(record.drafter for record in rounds)
    by = ", ".join(f"{name} {count}" for name, count in names.most_common())
    length = fmean(record.drafted_tokens for record in rounds)
    seldom = "only " if len(rounds) <= _SELDOM * len(lap.rounds) else ""
    whose = f" ({by})" if drafter == "auto" else ""
    return (
        f"Left to choose, edgespec drafted in {seldom}{len(rounds)} of {len(lap.rounds)} rounds{whose}, "
        f"{length:.1f} tokens at a time."
    )


def _fixed(outcome: Outcome) -> str:
    longest = max((record.drafted_tokens for record in outcome.drafted.rounds), default=0)
    hint = "; --draft-length auto drafts only where it pays" if outcome.speed_ratio < 1 - NEAR else ""
    return f"The draft length was set by hand, up to {longest} tokens a round{hint}."


def _parting(outcome: Outcome, divergence: Divergence, token_name: Callable[[int], str]) -> str:
    names = [
        "the end" if token_id is None else repr(token_name(token_id))
        for token_id in (divergence.plain_token_id, divergence.drafted_token_id)
    ]
    # where tokens are sampled, the tie is between scores that hold the noise, and logits do not show how near it was
    is_told = outcome.is_greedy and divergence.logit_margin is not None
    margin = f", {divergence.logit_margin:.2g} apart in logits" if is_told else ""
    return f"at token {divergence.position + 1} they part: {names[0]} plain, {names[1]} with speculation{margin}"
