"""The result of a race in sentences: whether the texts agree, and why speculation was fast or slow.

All figures are measured in the race or taken from the controller. With s seconds per token of plain decoding, a round
that emits m tokens in r seconds gains m / (r / s), so the sentences explain these two numbers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

from edgespec.bench.race import Lap, Outcome
from edgespec.control.length import ceiling, expected_speedup
from edgespec.reports import RoundRecord
from edgespec.tuning.verify import Divergence

_SAME_MODE = 0.01  # up to this difference, the modes are equally fast
NEAR = 0.05  # speeds that differ by less count as equal
_ENOUGH_DRAFTED = 16
_MOST_DRAFTED = 15  # as far as passes are measured when a model is loaded
_PACE_CHANGE = 0.1  # of plain decoding's rate from the race's begin to its end, that is reported
_SELDOM = 0.25  # up to this share of rounds with a draft, decoding was mostly plain


@dataclass(frozen=True, slots=True)
class Prices:
    """Costs in this race, in units of the plain run's seconds per token.

    `round`, `verify`, `draft`, `rest`: averages per round; `drafter`: the drafter they belong to; `width`: tokens in a
    typical verification pass; `pass_`: its cost over a plain pass; `token`: cost of a draft token; `pays_from`: the
    acceptance rate from which drafting pays off, None if it never does; `best`: (draft length, speedup) if every draft
    token were accepted.
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


def speed(outcome: Outcome) -> str:
    """The result in one line."""
    plain, drafted = outcome.plain.stats, outcome.drafted.stats
    rates = plain.tokens_per_second, drafted.tokens_per_second
    if not all(rates):
        return "too few tokens to compare speeds: give a larger -n"
    if not outcome.has_drafted:
        return (
            f"no ratio: nothing was drafted, so both sides decoded plainly ({rates[0]:.1f} and {rates[1]:.1f} tokens/s)"
        )
    return (
        f"{outcome.speed_ratio:.2f}x: {drafted.tokens_per_second:.1f} tokens/s with speculation, "
        f"{plain.tokens_per_second:.1f} without ({drafted.wall_s:.2f} s and {plain.wall_s:.2f} s with the prompt)"
    )


def proof(outcome: Outcome, token_name: Callable[[int], str]) -> str:
    """Whether the texts are equal token by token, or where and why they differ."""
    count = len(outcome.drafted.marks)
    if outcome.divergence is None:
        return f"identical: all {count} tokens, compared one by one"
    parting = _parting(outcome, outcome.divergence, token_name)
    if outcome.is_reproducible:
        return f"DIFFERENT, although reproducible mode guarantees the same text: {parting}. Please report this"
    return (
        f"different, which the fastest mode allows: {parting}. A pass over several tokens rounds differently from a "
        "pass over one, and rules other than coupled sample other text; --reproducible prevents both"
    )


def reasons(outcome: Outcome, drafter: str, *, is_automatic: bool) -> list[str]:
    """Why it was fast or slow, in two or three sentences. `drafter`: as requested."""
    if not outcome.plain.stats.tokens_per_second:
        return []
    if outcome.curve is None:
        return ["This model cannot roll back its KV cache, so speculation is impossible."]
    costs = prices(outcome)
    found = [_balance(outcome, costs)] if outcome.has_drafted else []
    found += [_threshold(costs), _choice(outcome.drafted, drafter) if is_automatic else _fixed(outcome)]
    if outcome.pace is not None:
        found.append(_noise(outcome.pace))
    if outcome.fastest is not None and outcome.has_drafted:
        found.append(_fastest_mode(outcome.speed_ratio, outcome.fastest))
    return found


def _noise(pace: float) -> str:
    """What the same decoding differs by, which no ratio can be finer than."""
    said = f"Noise: plain decoding, run twice, reached {pace:.0%} of its first speed the second time"
    if abs(pace - 1) <= _PACE_CHANGE:
        return f"{said}; smaller differences say nothing."
    return f"{said}: other programs or heat changed the machine's speed, so the ratio is unreliable."


