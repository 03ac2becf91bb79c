"""What is learnt of each drafter, kept apart by kind of text, and the unused drafts that the text decides about later.

Acceptance differs between the kinds: how the text is sampled, and whether its prompt is long.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

from edgespec.control import constants as c
from edgespec.control.confidence import BetaTable, Calibrator, Logistic
from edgespec.drafters.base import Drafter, DraftRequest
from edgespec.types import Draft, TokenIds, Verdict

_MOST_PENDING = 64  # unused drafts that wait for the text that decides about them


@dataclass(slots=True)
class DrafterState:
    """What is known of one drafter: how its evidence is calibrated, and of a paid one when to probe it again.

    `gain`: tokens per draft, net of drafting, not of reading; a forecast until a draft was priced.
    """

    calibrator: Calibrator
    gain: float = 0.0
    times_asked: int = 0
    probe_in: int = 0
    probe_interval: int = c.PROBE_EVERY

    @classmethod
    def of(cls, drafter: Drafter) -> Self:
        """The initial state."""
        return cls(BetaTable() if drafter.evidence_kind == "bucket" else Logistic(drafter.prior))

    def confidences(self, draft: Draft) -> Iterator[float]:
        """The confidence in each token of a draft: calibrated, or the drafter's own if it gives no evidence."""
        if not draft.evidence:
            return iter(draft.confidences.tolist())
        places = range(draft.num_tokens) if draft.is_chain else draft.depths()
        return map(self.calibrator.predictor(), places, draft.evidence)

    def learn(self, draft: Draft, accepted: int) -> None:
        """The first `accepted` tokens of a chain were accepted and the next one, if there is one, was rejected."""
        for index, evidence in enumerate((draft.evidence or ())[: accepted + 1]):
            self.calibrator.observe(index, evidence, accepted=index < accepted)

    def learn_verdict(self, draft: Draft, verdict: Verdict) -> None:
        """Update from the nodes whose parents were accepted."""
        if draft.evidence is None or draft.is_chain:
            self.learn(draft, len(verdict.accepted_nodes))
            return
        for node, depth, accepted in outcomes(draft, verdict):
            self.calibrator.observe(depth, draft.evidence[node], accepted=accepted)

    def asked(self, gain: float | None, *, is_best: bool) -> None:
        """A paid drafter was asked: its draft is expected to gain `gain` tokens, more than others if `is_best`.

        None: nobody knows yet what verifying drafts costs, so it is asked again soon.
        """
        if gain is None:
            self.probe_in = 1
            return
        self.times_asked += 1
        self.gain += max(c.GAIN_RATE, 1.0 / (self.times_asked + 4)) * (gain - self.gain)
        self.probe_interval = c.PROBE_EVERY if is_best else min(2 * self.probe_interval, c.PROBE_AT_MOST)
        self.probe_in = self.probe_interval


def outcomes(draft: Draft, verdict: Verdict) -> list[tuple[int, int, bool]]:
    """(node, its depth, whether it was accepted) of every node whose parent was accepted."""
    accepted = set(verdict.accepted_nodes)
    found = []
    for depth, parent in enumerate((-1, *verdict.accepted_nodes)):
        found += [(child, depth, child in accepted) for child in draft.children_of(parent)]
    return found


class UnusedDrafts:
    """Unused drafts until the text shows how many of their tokens were right: free drafters learn without a pass."""

    def __init__(self) -> None:
        # drafter, draft, its tokens, how many of them agree so far, and the place in the text of the next one
        self._pending: deque[tuple[str, Draft, list[int], int, int]] = deque(maxlen=_MOST_PENDING)

    def clear(self) -> None:
        self._pending.clear()

    def add(self, drafter: str, start: int, draft: Draft) -> None:
        """A draft of `drafter` for position `start`."""
        if draft.num_tokens:
            self._pending.append((drafter, draft, draft.token_ids.tolist(), 0, start))

    def resolved(self, token_ids: TokenIds) -> Iterator[tuple[str, Draft, int]]:
        """(drafter, draft, number of its first tokens that agree) of each that the committed `token_ids` [n] decide."""
        begin = min((place for *_, place in self._pending), default=token_ids.size)
        text = token_ids[begin:].tolist()
        for _ in range(len(self._pending)):
            drafter, draft, drafted, agreed, place = self._pending.popleft()
            while agreed < len(drafted) and place - begin < len(text) and drafted[agreed] == text[place - begin]:
                agreed, place = agreed + 1, place + 1
            if agreed < len(drafted) and place - begin >= len(text):
                self._pending.append((drafter, draft, drafted, agreed, place))
            else:
                yield drafter, draft, agreed


class Kinds:
    """What is known of each drafter in each kind of text (`kind_of`)."""

    def __init__(self, drafters: Mapping[str, Drafter]) -> None:
        self._drafters = drafters
        self._states: dict[str, dict[str, DrafterState]] = {}

    def of(self, kind: str) -> dict[str, DrafterState]:
        """The drafters' states in one kind, made when first asked for."""
        if kind not in self._states:
            self._states[kind] = {name: DrafterState.of(drafter) for name, drafter in self._drafters.items()}
        return self._states[kind]

    def to_json(self) -> dict[str, Any]:
        """What was learnt, for the next run."""
        kinds = self._states.items()
        return {kind: {name: state.calibrator.to_json() for name, state in states.items()} for kind, states in kinds}

    def restore(self, kept: object) -> None:
        """Continue from what `to_json` returned; what does not fit is ignored."""
        for kind, drafters in kept.items() if isinstance(kept, dict) else ():
            states = self.of(kind)
            for name, state in drafters.items() if isinstance(drafters, dict) else ():
                if name not in states:
                    continue
                try:
                    states[name].calibrator.restore(state)
                except (ValueError, TypeError, KeyError, IndexError):
                    states[name] = DrafterState.of(self._drafters[name])


def kind_of(request: DraftRequest, prompt_tokens: int) -> str:
    """The kind of text: temperature, whether the rule compares distributions or a grammar constrains, a long prompt.

    Answers about a long text are of another kind than others: fewer tokens of heads are accepted
    (docs/benchmarks/heads.md).
    """
    temperature = request.sampler.sampling.temperature
    heat = "greedy" if temperature == 0 else "cool" if temperature < 0.5 else "warm" if temperature <= 1.1 else "hot"
    kind = f"{heat} rejection" if request.needs_distributions else heat
    kind = kind if request.sampler.constraint is None else f"{kind} constrained"
    return f"{kind} long" if prompt_tokens >= c.LONG_PROMPT else kind
