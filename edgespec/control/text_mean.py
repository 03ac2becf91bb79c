"""Means within a text that begin with what is usual among texts.

Texts differ in how often drafts are right, by more than chance within one of them. So what the last text was like says
less of a new one than what texts are like on average, and a few rounds of its own say more than both (partial pooling,
as of James & Stein 1961).
"""

from __future__ import annotations

from dataclasses import dataclass

from edgespec.control import constants as c


@dataclass(slots=True)
class TextMean:
    """The mean of what was observed in the text in progress.

    `rate`: least weight of a new value; `prior`: as many values the usual counts for; `value`: the mean.
    """

    rate: float
    prior: float
    value: float = 0.0
    _own: float = 0.0  # the mean of this text's values alone, of which `_seen` there are
    _seen: int = 0
    _usual: float = 0.0
    _weight: float = 0.0  # of the texts that `_usual` was learnt from, decaying

    @property
    def is_known(self) -> bool:
        """Whether anything was observed, in any text."""
        return self._seen + self._weight > 0

    def begin(self) -> None:
        """Another text begins."""
        if self._seen:
            weight = self._seen / (self._seen + self.prior)
            self._weight = (1.0 - c.USUAL_RATE) * self._weight + weight
            self._usual += weight / self._weight * (self._own - self._usual)
            self.value, self._own, self._seen = self._usual, 0.0, 0

    def observe(self, value: float) -> None:
        self._seen += 1
        self._own += (value - self._own) / self._seen
        self.value += max(self.rate, 1.0 / (self._seen + self.prior)) * (value - self.value)


class DecisionScore(TextMean):
    """Tokens gained per decision, net of what it cost, whether anything was drafted or not.

    Lookups are right in bursts and rarely in between, so nothing short of the mean tells whether looking pays.
    """

    def __init__(self) -> None:
        super().__init__(c.SCORE_RATE, c.SCORE_FIRST)

    @property
    def pays(self) -> bool:
        return self.value > c.LEAST_SCORE
