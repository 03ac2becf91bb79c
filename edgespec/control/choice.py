"""Which drafter: Hedge over policies (Freund & Schapire 1997; fixed share of Herbster & Warmuth 1998).

Policies, not drafters, are weighed: "never draft", "this drafter wherever it expects a gain", "whichever expects most".
A drafter that copies is right in bursts, so the last one is usually best; but it believes expectations, and the weights
do not: they are moved by the tokens really gained, net of what they cost at the running rate.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

BEST, NEVER = "best", "never"
_RATE = 0.15  # of the weights' logarithms per net token
_SHARE = 0.01  # of all weight that is spread again each round, so that a change of domain is followed
_MOST_GAIN = 8.0  # net tokens of one round that are believed; fewer, and of those that copy long runs all seem alike


class Hedge:
    """Weights of the policies over `drafters`."""

    def __init__(self, drafters: Iterable[str]) -> None:
        self._weights = dict.fromkeys((BEST, NEVER, *drafters), 1.0)
        self._weights[BEST] = 2.0

    @property
    def weights(self) -> dict[str, float]:
        """The weights, summing to 1."""
        total = sum(self._weights.values())
        return {name: weight / total for name, weight in self._weights.items()}

    def pick(self, gains: Mapping[str, float]) -> str | None:
        """The drafter that the heaviest policy takes, given what each expects to gain in tokens; None: do not draft."""
        leader = max(self._weights, key=self._weights.__getitem__)
        return choice_of(leader, gains)

    def second(self, gains: Mapping[str, float]) -> str | None:
        """Who takes over from a drafter that promised more than it has drafted: the best of the others' `gains`."""
        leader = max(self._weights, key=self._weights.__getitem__)
        return None if leader == NEVER else choice_of(BEST, gains)

    def update(self, gains: Mapping[str, float], net_tokens: Mapping[str, float]) -> None:
        """Of one round: `gains` as they were expected, and the `net_tokens` of the drafters of which they are known."""
        for policy in self._weights:
            drafter = choice_of(policy, gains)
            if drafter is not None and drafter in net_tokens:
                net = max(-_MOST_GAIN, min(_MOST_GAIN, net_tokens[drafter]))
                self._weights[policy] *= math.exp(_RATE * net)

    def share(self) -> None:
        """Once a round: spread a little of all weight evenly, so that no policy is ever beyond recall."""
        total = sum(self._weights.values())
        spread = _SHARE / len(self._weights)
        self._weights = {name: (1 - _SHARE) * weight / total + spread for name, weight in self._weights.items()}


def choice_of(policy: str, gains: Mapping[str, float]) -> str | None:
    """What a policy does when the drafters expect `gains` over plain decoding."""
    if policy == NEVER or not gains:
        return None
    drafter = max(gains, key=gains.__getitem__) if policy == BEST else policy
    return drafter if gains.get(drafter, 0.0) > 0 else None


def add_ucb_bonus(gains: dict[str, float], hopes: Mapping[str, float]) -> None:
    """Of the drafters with `hopes` that expect to gain, the most hopeful one changes places with the most promising.

    `hopes`: tokens by which a drafter whose drafts cost time may be better than it expects. Of what is not asked
    nothing is learnt, so that some bad luck at first would leave the field to a worse one for long. Whether any is
    asked is no matter of hope: the largest gain stays what it is.
    """
    able = [name for name in hopes if gains[name] > 0]
    if len(able) > 1:
        promising = max(able, key=gains.__getitem__)
        hopeful = max(able, key=lambda name: gains[name] + hopes[name])
        gains[promising], gains[hopeful] = gains[hopeful], gains[promising]
