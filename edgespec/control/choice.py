"""What is learnt of each drafter, kept apart by kind of text, and the unused drafts that the text decides about later.

Acceptance differs between the kinds: how the text is sampled, and whether its prompt is long.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

from edgespec.control import constants as c
from edgespec.control.confidence import Logistic
from edgespec.drafters.base import Drafter, DraftRequest
from edgespec.types import Draft, TokenIds, Verdict

_MOST_PENDING = 64  # unused drafts that wait for the text that decides about them


@dataclass(slots=True)
class DrafterState:
    """What is known of one drafter: how its evidence is calibrated, and of a paid one when to probe it again.

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

    @classmethod
    def of(cls, drafter: Drafter) -> Self:
        """The initial state."""
        return cls(Logistic(drafter.prior))

    def confidences(self, draft: Draft) -> Iterator[float]:
        """The confidence in each token of a draft: calibrated, or the drafter's own if it gives no evidence."""
        if not draft.evidence:
            return iter(draft.confidences.tolist())
        return map(self.calibrator.predictor(), draft.evidence)

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

    def asked(self, gain: float | None) -> None:
        """A paid drafter was asked: its draft is expected to gain `gain` tokens.

        None: nobody knows yet what verifying drafts costs, so it is asked again soon.
        """
        if gain is None:
            self.probe_in = 1
            return
        self.times_asked += 1
        self.gain += max(c.GAIN_RATE, 1.0 / (self.times_asked + 4)) * (gain - self.gain)
        self.probe_in = c.PROBE_EVERY

    def to_json(self) -> list[Any]:
        """What was learnt, for the next run: what the drafter lost is not lost again."""
        return [*self.calibrator.to_json(), self.allowed]

    def restore(self, kept: Any) -> None:
        """Continue from what `to_json` returned; raises ValueError or TypeError when it is something else."""
        *learnt, allowed = kept
        self.calibrator.restore(learnt)
        if not 0.0 <= allowed <= c.MOST_TRIAL_TOKENS:
            raise ValueError(f"a drafter may lose 0 to {c.MOST_TRIAL_TOKENS} tokens, not {allowed}")
        self.allowed = allowed


def outcomes(draft: Draft, verdict: Verdict) -> list[tuple[int, bool]]:
    """(node, whether it was accepted) of every node whose parent was accepted."""
    accepted = set(verdict.accepted_nodes)
    parents = (-1, *verdict.accepted_nodes)
    return [(child, child in accepted) for parent in parents for child in draft.children_of(parent)]


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
        return {kind: {name: state.to_json() for name, state in states.items()} for kind, states in kinds}

    def restore(self, kept: object) -> None:
        """Continue from what `to_json` returned; what does not fit is ignored."""
        for kind, drafters in kept.items() if isinstance(kept, dict) else ():
            states = self.of(kind)
            for name, state in drafters.items() if isinstance(drafters, dict) else ():
                if name not in states:
                    continue
                try:
                    states[name].restore(state)
                except (ValueError, TypeError, KeyError, IndexError):
                    states[name] = DrafterState.of(self._drafters[name])


def kind_of(request: DraftRequest, prompt_tokens: int) -> str:
    """The kind of text: temperature, whether the rule compares distributions or a grammar constrains, a long prompt.

    Answers about a long text are of another kind than others: fewer tokens of heads are accepted.
    """
    temperature = request.sampler.sampling.temperature
    heat = "greedy" if temperature == 0 else "cool" if temperature < 0.5 else "warm" if temperature <= 1.1 else "hot"
    kind = f"{heat} rejection" if request.needs_distributions else heat
    kind = kind if request.sampler.constraint is None else f"{kind} constrained"
    return f"{kind} long" if prompt_tokens >= c.LONG_PROMPT else kind
