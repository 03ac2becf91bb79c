"""What rounds cost and earn, and the rate rule: how many tokens of a draft pay for their rows in the target's pass.

What has to be maximised is the long-run rate of tokens and not a round's own ratio (a renewal reward process, its
fraction by Dinkelbach 1967). With rate r a round of k drafted tokens gains 1 + sum of a_j - r * (t(1 + k) + D(k)),
where a_j is the probability that the first j tokens are all accepted. All gains here are over a plain round, in tokens.
The search ends where even tokens that were certain could not make up for what they cost (`least_ahead`).

Where passes are shared, each sequence pays 1/n of a plain pass over all n, so that a token of any is worth the same and
the total tokens per second are maximised. A draft costs what its rows add to the pass that runs anyway, or its share of
what all drafts add, whichever is more: where costs rise in steps, each draft alone would seem free beside the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from itertools import islice
from typing import NamedTuple

from edgespec.control import constants as c
from edgespec.control.confidence import Predictor
from edgespec.control.cost import WIDEST, CostCurve, DraftCost, moved
from edgespec.types import Draft, Evidence

_MOST_FIRST_ROUND = 2.0  # plain passes that the first speculative round's overhead counts for
_WIDTHS = c.MAX_AUTO_LENGTH + c.FORESIGHT + 2  # that have prices


class Prices(NamedTuple):
    """What rounds cost now.

    `pass_s[w]`: seconds of a round with a pass of width w, without drafting; `ahead_s`: its `least_ahead`; `rate`:
    tokens per second that the run earns, which converts seconds into tokens.
    """

    pass_s: Sequence[float]
    ahead_s: Sequence[float]
    rate: float


class RunCosts:
    """What passes, drafts and rounds cost with the threads in use, and how many tokens per second the run earns.

    `curve`: the target's passes; `drafts`: each drafter's tokens; `threads`: the number that both were learnt with;
    `splits`: the engine runs a pass with different numbers of rows of several sequences as several passes.
    """

    def __init__(
        self, curve: CostCurve, drafts: Mapping[str, DraftCost], threads: int = 1, *, splits: bool = False
    ) -> None:
        self.curve, self.drafts, self.splits = curve, dict(drafts), splits
        self.usual = self.curve, self.drafts  # with this number of threads
        self.choosing_s = 0.0  # choosing one token when nothing is drafted
        self._round_s, self._num_rounds = 0.0, 0
        self._known: dict[int, tuple[CostCurve, dict[str, DraftCost]]] = {}  # by threads
        self._threads = threads  # of the costs in use
        self._tokens, self._seconds = 0.0, 0.0  # of recent rounds, decaying
        self._sharing = 1, 0, 0  # sequences that decode in the next passes, rows of the others, those that are drafts
        self.was_shared = False  # the last pass, which no single round's time tells of
        self._made_of: tuple[object, object] = None, None  # the shape and the sharing of the next two
        self._unit, self._ahead = list[float](), list[float]()  # seconds of a pass and `least_ahead`, at the usual pace

    def add(self, drafters: Mapping[str, bool]) -> None:
        """These are drafters, too, whose drafts cost the same at any length or not; their costs are not known."""
        for drafts in (self.drafts, *(drafts for _, drafts in self._known.values())):
            for name, is_once in drafters.items():
                drafts.setdefault(name, DraftCost(is_once=is_once))

    def use_threads(self, threads: int) -> None:
        """The costs of this number of threads from now on; unknown ones start as a copy of the current.

        A guess is copied too: shared, the first number of threads that is timed would set the costs of all.
        """
        if threads != self._threads:
            self._known[self._threads] = self.curve, self.drafts
            self.curve, self.drafts = self._known.get(threads) or deepcopy((self.curve, self.drafts))
            self._threads = threads

    def share_passes(self, num_sequences: int, other_rows: int, prompt_rows: int = 0) -> None:
        """The next passes hold `other_rows` rows of others as well, `prompt_rows` of them of prompts.

        `num_sequences`: those that decode.
        """
        now = num_sequences, other_rows, max(other_rows - prompt_rows - (num_sequences - 1), 0)
        if now == self._sharing:
            return  # the same object, so that prices need not be made anew
        before_s, is_as_many = self.plain_s(), num_sequences == self._sharing[0]
        self._sharing = now
        if not is_as_many:
            self._seconds *= self.plain_s() / before_s

    @property
    def is_shared(self) -> bool:
        """Whether the next passes hold rows of other sequences."""
        return self._sharing[:2] != (1, 0)

    @property
    def most_rows(self) -> int:
        """How many rows of one sequence have a known cost; always a few, even beside a prompt (no logits)."""
        return max(WIDEST - self._sharing[1], 9)

    def draft(self, name: str) -> DraftCost:
        """What a drafter's tokens cost, given the sequences that share the next passes."""
        cost = self.drafts[name].among(self._sharing[0])
        if self.curve.is_scaled:
            cost.scale(self.curve.at(1))
        return cost

    @property
    def round_s(self) -> float:
        """What a speculative round takes beyond its draft, its pass and choosing its tokens, in seconds.

        That is negligible beside a large model's pass, and longer than a tiny one's. The first round may have waited
        for the machine: if it were believed, no draft might ever seem to pay again.
        """
        most_s = math.inf if self._num_rounds >= c.KNOWN_AFTER else _MOST_FIRST_ROUND * self.plain_s()
        return min(self._round_s, most_s)

    def plain_s(self) -> float:
        """Seconds of a plain pass, or one sequence's share of it."""
        return self.pass_s(1)

    def pass_s(self, num_rows: int) -> float:
        """Seconds of a pass over `num_rows` rows, as a draft may have, or one sequence's share of it."""
        return self.curve.pace * self._units()[num_rows]

    def _units(self) -> list[float]:
        """`pass_s` by rows, at the usual pace; 0 for none."""
        shape = self.curve.shape
        if self._made_of[0] is not shape or self._made_of[1] is not self._sharing:
            self._unit = self._shared_units() if self.is_shared else shape[:_WIDTHS]
            self._made_of, self._ahead = (shape, self._sharing), least_ahead(self._unit)
        return self._unit

    def _shared_units(self) -> list[float]:
        count, other_rows, drafted = self._sharing
        beside = other_rows - (count - 1)  # rows of drafts and prompts of others
        plain, before = self._all(0, count) / count, self._all(beside - drafted, count)
        whole = [self._all(more, count) for more in range(beside, beside + _WIDTHS - 1)]
        shares = ((each - before) * more / max(more + drafted, 1) for more, each in enumerate(whole))
        return [0.0, *(plain + max(each - whole[0], share) for each, share in zip(whole, shares, strict=True))]

    def _all(self, more: int, count: int) -> float:
        """A pass over a row of each of `count` sequences and `more` rows of some of them, at the usual pace."""
        if self.splits and count > 1:
            return self.curve.usually(count) + self.curve.usually(more)
        return self.curve.usually(count + more)

    def _all_s(self, more: int, count: int) -> float:
        """Seconds of such a pass."""
        return self.curve.pace * self._all(more, count)

    def prices(self) -> Prices:
        """Seconds of rounds, with the overhead if something is drafted; the rate is no less than a plain round's."""
        pace, unit = self.curve.pace, self._units()
        plain_s, round_s = pace * unit[1], self.round_s
        pass_s = [pace * each_s + round_s for each_s in unit]
        pass_s[:2] = 0.0, plain_s
        earned = self._tokens / self._seconds if self._seconds else 0.0
        return Prices(pass_s, [pace * ahead_s for ahead_s in self._ahead], max(earned, 1.0 / plain_s))

    def earned(self, num_tokens: float, seconds: float) -> None:
        """A round emitted `num_tokens` in `seconds`."""
        self._tokens = c.RATE_MEMORY * self._tokens + num_tokens
        self._seconds = c.RATE_MEMORY * self._seconds + seconds

    # -- learning

    def observe_shared(self, widths: Sequence[int], seconds: float) -> None:
        """Learn what a pass over rows of several sequences took, `widths` of each; no drafts: all are 1."""
        count, num_rows = len(widths), sum(widths)
        if not self.curve.is_sure_of_plain:  # learn the cost of plain passes first
            self.curve.observe(1, seconds * self.curve.at(1) / self._all_s(num_rows - count, count))
            return
        is_plain = num_rows == count
        if self.splits and max(widths) > min(widths):  # all but the second of its passes are known well
            seconds, num_rows = seconds - self.curve.at(count), num_rows - count
        self.curve.observe(num_rows, seconds, is_plain=is_plain)

    def parts_of(self, widths: Sequence[int], prompt_rows: int) -> list[float]:
        """Each decoding sequence's share, in seconds, of a pass with rows of `widths` and `prompt_rows` of prompts.

        They sum to the whole pass less what the prompts add; what the drafts add is divided by their rows.
        """
        count, drafted = len(widths), sum(widths) - len(widths)
        plain_s = self._all_s(0, count) / count
        added_s = self._all_s(drafted + prompt_rows, count) - self._all_s(prompt_rows, count)
        return [plain_s + added_s * (width - 1) / max(drafted, 1) for width in widths]

    def observe_round(self, num_tokens: int, seconds: float) -> float:
        """A round of `num_tokens` took `seconds` besides drafting and its pass; returns the part due to speculation."""
        extra_s = max(seconds - num_tokens * self.choosing_s, 1e-7)
        self._num_rounds += 1
        is_second = self._num_rounds == c.KNOWN_AFTER
        self._round_s = min(self._round_s, extra_s) if is_second else moved(self._round_s, extra_s)
        return extra_s


# -- the rate rule


def least_ahead(pass_s: Sequence[float]) -> list[float]:
    """[widths]: the least average cost in seconds of some number of additional rows in a pass of width w.

    A draft that is accepted so far with a probability below the rate times this cannot gain any more.
    """
    found = [math.inf] * len(pass_s)
    corners = list(range(1, len(pass_s) + 1))  # the next one of the lower convex hull of what is wider
    for width in reversed(range(len(pass_s) - 1)):
        corner, least = width + 1, pass_s[width + 1] - pass_s[width]
        while found[corner] <= least:
            corner = corners[corner]
            least = (pass_s[corner] - pass_s[width]) / (corner - width)
        found[width], corners[width] = least, corner
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
