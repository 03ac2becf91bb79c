"""The rate rule: how many tokens of a draft pay for their rows in the target's pass.

What has to be maximised is the long-run rate of tokens and not a round's own ratio (a renewal reward process, its
fraction by Dinkelbach 1967). With rate r a round of k drafted tokens gains 1 + sum of a_j - r * (t(1 + k) + D(k)),
where a_j is the probability that the first j tokens are all accepted. All gains here are over a plain round, in tokens.

The search ends where even tokens that were certain could not make up for what they cost (`least_ahead`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import NamedTuple

from edgespec.control import constants as c
from edgespec.control.confidence import Predictor
from edgespec.types import Draft, Evidence


class Prices(NamedTuple):
    """What rounds cost now.

    `pass_s[w]`: seconds of a round with a pass of width w, without drafting; `ahead_s`: its `least_ahead`; `rate`:
    tokens per second that the run earns, which converts seconds into tokens.
    """

    pass_s: Sequence[float]
    ahead_s: Sequence[float]
    rate: float


def least_ahead(pass_s: Sequence[float]) -> list[float]:
    """[widths]: the least average cost in seconds of some number of additional rows in a pass of width w.

    A draft that is accepted so far with a probability below the rate times this cannot gain any more.
    """
    last = len(pass_s) - 1
    found, hull = [math.inf] * len(pass_s), [last]  # the lower convex hull of what is wider, the nearest corner last
    for width in range(last - 1, -1, -1):
        nearest = hull[-1]
        least = (pass_s[nearest] - pass_s[width]) / (nearest - width)
        while nearest != last and least >= found[nearest]:
            hull.pop()
            nearest = hull[-1]
            least = (pass_s[nearest] - pass_s[width]) / (nearest - width)
        found[width] = least
        hull.append(width)
    return found


def while_it_may_pay(predict: Predictor, prices: Prices, confidences: list[float]) -> Callable[[int, Evidence], bool]:
    """`DraftRequest.should_continue` for a drafter whose tokens are free: until even certain ones would not pay.

    It ends a draft where `best_length` ends its search. The confidence in each token is added to `confidences`.
    """
    reach, rate, ahead_s = 1.0, prices.rate, prices.ahead_s

    def should_continue(count: int, evidence: Evidence) -> bool:
        nonlocal reach
        confidence = predict(evidence)
        confidences.append(confidence)
        reach *= confidence
        return reach > rate * ahead_s[count + 1]

    return should_continue


def may_pay(count: int, reach: float, confidence: float, prices: Prices, token_s: float, most: int) -> bool:
    """Whether some further tokens of `token_s` seconds each pay, behind `count` all accepted with probability `reach`.

    They are expected to be as certain as the last one, of probability `confidence`.
    """
    pass_s, ahead_s, rate = prices
    if count >= most or reach <= rate * (ahead_s[count + 1] + token_s):
        return False
    expected = 0.0
    for further in range(1, min(c.FORESIGHT, most - count) + 1):
        reach *= confidence
        expected += reach
        if expected > rate * (pass_s[count + further + 1] - pass_s[count + 1] + further * token_s):
            return True
    return False


def best_length(confidences: Iterable[float], prices: Prices, most: int, token_s: float = 0.0) -> tuple[int, float]:
    """(tokens k to keep, gain in tokens over a plain round) of a finished draft.

    `confidences` [n]: probability that token j is accepted if those before it are, asked for only as far as needed.
    `token_s`: seconds that each still takes to draft.
    """
    pass_s, ahead_s, rate = prices
    best, best_gain = 0, 0.0
    reach, expected = 1.0, 0.0
    plain_s = pass_s[1]
    for count, confidence in enumerate(islice(confidences, most), 1):
        reach *= confidence
        expected += reach
        gain = expected - rate * (pass_s[count + 1] - plain_s + count * token_s)
        if gain > best_gain:
            best, best_gain = count, gain
        if reach <= rate * (ahead_s[count + 1] + token_s):
            break
    return best, best_gain


def best_nodes(draft: Draft, confidences: Sequence[float], prices: Prices, most: int) -> tuple[int, float]:
    """(first nodes to keep, gain in tokens over a plain round), as `best_length`.

    Of a draft with branches either all nodes are kept, or as much of the main chain, which is listed first, as pays.
    """
    length = draft.main_chain.num_tokens
    kept, gain = best_length(confidences[:length], prices, most)
    if length < draft.num_tokens <= most:
        extra_s = prices.pass_s[draft.num_tokens + 1] - prices.pass_s[1]
        whole = sum(path_products(draft, confidences)) - prices.rate * extra_s
        if whole > gain:
            return draft.num_tokens, whole
    return kept, gain


def path_products(draft: Draft, confidences: Sequence[float]) -> list[float]:
    """The probability of every node's whole path, from those of the nodes given their parents."""
    found: list[float] = []
    for parent, confidence in zip(draft.parents.tolist(), confidences, strict=True):
        found.append(confidence * (found[parent] if parent >= 0 else 1.0))
    return found


def ceiling(pass_s: Sequence[float], token_s: float, most: int) -> tuple[int, float]:
    """(draft length, speedup) if all was accepted: no drafter of this cost can gain more on this machine."""
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
