"""The rate rule: how many tokens of a draft are worth their cost.

What has to be maximised is the long-run rate of tokens and not a round's own ratio (a renewal reward process, its
fraction by Dinkelbach 1967). With rate r a round of k drafted tokens gains 1 + sum of a_j - r * (t(1 + k) + D(k)),
where a_j is the probability that the first j tokens all stand. All gains here are over a plain round, in tokens.

The search ends where even tokens that all stood could not make up for what they cost (`least_ahead`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice

import numpy as np

FORESIGHT = 16  # tokens that a forecast looks ahead: a step of a staircase is no wider on any kernel seen


def least_ahead(pass_s: Sequence[float]) -> list[float]:
    """[widths]: the least seconds that a further row takes behind a pass of width w, on average over some number.

    A draft whose tokens so far all stand with a probability below the rate times that is worth nothing more.
    """
    times, widths = np.array(pass_s), np.arange(len(pass_s))
    further = widths[None, :] - widths[:, None]
    each_s = np.where(further > 0, times[None, :] - times[:, None], np.inf) / np.maximum(further, 1)
    found: list[float] = each_s.min(axis=1).tolist()
    return found


def best_length(
    confidences: Iterable[float], pass_s: Sequence[float], ahead_s: Sequence[float], rate: float, most: int
) -> tuple[int, float]:
    """(tokens k to keep, gain in tokens over a plain round) of a draft whose drafting is paid for or free.

    `confidences` [n]: probability that token j stands if those before it do, asked for only as far as needed;
    `pass_s[w]`: seconds of a pass of width w; `ahead_s`: of these, `least_ahead`.
    """
    best, best_gain = 0, 0.0
    reach, expected = 1.0, 0.0
    plain_s = pass_s[1]
    for count, confidence in enumerate(islice(confidences, most), 1):
        reach *= confidence
        expected += reach
        gain = expected - rate * (pass_s[count + 1] - plain_s)
        if gain > best_gain:
            best, best_gain = count, gain
        if reach <= rate * ahead_s[count + 1]:
            break
    return best, best_gain


def forecast(
    start: int,
    reach: float,
    expected_confidences: Sequence[float],
    pass_s: Sequence[float],
    ahead_s: Sequence[float],
    token_s: float,
    rate: float,
    most: int,
) -> tuple[int, float]:
    """(further tokens to draft, their gain) behind `start` drafted ones that all stand with probability `reach`.

    `expected_confidences[j]`: probability to expect of the j-th further token; `token_s`: seconds to draft one more.
    """
    best, best_gain = 0, 0.0
    expected, here_s = 0.0, pass_s[start + 1]
    most = min(most - start, len(expected_confidences))
    for count, confidence in enumerate(expected_confidences[: max(most, 0)], 1):
        reach *= confidence
        expected += reach
        gain = expected - rate * (pass_s[start + count + 1] - here_s + count * token_s)
        if gain > best_gain:
            best, best_gain = count, gain
        if reach <= rate * (ahead_s[start + count + 1] + token_s):
            break
    return best, best_gain


def ceiling(pass_s: Sequence[float], token_s: float, most: int) -> tuple[int, float]:
    """(draft length, speedup) if every drafted token stood: no drafter of this cost can gain more on this machine."""
    speedups = [(k, (1 + k) * pass_s[1] / (pass_s[1 + k] + k * token_s)) for k in range(most + 1)]
    return max(speedups, key=lambda pair: pair[1])


def expected_speedup(acceptance_rate: float, num_drafted: int, pass_s: Sequence[float], token_s: float) -> float:
    """Leviathan 2211.17192 theorem 3.8 with a pass that costs what its width costs, every token alike and independent.

    With pass_s flat and token_s = c * pass_s[1] it is their (1 - a^(k+1)) / ((1 - a) (k c + 1)).
    """
    if acceptance_rate >= 1:
        tokens = num_drafted + 1.0
    else:
        tokens = (1 - acceptance_rate ** (num_drafted + 1)) / (1 - acceptance_rate)
    return tokens * pass_s[1] / (pass_s[1 + num_drafted] + num_drafted * token_s)