def prices(outcome: Outcome) -> Prices:
    """Costs per round from the clocks of both runs, and the possible speedup from the cost curve."""
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
    )


def break_even(pass_s: Sequence[float], token_s: float) -> tuple[float | None, int]:
    """(acceptance rate from which drafting pays off, the draft length that pays off first).

    `pass_s[w]`: seconds of a pass of width w. Tokens are accepted independently at one rate, as in
    `expected_speedup`. None: drafting does not pay off even if every token is accepted.
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
    """Seconds per draft token: measured in this race, or the controller's figure if hardly any was drafted.

    The measured figure includes the draft model's processing of the target's text, and sampling.
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
    near = max(NEAR, 0.0 if outcome.pace is None else abs(outcome.pace - 1))
    verdict = "Faster" if ratio > 1 + near else "Slower" if ratio < 1 - near else "About as fast"
    accepted = (
        f" ({stats.acceptance_rate:.0%} of {stats.drafted_tokens} draft tokens accepted)"
        if stats.drafted_tokens
        else ""
    )
    return (
        f"{verdict}: a round emitted {stats.mean_accepted_length:.2f} tokens{accepted} in the time of "
        f"{costs.round:.2f} plain tokens: target pass {costs.verify:.2f}, drafting {costs.draft:.2f}, other "
        f"{costs.rest:.2f}."
    )


def _threshold(costs: Prices) -> str:
    price = f"a draft-model token {costs.token:.2f}" if costs.token else "a lookup token nothing"
    limit = "drafting would not pay off even if every token were accepted"
    if costs.pays_from is not None:
        share, best = costs.pays_from, costs.best[1]
        limit = f"drafting pays off above {share:.0%} acceptance and gains at most {best:.2f}x"
    return f"On this machine a pass over {costs.width} tokens costs {costs.pass_:.2f} plain ones, {price}: {limit}."


def _choice(lap: Lap, drafter: str) -> str:
    rounds = [record for record in lap.rounds if record.drafter is not None]
    if not rounds:
        return "auto expected less acceptance than that and decoded plainly throughout."
    names = Counter(record.drafter for record in rounds)
    by = ", ".join(f"{name} {count}" for name, count in names.most_common())
    length = fmean(record.drafted_tokens for record in rounds)
    seldom = "only " if len(rounds) <= _SELDOM * len(lap.rounds) else ""
    whose = f" ({by})" if drafter == "auto" else ""
    return f"auto drafted in {seldom}{len(rounds)} of {len(lap.rounds)} rounds{whose}, {length:.1f} tokens per draft."


def _fixed(outcome: Outcome) -> str:
    longest = max((record.drafted_tokens for record in outcome.drafted.rounds), default=0)
    hint = "; --draft-length auto drafts only when it pays off" if 0 < outcome.speed_ratio < 1 - NEAR else ""
    return f"The draft length was fixed, up to {longest} tokens per round{hint}."


def _fastest_mode(speed_ratio: float, fastest: float) -> str:
    """How the race would look against plain decoding's fastest mode, which is `fastest` times as fast as the race's."""
    if fastest < 1 + _SAME_MODE:
        return "Both sides ran in reproducible mode, which costs plain decoding nothing here."
    return (
        f"Both sides ran in reproducible mode. In the fastest mode, whose text may differ, plain decoding is "
        f"{fastest:.2f}x as fast; against that, speculation reached {speed_ratio / fastest:.2f}x."
    )


def _parting(outcome: Outcome, divergence: Divergence, token_name: Callable[[int], str]) -> str:
    names = [
        "the end" if token_id is None else repr(token_name(token_id))
        for token_id in (divergence.plain_token_id, divergence.drafted_token_id)
    ]
    # with sampling, the tie is between logits plus noise, so the difference of the logits alone would mislead
    shows_margin = outcome.is_greedy and divergence.logit_margin is not None
    margin = f", {divergence.logit_margin:.2g} apart in logits" if shows_margin else ""
    return f"outputs differ at token {divergence.position + 1}: {names[0]} plain, {names[1]} with speculation{margin}"
