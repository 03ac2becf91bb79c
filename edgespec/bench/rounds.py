"""Statistics of speculative rounds: calibration of confidences, acceptance by position, lengths, drafters.

Tokens after a rejected one were not tested, so calibration ignores them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from statistics import median
from typing import Any

from edgespec.bench.record import Measurement
from edgespec.reports import RoundRecord

NUM_BINS = 10
POSITION_STEP = 16
Judged = tuple[float, bool]  # (confidence, whether the token was accepted)


def judged(record: RoundRecord) -> Iterator[Judged]:
    """Confidence and outcome of each token of a draft, up to and including the first rejected one."""
    for index, confidence in enumerate(record.confidences[: record.accepted_tokens + 1]):
        yield min(max(confidence, 0.0), 1.0), index < record.accepted_tokens


def calibration_error(outcomes: Sequence[Judged]) -> tuple[float, list[dict[str, float]]]:
    """(expected calibration error, bins): mean confidence and acceptance in NUM_BINS bins of equal width.

    The error is the mean absolute difference of the two, weighted by tokens (Naeini et al., AAAI 2015).
    """
    members: dict[int, list[Judged]] = defaultdict(list)
    for confidence, is_accepted in outcomes:
        members[min(int(confidence * NUM_BINS), NUM_BINS - 1)].append((confidence, is_accepted))
    error, bins = 0.0, []
    for index in sorted(members):
        found = members[index]
        confidence = sum(one for one, _ in found) / len(found)
        acceptance = sum(is_accepted for _, is_accepted in found) / len(found)
        error += len(found) / len(outcomes) * abs(confidence - acceptance)
        bins.append({"confidence": confidence, "acceptance": acceptance, "num_tokens": len(found)})
    return error, bins


def reliability(records: Iterable[RoundRecord]) -> dict[str, dict[str, Any]]:
    """Calibration by drafter; key "all" is over all drafters."""
    outcomes: dict[str, list[Judged]] = defaultdict(list)
    for record in records:
        if record.drafter is not None:
            for name in (record.drafter, "all"):
                outcomes[name].extend(judged(record))
    found = {}
    for name, pairs in sorted(outcomes.items()):
        if pairs:
            error, bins = calibration_error(pairs)
            found[name] = {"expected_calibration_error": error, "num_tokens": len(pairs), "bins": bins}
    return found


def acceptance_by_position(runs: Iterable[Measurement]) -> list[dict[str, float]]:
    """Accepted tokens, drafted tokens and rounds, by the position in the answer where the round began."""
    drafted, accepted, rounds = Counter[int](), Counter[int](), Counter[int]()
    for run in runs:
        for record in run.rounds:
            step = (record.position - run.stats.prompt_tokens) // POSITION_STEP
            drafted[step] += record.drafted_tokens
            accepted[step] += record.accepted_tokens
            rounds[step] += 1
    return [
        {
            "position": step * POSITION_STEP,
            "drafted_tokens": drafted[step],
            "accepted_tokens": accepted[step],
            "num_rounds": rounds[step],
        }
        for step in sorted(rounds)
    ]


def accepted_lengths(records: Iterable[RoundRecord]) -> dict[str, dict[str, int]]:
    """Histogram of accepted tokens per round, by drafter; key "none": rounds without a draft."""
    found: dict[str, Counter[int]] = defaultdict(Counter)
    for record in records:
        found[record.drafter or "none"][record.accepted_tokens] += 1
    return {name: {str(n): count for n, count in sorted(counts.items())} for name, counts in sorted(found.items())}


def observed_passes(records: Iterable[RoundRecord]) -> dict[str, dict[str, float]]:
    """Median seconds and number of target passes, by width."""
    found: dict[int, list[float]] = defaultdict(list)
    for record in records:
        found[record.width].append(record.verify_s)
    return {str(width): {"median_s": median(found[width]), "num_passes": len(found[width])} for width in sorted(found)}


def drafter_shares(runs: Iterable[Measurement]) -> dict[str, dict[str, float | int | None]]:
    """By drafter: rounds, drafted and accepted tokens, acceptance rate, and its share of all emitted tokens."""
    rounds, drafted, accepted = Counter[str](), Counter[str](), Counter[str]()
    num_tokens = 0
    for run in runs:
        num_tokens += run.stats.new_tokens
        for record in run.rounds:
            if record.drafter is not None:
                rounds[record.drafter] += 1
                drafted[record.drafter] += record.drafted_tokens
                accepted[record.drafter] += record.accepted_tokens
    return {
        name: {
            "rounds": rounds[name],
            "drafted_tokens": drafted[name],
            "accepted_tokens": accepted[name],
            "acceptance_rate": accepted[name] / drafted[name] if drafted[name] else None,
            "share_of_tokens": accepted[name] / num_tokens if num_tokens else None,
        }
        for name in sorted(rounds)
    }
