"""What is learnt of a drafter: how likely its tokens are accepted by their evidence, and what asking it gains.

A drafter's own probabilities are unreliable: greedy ones are always 1, and a domain that the draft knows badly shows
only in outcomes. Old outcomes fade, since texts change. What was drafted and not verified is an outcome as well, as
soon as the text shows whether it was right.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import mul
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from edgespec.control import constants as c
from edgespec.types import Draft, Evidence, TokenIds, Verdict

_SLOPE = 0.5  # prior for evidence whose slope is not known
_MOST_PENDING = 64  # unused drafts that wait for the text that decides about them
Predictor = Callable[[Evidence], float]
_Kept = tuple[
    list[Annotated[float, Meta(ge=-1e9, le=1e9)]],
    list[Annotated[float, Meta(gt=0, le=1e9)]],
    Annotated[float, Meta(ge=0, le=c.MOST_TRIAL_TOKENS)],
]
_HIGHEST = math.log(c.MOST_PROBABILITY / (1.0 - c.MOST_PROBABILITY))


class Logistic:
    """Logistic regression for one drafter in one kind of text, by online Newton steps of diagonal curvature.

    The score is a bias, the recent error, since drafts are good or bad over stretches of text, and the evidence, each
    times its weight.
    """

    def __init__(self, prior: Sequence[float] = (-0.2,)) -> None:
        """`prior`: the bias, then the weights of the evidence; _SLOPE for those not given."""
        self._prior = (prior[0], _SLOPE, *prior[1:])
        self.weights: list[float] = []
        self.precisions: list[float] = []
        self._recent_error = 0.0

    def predictor(self) -> Predictor:
        """The probability that a token of a draft is accepted, given that all before it were, by its evidence.

        As of now: it ignores what is observed later, and is fast for many tokens.
        """
        self._grow(2)
        common, slopes = self.weights[0] + self.weights[1] * self._recent_error, self.weights[2:]

        def predicted(evidence: Evidence) -> float:
            if len(evidence) > len(slopes):
                self._grow(2 + len(evidence))
                slopes[:] = self.weights[2:]
            return _chance(sum(map(mul, slopes, evidence), common))

        return predicted

    def observe(self, evidence: Evidence, *, accepted: bool) -> None:
        """Learn the outcome of a token whose predecessors were all accepted."""
        inputs = (1.0, self._recent_error, *evidence)
        self._grow(len(inputs))
        weights, precisions, least = self.weights, self.precisions, 1.0
        probability = _chance(sum(map(mul, weights, inputs)))
        error, curvature = accepted - probability, max(probability * (1.0 - probability), 0.02)
        for number, value in enumerate(inputs):
            known = max(precisions[number] * c.LOGISTIC_MEMORY, least) + curvature * value * value
            precisions[number] = known
            weights[number] += error * value / known
            least = c.PRECISION
        # its standard deviation is about 0.1
        self._recent_error += (1.0 - c.ERROR_MEMORY) * (4.0 * error - self._recent_error)

    def _grow(self, size: int) -> None:
        for number in range(len(self.weights), size):
            self.weights.append(self._prior[number] if number < len(self._prior) else _SLOPE)
            self.precisions.append(c.PRECISION if number else 1.0)


def _chance(score: float) -> float:
    """The probability of these log odds; no token is certain, nor impossible."""
    return 1.0 / (1.0 + math.exp(-min(max(score, -_HIGHEST), _HIGHEST)))


@dataclass(slots=True)
class DrafterState:
    """What is known of one drafter in one kind of text: its calibration, and of a paid one when to probe it again.

    `gain`: tokens per draft, net of drafting, not of reading; a forecast until a draft was priced.
    `allowed`: tokens that it may still lose against decoding without it. What it is asked for must be covered; the
    bank's share of all tokens and prompts is added, and what its drafts gain. So it cannot make decoding slower by more
    than that share, however much the free drafters have gained, and a long prompt is read once drafts have paid for it.
    """

    calibrator: Logistic
    gain: float = 0.0
    times_asked: int = 0
    probe_in: int = 0
    allowed: float = c.TRIAL_TOKENS

    def confidences(self, draft: Draft) -> list[float]:
        """The confidence in each token of a draft: calibrated, or the drafter's own if it gives no evidence."""
        own: list[float] = draft.confidences.tolist()
        return list(map(self.calibrator.predictor(), draft.evidence)) if draft.evidence else own

    def learn(self, draft: Draft, accepted: int) -> None:
        """The first `accepted` tokens of a chain were accepted and the next one, if there is one, was rejected."""
        for index, evidence in enumerate((draft.evidence or ())[: accepted + 1]):
            self.calibrator.observe(evidence, accepted=index < accepted)

    def learn_verdict(self, draft: Draft, verdict: Verdict) -> None:
        """Update from the nodes whose parents were accepted."""
        if draft.evidence is None or draft.is_chain:
            self.learn(draft, len(verdict.accepted_nodes))
            return
        for node, accepted in outcomes(draft, verdict):
            self.calibrator.observe(draft.evidence[node], accepted=accepted)

    def allow(self, tokens: float) -> None:
        """So many more tokens may be lost, or fewer."""
        self.allowed = min(max(self.allowed + tokens, 0.0), c.MOST_TRIAL_TOKENS)

    @property
    def spendable(self) -> float:
        """Tokens that asking it may cost now: what it may lose, or half of what the next rounds gain if all goes on so.

        Else reading what it missed while lookups were better would keep a good drafter away for long.
        """
        is_known = self.times_asked >= c.KNOWN_DRAFTS
        expected = c.RISKED * c.READING_ROUNDS * self.gain if is_known else 0.0
        return max(self.allowed, min(expected, c.MOST_TRIAL_TOKENS))

    def asked(self, gain: float | None) -> None:
        """A paid drafter was asked: its draft is expected to gain `gain` tokens.

        None: nobody knows yet what verifying drafts costs, so it is asked again soon.
        """
        if gain is None:
            self.probe_in = 1
            return
        self.times_asked += 1
        self.gain += max(1.0 - c.RATE_MEMORY, 1.0 / (self.times_asked + 4)) * (gain - self.gain)
        self.probe_in = c.PROBE_EVERY

    def to_json(self) -> list[Any]:
        """What was learnt, for the next run: what the drafter lost is not lost again."""
        return [self.calibrator.weights, self.calibrator.precisions, self.allowed]

    def restore(self, kept: Any) -> None:
        """Continue from what `to_json` returned; raises msgspec.ValidationError when it is something else."""
        weights, precisions, allowed = msgspec.convert(kept, _Kept)
        if len(weights) != len(precisions):
            raise msgspec.ValidationError(f"{len(weights)} weights have {len(precisions)} precisions")
        self.calibrator.weights, self.calibrator.precisions, self.allowed = weights, precisions, allowed


def outcomes(draft: Draft, verdict: Verdict) -> list[tuple[int, bool]]:
    """(node, whether it was accepted) of every node whose parent was accepted."""
    accepted = set(verdict.accepted_nodes)
    parents = (-1, *verdict.accepted_nodes)
    return [(child, child in accepted) for parent in parents for child in draft.children_of(parent)]


class UnusedDrafts:
    """Unused drafts until the text shows how many of their tokens were right: free drafters learn without a pass."""

    def __init__(self) -> None:
        self._pending: list[tuple[str, Draft, int]] = []  # drafter, draft, and the place in the text of its first token

    def clear(self) -> None:
        self._pending.clear()

    def add(self, drafter: str, start: int, draft: Draft) -> None:
        """A draft of `drafter` for position `start`."""
        if draft.num_tokens:
            self._pending.append((drafter, draft, start))

    def resolved(self, token_ids: TokenIds, new_ids: Sequence[int]) -> list[tuple[str, Draft, int]]:
        """(drafter, draft, number of its first tokens that agree) of each that the text decides by now.

        The text: the committed `token_ids` [n], and `new_ids` behind them.
        """
        if not self._pending:
            return []
        pending, self._pending, found = self._pending[-_MOST_PENDING:], [], list[tuple[str, Draft, int]]()
        begin = min(start for *_, start in pending)
        text = [*token_ids[begin:].tolist(), *new_ids]
        for drafter, draft, start in pending:
            drafted, told = draft.token_ids.tolist(), text[start - begin :]
            agreed = next((n for n, (ours, its) in enumerate(zip(drafted, told, strict=False)) if ours != its), None)
            if agreed is not None or len(drafted) <= len(told):
                found.append((drafter, draft, len(drafted) if agreed is None else agreed))
            else:
                self._pending.append((drafter, draft, start))
        return found
